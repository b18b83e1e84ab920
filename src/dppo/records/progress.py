"""Show a run in plain lines; and the figures, streams and log records that all displays share."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TextIO

from dppo.records.observer import Observer, RunInfo
from dppo.records.result import Result, in_words

PLAIN_S = 2.0  # between two plain lines, at least
PHASES = ("env", "act", "wait", "transfer", "update", "other")  # of an iteration: perf/env_frac ...

logger = logging.getLogger("dppo")


class PatientStream:
    """A stream that nobody may be reading any more: a closed terminal is no reason to stop training."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ShowLog(logging.Handler):
    """Show what `dppo` logs, while it is open; a user's own logging sees it too."""

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._show = show
        self._level_before: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        self._show(record.getMessage())

    def start(self) -> None:
        """Begin to show."""
        if not logger.isEnabledFor(logging.INFO) and logger.level == logging.NOTSET:
            self._level_before = logger.level
            logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def close(self) -> None:
        """Stop, and leave logging as it was."""
        logger.removeHandler(self)
        if self._level_before is not None:
            logger.setLevel(self._level_before)
            self._level_before = None
        super().close()


class PlainLines(Observer):
    """Print lines for a log: of the first and the last iteration, and between them every 2 s at most."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = PatientStream(stream)
        self._lock = threading.Lock()
        self._log = ShowLog(self.note)
        self._total_steps = 0
        self._printed_at = -math.inf
        self._unprinted: dict[str, float] | None = None

    def on_start(self, run: RunInfo) -> None:
        """Print what the run will do."""
        self._log.start()
        self._total_steps = run.total_steps
        self._print(run.title, *(f"  {line}" for line in run.lines))

    def on_iteration(self, row: dict[str, float]) -> None:
        """Print the row, unless one was printed just now."""
        with self._lock:
            self._unprinted = row
        if time.monotonic() - self._printed_at >= PLAIN_S:
            self._print_row()

    def note(self, text: str) -> None:
        """Print something that a person should know; from any thread."""
        self._print(f"  note: {text}")

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Print the last row, and what the run came to."""
        self._log.close()
        self._print_row()
        if result is not None:
            self._print(*in_words(result))

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


def plain_line(row: Mapping[str, float], total_steps: int) -> str:
    """One iteration in one line of plain characters."""
    steps = int(row.get("global_step", 0))
    episodes = min(100, int(row.get("charts/episodes", 0)))
    width = len(f"{total_steps:,}")
    times = {phase: row.get(f"perf/{phase}_frac", 0.0) for phase in PHASES}
    parts = [
        f"{steps:{width},} / {total_steps:,} {share(steps, total_steps):4.0%}",
        f"return {number(row.get('charts/episodic_return')):>7} ({episodes} episodes)",
        f"SPS {number(row.get('charts/SPS'), digits=0)}",
        f"kl {number(row.get('losses/approx_kl'))}",
        " ".join(f"{phase} {part:.0%}" for phase, part in times.items() if phase != "other" or part >= 0.05),
        f"left {duration(seconds_left(row, total_steps))}",
    ]
    return "   ".join(parts)


def share(part: float, whole: float) -> float:
    """`part` of `whole`, between 0 and 1."""
    return min(1.0, part / whole) if whole > 0 else 1.0


def seconds_left(row: Mapping[str, float], total_steps: int) -> float:
    """At the mean speed of training so far; NaN while that is not known."""
    speed = row.get("charts/SPS", math.nan)
    return max(0.0, total_steps - row.get("global_step", 0)) / speed if speed > 0 else math.nan


def number(value: float | None, digits: int | None = None) -> str:
    """A figure with the digits that a person reads: 12,345  475.3  0.012  3.1e-05, or - for none."""
    if value is None or math.isnan(value):
        return "-"
    size = abs(value)
    if 0 < size < 5e-4 and digits is None:
        return f"{value:.1e}"
    if digits is None:
        digits = 0 if size >= 1000 or size == 0 else 1 if size >= 10 else 2 if size >= 1 else 3
    return f"{value:,.{digits}f}"


def duration(seconds: float) -> str:
    """1:02, 3:04:05, 2d 03:04:05."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}:{second:02}"
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"
