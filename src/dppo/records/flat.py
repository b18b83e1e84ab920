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
    def of_row(row: Row) -> "Score | None":
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


def flat_note(
    scores: Sequence[Score], config: Config, actions: Actions | None, solved_at: float | None
) -> str | None:
    """Return since when a run is flat, and what to try first; None if it has risen, is solved, or is too short.

    The mean of the episodes of the last third of the run is compared with the mean return before: it has risen if the
    difference is larger than its standard error.

    Args:
        actions: of the task; None if they are not known.
        solved_at: the mean return from which on the task counts as solved; None if it is not known.
    """
    if not scores:
        return None
    last = scores[-1]
    is_solved = last.success >= SOLVED or (solved_at is not None and last.mean >= solved_at)
    before = [score for score in scores if score.step <= (1 - SHARE) * last.step]
    if is_solved or not before:
        return None
    first = before[-1]
    old_episodes = min(WINDOW, first.episodes)
    new_episodes = min(WINDOW, last.episodes - first.episodes)
    if min(old_episodes, new_episodes) < MIN_EPISODES:
        return None
    # the window of the last mean may still hold episodes of the first one
    rise = (last.mean - first.mean) * min(WINDOW, last.episodes) / new_episodes
    error = math.sqrt(first.std**2 / old_episodes + last.std**2 / new_episodes)
    if rise > error:
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
