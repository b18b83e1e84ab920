"""Parts that displays share: the state of a run, the notation of its figures, the stream they write to, the log."""

import logging
import math
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TextIO

from dppo.errors import ClusterError, printable
from dppo.log import logger
from dppo.ppo.exchange.records import CollectionProgress
from dppo.process_state.states import usable
from dppo.records.observer import RunInfo

PHASES = ("env", "act", "wait", "transfer", "update", "other")  # of an iteration, as in perf/env_frac


@dataclass
class View:
    """The state of a run. One thread writes it and another may show it, so fields are replaced as a whole."""

    title: str = ""
    total_steps: int = 0
    batch_size: int = 0  # env steps of one iteration
    actors: int = 0  # the most that the run may have
    began: float = 0.0
    row: dict[str, float] = field(default_factory=dict)  # of the last finished iteration
    row_at: float = 0.0
    evaluation: dict[str, float] = field(default_factory=dict)  # the row with the last one
    first_row: tuple[float, float] = (math.nan, math.nan)
    """Env steps and time of the first iteration of this call, which makes the environments."""
    ready: int = 0  # processes that work on the present iteration, as last reported
    progress: CollectionProgress | None = None  # of the last iteration that takes long
    first: CollectionProgress | None = None
    """The first report of that iteration since the last loss of an actor, with which its env steps are lost."""
    moved_at: float = 0.0  # time at which `progress` last showed new env steps
    returns: "array[float]" = field(default_factory=lambda: array("d"))  # mean returns after each iteration
    finished: bool = False

    def start(self, run: RunInfo) -> None:
        """Take the facts of the run."""
        self.title, self.total_steps, self.batch_size = run.title, run.total_steps, run.config.batch_size
        self.began, self.actors = time.monotonic(), run.config.most_actors

    def add_row(self, row: dict[str, float]) -> None:
        """Take the row of a finished iteration."""
        if not self.row:
            self.first_row = row.get("global_step", 0), time.monotonic()
        self.row, self.row_at = row, time.monotonic()
        if "eval/episodes" in row:
            self.evaluation = row
        value = row.get("charts/episodic_return", math.nan)
        if math.isfinite(value):
            self.returns.append(value)

    def add_progress(self, progress: CollectionProgress) -> bool:
        """Take the progress of a long iteration; return whether env steps have been made since the last one."""
        self.ready, last = progress.processes, self.first and self.progress
        if last is not None and (progress.iteration != last.iteration or progress.steps < last.steps):
            self.first = last = None
        if progress.steps == (0 if last is None else last.steps):
            return False
        self.first, self.progress, self.moved_at = self.first or progress, progress, time.monotonic()
        return True

    @property
    def steps_per_s(self) -> float:
        """Env steps per second of a long iteration, over all processes; NaN while unknown."""
        first, last = self.first, self.progress
        if first is None or last is None or last.steps < first.steps + 2 * max(1, last.processes):
            return math.nan  # fewer steps say more about resets, and about who was first
        return (last.steps - first.steps) / (last.elapsed_s - first.elapsed_s)

    @property
    def step_ms(self) -> float:
        """Milliseconds that an env step of a long iteration takes in one process; NaN while unknown."""
        return math.nan if self.progress is None else 1e3 * self.progress.processes / self.steps_per_s

    @property
    def under_way(self) -> CollectionProgress | None:
        """The progress of the present iteration, if it takes long."""
        known = self.progress is not None and self.progress.iteration > self.row.get("iteration", 0)
        return self.progress if known else None

    @property
    def steps(self) -> int:
        """Env steps so far."""
        return int(self.row.get("global_step", 0)) if self.under_way is None else self.under_way.global_step

    def left_s(self, now: float) -> float:
        """Return the seconds left at the mean speed of the iterations since the first; NaN while unknown.

        Until there are two, env steps are expected to go on as in the first, and updates to take as long. How long it
        took to make the environments and to reset them says nothing about the rest.
        """
        (first_steps, first_at), steps, since = self.first_row, self.row.get("global_step", 0), self.row_at
        if steps > first_steps and since > first_at:
            s_per_step = (since - first_at) / (steps - first_steps)
        else:
            s_per_step = 1 / self.steps_per_s + self.row.get("perf/update_s", 0.0) / max(1, self.batch_size)
            if not self.row and self.progress is not None:
                steps, since = self.progress.global_step, self.moved_at
        return max((self.total_steps - steps) * s_per_step - (now - since), 0.0)  # NaN stays NaN in this order


