"""Greedy returns: whether evaluations without noise are clearly worse than training, which samples actions."""

import math
from collections.abc import Sequence

from dppo.config import Config
from dppo.invocation import as_setting_and_flag
from dppo.records.flat import SHARE, WINDOW, Score

MIN_EVALUATIONS = 3  # all of which must be worse
CERTAIN = 4.0  # standard errors: evaluations share their seeds, which may be difficult ones
CLEAR = 0.2  # share of the return, below which a difference does not matter


def greedy_note(
    scores: Sequence[Score], config: Config, evaluations: Sequence[Score]
) -> str | None:
    """Return that the policy is worse without noise; None if that is not clear.

    Each evaluation in the last third of the run must be clearly worse than training at the beginning of that third and
    at its end, from different episodes: a policy that has just improved or become worse differs from one of the two.
    """
    if config.eval_stochastic or config.eval_env_kwargs or not scores:
        return None
    last = scores[-1]
    first = next(score for score in scores if score.step >= (1 - SHARE) * last.step)
    recent = [evaluation for evaluation in evaluations if evaluation.step >= first.step]
    has_new_episodes = first.episodes >= WINDOW and last.episodes - first.episodes >= WINDOW
    if len(recent) < MIN_EVALUATIONS or not has_new_episodes:
        return None
    if not all(_is_worse(evaluation, score) for evaluation in recent for score in (first, last)):
        return None
    best = max(evaluation.mean for evaluation in recent)
    return (
        f"the policy is worse without noise: the last {len(recent)} evaluations, which take the most likely actions, "
        f"have mean returns of at most {best:.4g}, and the training episodes since the first of them {last.mean:.4g}. "
        f"If both play the same task, use {as_setting_and_flag('eval_stochastic', True)}, also on resume"
    )


def _is_worse(evaluation: Score, training: Score) -> bool:
    """Return whether an evaluation is clearly worse than the last training episodes.

    Its own deviation may be zero, if the most likely actions fail in the same way each time.
    """
    std = max(evaluation.std, training.std)
    error = std * math.sqrt(1 / evaluation.episodes + 1 / WINDOW)
    size = max(abs(evaluation.mean), abs(training.mean))
    return training.mean - evaluation.mean > max(CERTAIN * error, CLEAR * size)
