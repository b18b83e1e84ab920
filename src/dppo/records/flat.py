"""Flat returns: whether the mean return has not risen for a third of a run."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from dppo.config import Config
from dppo.config.ways import first_to_try
from dppo.records.metrics.reading import Row
from dppo.spaces.actions import Actions

RETURN = "charts/episodic_return"
SUCCESS = "charts/success_rate"
WINDOW = 100  # episodes in a mean return
MIN_EPISODES = 20  # fewest episodes in each of the two means that are compared
MIN_ITERATIONS = 30  # fewest iterations of a run that is judged: a slow start is shorter
SOLVED = 0.95  # share of episodes that succeed
SHARE = 1 / 3  # share of the env steps so far


class Score(NamedTuple):
    """The mean return of the last episodes at some point of a run."""

    step: float
    episodes: float
    mean: float
    std: float
    success: float

    @staticmethod
    def from_row(row: Row) -> "Score | None":
        """Read the score from a row of metrics; None if no episode has ended."""
        mean = row.get(RETURN, math.nan)
        if not math.isfinite(mean):
            return None
        return Score(
            row["global_step"],
            row.get("charts/episodes", 0),
            mean,
            row.get(f"{RETURN}_std", 0.0),
            row.get(SUCCESS, 0.0),
        )

    @staticmethod
    def from_evaluation(row: Row) -> "Score | None":
        """Read the score of the evaluation that a row of metrics reports; None if it reports none."""
        mean = row.get("eval/episodic_return", math.nan)
        episodes = row.get("eval/episodes", 0)
        if not math.isfinite(mean) or not episodes:
            return None
        return Score(
            row.get("eval/global_step", math.nan),
            episodes,
            mean,
            row.get("eval/return_std", 0.0),
            row.get("eval/success_rate", 0.0),
        )


def flat_note(
    scores: Sequence[Score],
    config: Config,
    actions: Actions | None,
    solved_at: float | None,
    evaluations: Sequence[Score] = (),
) -> str | None:
    """Return since when a run is flat, and what to try first; None if it has risen, is solved, or is too short.

    The mean of the episodes of the last third of the run is compared with the mean return before: it has risen if the
    difference is larger than its standard error. Training returns contain noise, so a run whose evaluations have risen
    or solve the task is not flat either.

    Args:
        actions: of the task; None if they are not known.
        solved_at: the mean return from which on the task counts as solved; None if it is not known.
    """
    if not scores:
        return None
    last = scores[-1]
    is_solved = any(_solves(score, solved_at) for score in (last, *evaluations[-1:]))
    earlier_scores = [score for score in scores if score.step <= (1 - SHARE) * last.step]
    is_short = last.step < MIN_ITERATIONS * config.batch_size
    if is_solved or is_short or not earlier_scores:
        return None
    first = earlier_scores[-1]
    old_episodes = min(WINDOW, first.episodes)
    new_episodes = min(WINDOW, last.episodes - first.episodes)
    if min(old_episodes, new_episodes) < MIN_EPISODES:
        return None
    # the window of the last mean may still hold episodes of the first one
    rise = (last.mean - first.mean) * min(WINDOW, last.episodes) / new_episodes
    error = math.sqrt(first.std**2 / old_episodes + last.std**2 / new_episodes)
    if rise > error or _have_risen(evaluations, first.step):
        return None
    ways = list(first_to_try(config, actions))
    fact = (
        f"the mean return has not risen in the last {last.step - first.step:,.0f} env steps: {first.mean:.4g} before, "
        f"{last.mean:.4g} now, with a standard error of {error:.2g}"
    )
    if not ways:
        return f"{fact}. If more is possible, see docs/YOUR_SIMULATOR.md, When it does not learn"
    numbered = "; ".join(f"({number}) {way}" for number, way in enumerate(ways, 1))
    order = ", in this order" if len(ways) > 1 else ""
    return f"{fact}. If more is possible, try in a new run{order}: {numbered}"


def _solves(score: Score, solved_at: float | None) -> bool:
    return score.success >= SOLVED or (solved_at is not None and score.mean >= solved_at)


def _have_risen(evaluations: Sequence[Score], step: float) -> bool:
    """Return whether the last evaluation is better than the last one until `step`, by more than the standard error."""
    earlier_scores = [evaluation for evaluation in evaluations if evaluation.step <= step]
    if not earlier_scores:
        return False
    first = earlier_scores[-1]
    last = evaluations[-1]
    error = math.sqrt(first.std**2 / first.episodes + last.std**2 / last.episodes)
    return last.mean - first.mean > error
