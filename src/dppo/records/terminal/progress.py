"""Show a run in plain lines; and the formats, streams and log handler that all displays share."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from dppo.ppo.exchange.records import CollectionProgress
from dppo.records.observer import Display, RunInfo
from dppo.records.result import Result, in_words

PLAIN_S = 2.0  # shortest interval between two plain lines
FIRST_S, LAST_S = 1.0, 60.0  # the interval between lines within an iteration doubles from the first to the last
PHASES = ("env", "act", "wait", "transfer", "update", "other")  # of an iteration, as in perf/env_frac

logger = logging.getLogger("dppo")


class PatientStream:
    """A stream that ignores write errors: a closed terminal is not a reason to stop training."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` if possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ShowLog(logging.Handler):
    """Shows the log records of `dppo` between `start` and `close`; the user's own logging gets them too."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show
        self._level_before: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        self._show(record.getMessage())

    def start(self) -> None:
        """Start to show records."""
        if not logger.isEnabledFor(logging.INFO) and logger.level == logging.NOTSET:
            self._level_before = logger.level
            logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def close(self) -> None:
        """Stop, and restore the log level."""
        logger.removeHandler(self)
        if self._level_before is not None:
            logger.setLevel(self._level_before)
            self._level_before = None
        super().close()


class Pace:
    """Measures the speed of an iteration from reports of its progress."""

    def __init__(self) -> None:
        self._first: CollectionProgress | None = None
        self._last: CollectionProgress | None = None

    def add(self, progress: CollectionProgress) -> bool:
        """Take a report; return whether env steps have been made since the one before.

        Steps fall when an actor is lost with those of its segment: the measurement then starts anew.
        """
        last = self._last
        if last is None or progress.iteration != last.iteration or progress.steps < last.steps:
            self._first = self._last = None
        if progress.steps == (0 if self._last is None else self._last.steps):
            return False
        self._first, self._last = self._first or progress, progress
        return True

    @property
    def steps_per_s(self) -> float:
        """Env steps per second over all processes; NaN while unknown."""
        first, last = self._first, self._last
        if first is None or last is None:
            return math.nan
        if last.steps > first.steps:
            return (last.steps - first.steps) / (last.elapsed_s - first.elapsed_s)
        return last.steps / last.elapsed_s  # after one report only: includes the time to make the environments

    @property
    def step_ms(self) -> float:
        """Milliseconds that an env step takes in one process; NaN while unknown."""
        return math.nan if self._last is None else 1e3 * self._last.processes / self.steps_per_s


class PlainLines(Display):
    """Prints a line for the first and the last iteration, and between them every 2 s at most.

    During long iterations it prints their progress: after some seconds, then less and less often.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = PatientStream(stream)
        self._lock = threading.Lock()
        self._log = ShowLog(self.note)
        self._total_steps = 0
        self._printed_at = -math.inf
        self._unprinted: dict[str, float] | None = None
        self._pace = Pace()
        self._progress_s = FIRST_S

    def on_start(self, run: RunInfo) -> None:
        """Print the title and the first lines of the run."""
        self._log.start()
        self._total_steps = run.total_steps
        self._steps_per_iteration = run.config.batch_size
        self._print(run.title, *(f"  {line}" for line in run.lines))

    def on_progress(self, progress: CollectionProgress) -> None:
        """Print the progress of a long iteration, if env steps have been made and the last line is old enough."""
        if self._pace.add(progress) and time.monotonic() - self._printed_at >= self._progress_s:
            self._print("  " + progress_line(progress, self._pace, self._total_steps, self._steps_per_iteration))
            self._printed_at = time.monotonic()
            self._progress_s = min(2 * self._progress_s, LAST_S)

    def on_iteration(self, row: dict[str, float]) -> None:
        """Print the row, unless the last one was printed less than 2 s ago."""
        with self._lock:
            self._unprinted = row
        if time.monotonic() - self._printed_at >= PLAIN_S:
            self._print_row()

    def note(self, text: str) -> None:
        """Print a note. From any thread."""
        self._print(f"  note: {text}")

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Print the last row and the result."""
        self._log.close()
        self._print_row()
        if result is not None:
            self._print(*in_words(result, error))

    def _print_row(self) -> None:
        with self._lock:
            row, self._unprinted = self._unprinted, None
        if row is not None:
            self._print("  " + plain_line(row, self._total_steps))
            self._printed_at = time.monotonic()

    def _print(self, *lines: str) -> None:
        text = "".join(f"{line}\n" for line in lines)
        encoding = getattr(self._stream, "encoding", None) or "utf8"
        with self._lock:
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()


def progress_line(progress: CollectionProgress, pace: Pace, total_steps: int, steps_per_iteration: int) -> str:
    """Return the progress of an iteration as one line of plain characters."""
    left_s = (total_steps - progress.global_step) / pace.steps_per_s
    parts = [
        _steps_in_words(progress.global_step, total_steps),
        f"iteration {progress.iteration}: {progress.steps:,} of {steps_per_iteration:,} steps",
        f"{number(pace.step_ms)} ms per env step",
        f"left about {duration(left_s)}",
    ]
    return "   ".join(parts)


def plain_line(row: Mapping[str, float], total_steps: int) -> str:
    """Return one iteration as one line of plain characters."""
    episodes = min(100, int(row.get("charts/episodes", 0)))
    times = {phase: row.get(f"perf/{phase}_frac", 0.0) for phase in PHASES}
    parts = [
        _steps_in_words(int(row.get("global_step", 0)), total_steps),
        f"return {number(row.get('charts/episodic_return')):>7} ({episodes} episodes)",
        f"SPS {speed(row.get('charts/SPS'))}",
        f"kl {number(row.get('losses/approx_kl'))}",
        " ".join(f"{phase} {part:.0%}" for phase, part in times.items() if phase != "other" or part >= 0.05),
        f"left {duration(seconds_left(row, total_steps))}",
    ]
    return "   ".join(parts)


def _steps_in_words(steps: int, total_steps: int) -> str:
    width = len(f"{total_steps:,}")
    return f"{steps:{width},} / {total_steps:,} {share(steps, total_steps):4.0%}"


def share(part: float, whole: float) -> float:
    """Return `part` / `whole`, limited to 1."""
    return min(1.0, part / whole) if whole > 0 else 1.0


def seconds_left(row: Mapping[str, float], total_steps: int) -> float:
    """Return the seconds left at the mean speed so far; NaN while that is unknown."""
    speed = row.get("charts/SPS", math.nan)
    return max(0.0, total_steps - row.get("global_step", 0)) / speed if speed > 0 else math.nan


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
