"""From which step time on fewer env steps are worth a longer update: two sides of samples.py, over wall time.

The model is that of the picture over simulated time: all actors wait for each update,

    seconds = env steps / actors * step_s + env steps * CPU seconds of updates per env step

with the medians of env steps to the good return, which were measured with 8 samplers, for any number of actors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median

from samples_figures import Runs, reached
from samples_picture import update_s
from samples_tasks import TASKS

ACTORS = (1, 8, 64)


def crossing_s(runs: Runs, side: str, other: str, task: str, actors: int) -> float:
    """Return the seconds of a step from which on `side` is faster; 0 if it always is, inf if it never is."""
    steps = median(reached(runs, side, task, "good"))
    other_steps = median(reached(runs, other, task, "good"))
    if steps >= other_steps:
        return math.inf
    longer_updates_s = steps * update_s(runs, side, task) - other_steps * update_s(
        runs, other, task
    )
    return max(0.0, actors * longer_updates_s / (other_steps - steps))


def rows_of_crossings(runs: Runs, side: str, other: str) -> Iterator[tuple[str, ...]]:
    """Yield task, env steps of both sides, ms of an update per env step of both, and the step time with each ACTORS."""
    for task in TASKS:
        if not (runs.get((side, task)) and runs.get((other, task))):
            continue
        steps = [median(reached(runs, name, task, "good")) for name in (side, other)]
        updates = [f"{1e3 * update_s(runs, name, task):.2f}" for name in (side, other)]
        crossings = [_in_words(crossing_s(runs, side, other, task, actors)) for actors in ACTORS]
        yield task, *map(_thousands, steps), *updates, *crossings


def _thousands(steps: float) -> str:
    return "-" if math.isinf(steps) else f"{steps / 1000:.0f}k"


def _in_words(seconds: float) -> str:
    if math.isinf(seconds):
        return "never"
    if seconds == 0:
        return "any"
    return f"{1e3 * seconds:.0f} ms" if seconds > 0.1 else f"{1e3 * seconds:.2g} ms"
