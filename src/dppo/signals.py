"""Ctrl-C, SIGTERM and SIGHUP: the first saves and ends the run, the second ends it at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequested(BaseException):
    """A signal asked the run to stop while it was waiting. `except Exception` in an environment does not catch it."""

    def __init__(self, signal_received: signal.Signals) -> None:
        super().__init__(signal_received.name)
        self.signal = signal_received


class Interrupted(KeyboardInterrupt):
    """The second Ctrl-C in a notebook or shell."""


INTERRUPTIONS = (Interrupted, StopRequested)
"""Exceptions that end a run, wherever they are raised; not a fault of the code that they pass through."""


class StopSignals:
    """Context manager that handles SIGINT, SIGTERM and SIGHUP; outside the main thread it does nothing.

    SIGHUP arrives when the terminal is closed: the run saves and ends, as with SIGTERM, except under `nohup`.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interruptible = False
        self._before: dict[int, Any] = {}
        self._checks: list[Callable[[], None]] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._timed = any(signal.getitimer(signal.ITIMER_REAL))
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._before and not self._timed and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an environment has left it running: it would end this process

    def add_check(self, check: Callable[[], None]) -> None:
        """Add a function for `check` to call; it may raise to end the current wait."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise `StopRequested` if a signal has arrived, or what an added check raises. Call it during every wait."""
        if self.received is not None:
            raise StopRequested(self.received)
        self.run_added_checks()

    def run_added_checks(self) -> None:
        """Raise what an added check raises."""
        for check in self._checks:
            check()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context in which a signal raises `StopRequested` at once; outside it is only recorded.

        Do not use it around calls into Ray, which does not propagate exceptions from signal handlers.
        """
        try:
            self._interruptible = True  # first, so that no signal is missed in between
            self.check()
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == self.received == signal.SIGHUP:  # a shell and the kernel both send one as a terminal is closed
            return
        if self.received is not None:  # the second signal
            if number == signal.SIGINT and hasattr(sys, "ps1"):
                raise Interrupted  # a notebook or shell must keep its other variables
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._interruptible:
            self._interruptible = False
            raise StopRequested(self.received)


CLOSING_S = 8.0  # for environments of this process to close


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Context in which TimeoutError ends a call that waits, and soon each later one; only in the main thread."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler, timer = signal.signal(signal.SIGALRM, late), signal.setitimer(signal.ITIMER_REAL, seconds, 0.5)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
