"""Ctrl-C, SIGTERM and SIGHUP: the first ends the run in good order, the second at once."""

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
    """The user asked to stop while the run was waiting. No `except Exception` of an environment catches it."""

    def __init__(self, signal_received: signal.Signals) -> None:
        super().__init__(signal_received.name)
        self.signal = signal_received

    def as_interruption(self) -> BaseException:
        """Return what Python raises for this signal where nobody handles it in good order."""
        return KeyboardInterrupt() if self.signal is signal.SIGINT else SystemExit(128 + self.signal)


INTERRUPTIONS = (KeyboardInterrupt, StopRequested)
"""Exceptions that end a run in good order, wherever they are raised: not a fault of the code that they come out of."""


class StopSignals:
    """Listens for SIGINT, SIGTERM and SIGHUP while it is entered; outside the main thread it does nothing.

    SIGHUP comes when the terminal is closed: the run saves and ends, as with SIGTERM. Under `nohup` it is ignored
    from the start, and stays ignored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interruptible = False
        self._before: dict[int, Any] = {}
        self._checks: list[Callable[[], None]] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            numbers = [signal.SIGINT, signal.SIGTERM]
            if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def add_check(self, check: Callable[[], None]) -> None:
        """Let every wait that calls `check` of this also call that one, which may raise to give up."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise `StopRequested` if a stop has been asked for: for a wait that looks up now and then."""
        if self.received is not None:
            raise StopRequested(self.received)
        for check in self._checks:
            check()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Within, a stop raises `StopRequested` at once; outside, it is only noted.

        Not around calls into Ray: it does not pass on an exception from a signal handler.
        """
        try:
            self._interruptible = True  # first, so that no signal falls between the two
            self.check()
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None:  # asked twice: no more tidying up
            if number == signal.SIGINT and hasattr(sys, "ps1"):
                raise KeyboardInterrupt  # in a notebook or shell, whose other variables must not be lost
            os._exit(128 + number)
        self.received = signal.Signals(number)
        if self._interruptible:
            self._interruptible = False
            raise StopRequested(self.received)
