"""Ctrl-C and SIGTERM: the first ends the run in good order, the second at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class StopRequested(BaseException):
    """The user asked to stop while the run was waiting. No `except Exception` of an environment catches it."""

    def __init__(self, signal_received: signal.Signals) -> None:
        super().__init__(signal_received.name)
        self.signal = signal_received

    def as_interruption(self) -> BaseException:
        """What Python raises for this signal where nobody handles it in good order."""
        return KeyboardInterrupt() if self.signal is signal.SIGINT else SystemExit(128 + self.signal)


class StopSignals:
    """Listens for SIGINT and SIGTERM while it is entered; in the main thread only, elsewhere it does nothing."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._interruptible = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise `StopRequested` if a stop has been asked for: for a wait that looks up now and then."""
        if self.received is not None:
            raise StopRequested(self.received)

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
        if self.received is not None:
            os._exit(128 + number)  # asked twice: no more tidying up
        self.received = signal.Signals(number)
        if self._interruptible:
            self._interruptible = False
            raise StopRequested(self.received)
