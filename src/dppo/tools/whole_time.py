"""An estimate of the time that several runs take in all, from the first iterations of the first run."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from dppo.errors import counted
from dppo.records.metrics.reading import Row
from dppo.records.observer import Observer, Result, RunInfo
from dppo.records.terminal.figures import duration, speed

LEAST_S = 5.0  # seconds of iterations, without the first, from which the speed is estimated
LONG_ITERATION_S = 30.0  # a first iteration of so many seconds is enough for the estimate
CLOCKS = ("time/wall_s", "global_step")  # metrics that grow during a run
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

    def time_line(self, steps_per_s: float) -> str:
        """Return a line about the time of all runs, and above an hour about the setting that shortens it."""
        pace = f"if each is as fast as the current one so far ({speed(steps_per_s)} steps/s)"
        if self.some_stop_early:
            pace += " and none stops early"
        return self._line(self.steps / steps_per_s, pace)

    def time_line_of_ended(self, run_s: float, ended: int) -> str:
        """Return a line about the time of all runs, of which the `ended` ones took `run_s` seconds each."""
        first = "the first" if ended == 1 else f"the first {ended}"
        pace = f"if each takes as long as {first} ({run_s:.1f} s each)"
        return self._line(run_s, pace)

    def _line(self, run_s: float, pace: str) -> str:
        whole_s = math.ceil(self.count / self.at_once) * run_s
        runs = f"{counted(self.count, self.kind)} of {counted(self.steps, 'env step')}"
        line = f"Time: about {duration(whole_s)} for {runs}, {pace}."
        if whole_s <= LONG_S:
            return line
        return f"{line} Lower --total-timesteps ({self.steps:,} now) for less."


class WholeTime(Observer):
    """Show the estimated time of all runs once: during the first run that is long enough, or after a few short ones."""

    def __init__(self, runs: SeveralRuns, show: Callable[[str], object]) -> None:
        self._runs = runs
        self._show = show
        self._first: Row | None = None
        """The first row of the current run, or the last before its first update."""
        self._ended_s = list[float]()
        """Seconds of each run that has ended."""
        self._is_shown = False

    def on_start(self, run: RunInfo) -> None:
        self._first = None  # an earlier run was too short for an estimate

    def on_iteration(self, row: Row) -> None:
        """Show the time once the speed is known, without the first iteration, which makes the environments.

        Iterations that only collect the first rows of a replay buffer are left out: they are much faster.
        """
        if self._is_shown:
            return
        first = self._first
        updates = row.get("losses/gradient_steps") != 0
        # of several seeds, the first may have failed: the next row is that of another run
        is_later = first is not None and all(row[key] > first[key] for key in CLOCKS)
        if first is None or not updates or not is_later:
            self._first = row
            if updates and row["time/wall_s"] >= LONG_ITERATION_S:
                self._show_once(self._runs.time_line(row["charts/SPS"]))
            return
        seconds = row["time/wall_s"] - first["time/wall_s"]
        if seconds >= LEAST_S:
            steps = row["global_step"] - first["global_step"]
            self._show_once(self._runs.time_line(steps / seconds))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Show the time after runs that were each too short to show it."""
        if self._is_shown or result is None:
            return
        self._ended_s.append(result.wall_s)
        ended = len(self._ended_s)
        run_s = fmean(self._ended_s)
        left_s = run_s * (self._runs.count - ended) / self._runs.at_once
        if ended * run_s >= LEAST_S and left_s >= LEAST_S:
            self._show_once(self._runs.time_line_of_ended(run_s, ended))

    def _show_once(self, line: str) -> None:
        self._is_shown = True
        self._show(line)
