"""A guard, a process of its own, that ends this process if it freezes while it connects to Ray.

Ray's C++ code holds Python's global lock while it connects. If the network is cut at that moment, no thread of this
process can report that, give up, or react to Ctrl-C, until the raylet ends itself, four minutes later. The guard
imports nothing of dppo, so that it starts within a few hundredths of a second.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

LOOK_S = 0.5  # between two looks of the guard at the time
MOST_S = 2.0  # counted between two looks; if they are further apart, the guard was stopped, too
CTRL_C_S = 5.0  # from Ctrl-C to the end of a process that is frozen
STOPPED = "Tt"  # states of a process that SIGSTOP, or a debugger, has stopped


class Silence(NamedTuple):
    """A time without a beat, and the text that is printed after it."""

    seconds: float
    text: str


class FreezeGuard:
    """Context in which this process must call `beat` again and again, or a guard reports that, and ends it."""

    def __init__(self, noted: Silence, ended: Silence) -> None:
        """Start the guard.

        Args:
            noted: a silence that the guard reports.
            ended: a longer one, after which it kills this process.
        """
        words = [sys.executable, "-I", "-S", __file__, *map(str, (*noted, *ended))]
        self._guard = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def __enter__(self) -> "FreezeGuard":
        return self

    def beat(self) -> None:
        """Tell the guard that this process is not frozen."""
        assert self._guard.stdin is not None
        with suppress(OSError):  # somebody has killed the guard
            os.write(self._guard.stdin.fileno(), b".")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the guard, also if a fork of this process still has its standard input."""
        assert self._guard.stdin is not None
        self._guard.kill()
        self._guard.wait()
        self._guard.stdin.close()


# ------------------------------------------------------------------ the guard


def guard(noted: Silence, ended: Silence) -> None:
    """Watch the parent until it closes the standard input of this process, or ends."""
    parent = os.getppid()
    interrupts: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    frozen_s = 0.0
    is_noted = False
    looked_at = time.monotonic()
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], LOOK_S)[0]:
            if not os.read(sys.stdin.fileno(), 4096):
                return
            frozen_s = 0.0
            interrupts.clear()
        now = time.monotonic()
        if not is_stopped(parent):
            frozen_s += min(MOST_S, now - looked_at)
        looked_at = now
        if frozen_s > noted.seconds and not is_noted:
            is_noted = True
            _say(noted.text)
        is_interrupted = bool(interrupts) and frozen_s > CTRL_C_S
        if frozen_s > ended.seconds or is_interrupted:
            _say("interrupted while Ray did not answer" if is_interrupted else ended.text)
            with suppress(ProcessLookupError):
                os.kill(parent, signal.SIGKILL)
            return


def is_stopped(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2]
    except OSError:  # not on Linux, or the process is gone
        return False
    return state.split()[0] in STOPPED


def _say(text: str) -> None:
    with suppress(OSError):
        os.write(2, f"{text}\n".encode())


if __name__ == "__main__":
    _, noted_s, note, ended_s, end = sys.argv
    guard(Silence(float(noted_s), note), Silence(float(ended_s), end))