def sparkline(values: Sequence[float], width: int) -> str:
    """Return a series as at most `width` bars, scaled from the lowest to the highest."""
    if len(values) < 2:
        return ""
    width = min(width, len(values))
    edges = [i * len(values) // width for i in range(width + 1)]
    parts = [values[a : b : max(1, (b - a) // 50)] for a, b in pairwise(edges)]  # it is drawn four times a second
    heights = [sum(part) / len(part) for part in parts]
    low, high = min(heights), max(heights)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((height - low) * scale)] for height in heights)


def share(part: float, whole: float) -> float:
    """Return `part` / `whole`, limited to 1."""
    return min(1.0, part / whole) if whole > 0 else 1.0


def number(value: float | None, digits: int | None = None) -> str:
    """Return a figure with a sensible number of digits: 12,345  475.3  0.012  3.1e-05, or - for None and NaN."""
    if value is None or math.isnan(value):
        return "-"
    size = abs(value)
    if 0 < size < 5e-4 and digits is None:
        return f"{value:.1e}"
    if digits is None:
        digits = 0 if size >= 1000 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def speed(steps_per_s: float | None) -> str:
    """Return steps per second as `number` does, without digits after the point from 10 on."""
    return number(steps_per_s, digits=None if steps_per_s is not None and 0 < steps_per_s < 10 else 0)


def duration(seconds: float) -> str:
    """Return 1:02, 3:04:05 or 2d 03:04:05."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


class PatientStream:
    """A stream that ignores write errors: a closed terminal is not a reason to stop training.

    It keeps the stream that it is made for, whatever becomes of `sys.stdout`, and opens it again if code of a user has
    closed it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` if possible."""
        self._stream = usable(self._stream)
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def line(self, text: str) -> None:
        """Write a line if possible, at once."""
        self.write(f"{text}\n")
        self.flush()

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ShowLog:
    """Shows the log records of `dppo` from `start` to `close`, preceded by those since `hold`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._held = show, list[str]()
        self._started = self._level_changed = False

    def _emit(self, record: logging.LogRecord) -> None:
        """Show or keep one record, unless it was shown already; one that says `at_once` is never kept."""
        if getattr(record, "shown", False):
            return
        at_once = self._started or getattr(record, "at_once", False)
        (self._show if at_once else self._held.append)(printable(record.getMessage()))

    def hold(self) -> None:
        """Keep records until `start`."""
        if self._emit not in logger.listeners:
            self._level_changed = not logger.isEnabledFor(logging.INFO) and logger.level == logging.NOTSET
            if self._level_changed:
                logger.setLevel(logging.INFO)  # handlers of the program get them, too
            logger.listeners.append(self._emit)

    def start(self) -> None:
        """Show the records kept so far, and from now on each at once."""
        self.hold()
        self._started, held, self._held = True, self._held, []
        for text in held:
            self._show(text)

    def close(self, error: BaseException | None = None) -> None:
        """Stop, and restore the log level; `error` is the exception that ended the run. Drops records still held."""
        if self._emit in logger.listeners:
            if isinstance(error, ClusterError):
                self.start()  # the records say what went wrong before
            logger.listeners.remove(self._emit)
            self._started, self._held = False, []
            if self._level_changed:
                logger.setLevel(logging.NOTSET)
