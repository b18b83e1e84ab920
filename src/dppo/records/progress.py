"""What a person sees of a run: a live panel on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal, Protocol, TextIO

PLAIN_S = 2.0  # between two plain lines, at least
PHASES = ("env", "act", "wait", "transfer", "update", "other")  # of an iteration: perf/env_frac ...


class Progress(Protocol):
    """Where a run is shown. Calls may come from any thread; none of them raises or waits."""

    def start(self, title: str, lines: list[str], total_steps: int) -> None:
        """A run begins: its name, what it will do, its env steps."""

    def iteration(self, row: dict[str, float]) -> None:
        """An iteration has ended; `row` is that of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Something that a person should know: a warning, an actor replaced."""

    def finish(self, lines: list[str]) -> None:
        """The run has come to its end."""

    def close(self) -> None:
        """Leave the terminal clean; always called last, also after an error."""


def make_progress(mode: Literal["auto", "live", "plain", "off"], stream: TextIO | None = None) -> Progress:
    """The progress for `mode` on `stream` (default: standard output); auto is live where that can be."""
    stream = stream or sys.stdout
    if mode == "off" or stream is None:  # a daemon may have no standard output
        return OffProgress()
    if mode == "auto" and os.environ.get("CI"):
        return PlainProgress(stream)
    if mode in ("auto", "live") and _can_show_panel(stream):
        from dppo.records.panel import LiveProgress

        return LiveProgress(stream)
    progress = PlainProgress(stream)
    if mode == "live":
        progress.note("progress=live needs a terminal that shows Unicode, which this is not: lines are printed.")
    return progress


def _can_show_panel(stream: TextIO) -> bool:
    unicode = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown") and unicode


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


class OffProgress:
    """Shows nothing."""

    def start(self, title: str, lines: list[str], total_steps: int) -> None:
        pass

    def iteration(self, row: dict[str, float]) -> None:
        pass

    def note(self, text: str) -> None:
        pass

    def finish(self, lines: list[str]) -> None:
        pass

    def close(self) -> None:
        pass


class PlainProgress:
    """Prints lines for a log: of the first and the last iteration, and between them every 2 s at most."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = PatientStream(stream)
        self._lock = threading.Lock()
        self._total_steps = 0
        self._printed_at = -math.inf
        self._unprinted: dict[str, float] | None = None

    def start(self, title: str, lines: list[str], total_steps: int) -> None:
        self._total_steps = total_steps
        self._print(title, *(f"  {line}" for line in lines))

    def iteration(self, row: dict[str, float]) -> None:
        with self._lock:
            self._unprinted = row
        if time.monotonic() - self._printed_at >= PLAIN_S:
            self._print_row()

    def note(self, text: str) -> None:
        self._print(f"  note: {text}")

    def finish(self, lines: list[str]) -> None:
        self._print_row()
        self._print(*lines)

    def close(self) -> None:
        self._print_row()

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
