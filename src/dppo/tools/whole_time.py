"""An estimate of the time that several runs take in all, from the first iterations of the first run."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from dppo.errors import counted
from dppo.records.observer import Observer, Result, RunInfo
from dppo.records.terminal.figures import duration, speed

LEAST_S = 5.0  # seconds of iterations, without the first, from which the speed is estimated
LONG_ITERATION_S = 30.0  # a first iteration of so many seconds is enough for the estimate
LONG_S = 3600.0  # the line about a longer estimate names the setting that shortens the runs


@dataclass(frozen=True, slots=True)
class SeveralRuns:
    """Runs of equal size, which are trained one after the other or a few at once."""

    count: int
    steps: int
    """Env steps of each run."""
    kind: str = "run"
    at_once: int = 1
    some_stop_early: bool = False

    def whole_s(self, steps_per_s: float) -> float:
        """Return the seconds of all runs, if each is as fast as `steps_per_s`."""
        return math.ceil(self.count / self.at_once) * self.steps / steps_per_s

    def time_line(self, steps_per_s: float) -> str:
        """Return a line about the time of all runs, and above an hour about the setting that shortens it."""
        bound = "at most about" if self.some_stop_early else "about"
        pace = f"if each is as fast as the current one so far ({speed(steps_per_s)} steps/s)"
        return self._line(bound, self.whole_s(steps_per_s), pace)

    def time_line_of_ended(self, run_s: float, ended: int) -> str:
        """Return a line about the time of all runs, of which the `ended` ones took `run_s` seconds each."""
        whole_s = math.ceil(self.count / self.at_once) * run_s
        first = "the first" if ended == 1 else f"the first {ended}"
        pace = f"if each takes as long as {first} ({run_s:.1f} s each)"
        return self._line("about", whole_s, pace)

    def _line(self, bound: str, whole_s: float, pace: str) -> str:
        runs = f"{counted(self.count, self.kind)} of {counted(self.steps, 'env step')}"
        line = f"Time: {bound} {duration(whole_s)} for {runs}, {pace}."
        if whole_s <= LONG_S:
            return line
        return f"{line} Lower --total-timesteps ({self.steps:,} now) for less."


class WholeTime(Observer):
    """Show the estimated time of all runs once: during the first run that is long enough, or after a few short ones."""

    def __init__(
        self,
        runs: SeveralRuns,
        show: Callable[[str], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runs = runs
        self._show = show
        self._clock = clock
        self._began_at: float | None = None  # start of the first run
        self._ended = 0
        self._started_at = 0.0
        self._first = (0.0, 0.0)  # env steps of the first iteration, and when it ended
        self._is_shown = False

    def on_start(self, run: RunInfo) -> None:
        self._started_at = self._clock()
        if self._began_at is None:
            self._began_at = self._started_at
        self._first = (0.0, 0.0)  # an earlier run was too short for an estimate

    def on_iteration(self, row: dict[str, float]) -> None:
        if self._is_shown:
            return
        steps = row["global_step"]
        now = self._clock()
        if not self._first[0]:
            self._first = (steps, now)
            if now - self._started_at >= LONG_ITERATION_S:
                self._show_time(steps / (now - self._started_at))
            return
        first_steps, first_at = self._first
        if now - first_at >= LEAST_S:
            self._show_time((steps - first_steps) / (now - first_at))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Show the time after runs that were each too short to show it."""
        if self._is_shown or self._began_at is None:
            return
        self._ended += 1
        so_far_s = self._clock() - self._began_at
        run_s = so_far_s / self._ended
        left_s = run_s * (self._runs.count - self._ended) / self._runs.at_once
        if so_far_s >= LEAST_S and left_s >= LEAST_S:
            self._is_shown = True
            self._show(self._runs.time_line_of_ended(run_s, self._ended))

    def _show_time(self, steps_per_s: float) -> None:
        self._is_shown = True
        self._show(self._runs.time_line(steps_per_s))
