"""Ctrl-C, SIGTERM and SIGHUP: the first saves and ends the run, the second ends it at once.

Copies of a signal are ignored: of SIGHUP, because a shell and the kernel both send one as a terminal is closed; of
SIGTERM for ten seconds, because Slurm sends it to the processes of a job, among them srun, which passes it on; and of
SIGINT for a moment, because `timeout` sends it to its child and then to the group of its child.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn


class StopRequested(BaseException):
    """A signal asked the run to stop while it was waiting. `except Exception` in an environment does not catch it."""

    def __init__(self, signal_received: signal.Signals) -> None:
        super().__init__(signal_received.name)
        self.signal = signal_received
        self.progress = ""
        """Description of the work that was done by then; "" if unknown."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, as opposed to a KeyboardInterrupt that an environment raises. Its text describes the work done so far."""

    signal = signal.SIGINT


INTERRUPTIONS = (Interrupted, StopRequested)
"""Exceptions that end a run, wherever they are raised; not a fault of the code that they pass through."""


SHOW_CURSOR = b"\x1b[?25h"
COPIES_S: dict[int, float] = {signal.SIGHUP: math.inf, signal.SIGTERM: 10.0, signal.SIGINT: 0.2}
"""Seconds in which a signal that arrives again is a copy."""


def end_at_once(number: int) -> NoReturn:
    """End this process after a second signal: print a line to stderr, but clean up nothing."""
    name = signal.Signals(number).name
    line = f"\ndppo: {name} again: ended at once. The last checkpoint, if there is one, is untouched.\n"
    with suppress(OSError):  # raised if the terminal is closed
        if os.isatty(1):  # the live panel may have hidden the cursor
            os.write(1, SHOW_CURSOR)
        os.write(2, line.encode())
    os._exit(128 + number)


def _is_copy(number: int, received: signal.Signals | None, received_at: float) -> bool:
    return number == received and time.monotonic() - received_at < COPIES_S[number]


class RaisingSignals:
    """Context manager in which Ctrl-C raises `Interrupted`, and SIGTERM and SIGHUP raise `StopRequested`.

    Checks of environments do not treat these exceptions as faults. A second signal ends the process at once. Handlers
    that a training run or your program has installed are kept. Outside the main thread, the context does nothing.
    """

    _active: RaisingSignals | None = None

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._received_at = math.inf
        self._handlers_before: dict[int, Any] = {}

    def __enter__(self) -> RaisingSignals:
        """Return the outermost active context: its handlers are in force, also in contexts within it."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
                self._handlers_before[number] = signal.signal(number, self._handle)
        if self._handlers_before:
            RaisingSignals._active = self
        return RaisingSignals._active or self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        if self._handlers_before:
            RaisingSignals._active = None

    @classmethod
    def received_before(cls) -> signal.Signals | None:
        """Return the signal that the active context has received, if there is one: code may have caught its exception.

        Python itself catches one that is raised in `__del__` or in the callback of a weak reference.
        """
        if cls._active is None:
            return None
        return cls._active._received

    def check(self) -> None:
        """Raise the exception of a received signal again, in case the interrupted code has caught it."""
        if self._received is not None:
            self._raise(self._received)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if _is_copy(number, self._received, self._received_at):
            return
        in_notebook = number == signal.SIGINT and hasattr(sys, "ps1")
        if self._received is not None and not in_notebook:
            end_at_once(number)
        self._received = signal.Signals(number)
        self._received_at = time.monotonic()
        self._raise(self._received)

    def _raise(self, received: signal.Signals) -> NoReturn:
        if received is signal.SIGINT:
            raise Interrupted
        raise StopRequested(received)


def as_ending(request: StopRequested) -> BaseException:
    """Return the exception with which a function ends after a signal: that of a program, or within a command, its own.

    A command may have more to do, such as to report the runs before this one.
    """
    if request.signal is signal.SIGINT:
        return Interrupted()
    if RaisingSignals._active is not None:
        return request
    return SystemExit(128 + request.signal)


@contextmanager
def ending_on_signals(progress: Callable[[], str]) -> Iterator[Callable[[], None]]:
    """Context of a function that Python programs call: Ctrl-C raises KeyboardInterrupt, SIGTERM raises SystemExit.

    It yields a function to call now and then, which raises again if the interrupted code has caught the exception. The
    text of the exception is the result of `progress`, which describes the work done so far. Within another
    `RaisingSignals`, as in a command, StopRequested is not converted.
    """
    outermost = RaisingSignals._active is None
    with RaisingSignals() as signals:
        try:
            yield signals.check
        except Interrupted as interrupted:
            interrupted.args = (progress(),)
            raise
        except StopRequested as request:
            request.progress = progress()
            if not outermost:
                raise
            raise SystemExit(128 + request.signal) from None


class StopSignals:
    """Context manager that handles SIGINT, SIGTERM and SIGHUP; outside the main thread it does nothing.

    SIGHUP arrives when the terminal is closed: the run saves and ends, as with SIGTERM, except under `nohup`.
    """

    def __init__(self, on_first: Callable[[str], None] = lambda text: None) -> None:
        """Keep `on_first`; a thread calls it with a line for the user, unless the first signal ends a wait at once."""
        self._on_first = on_first
        self.received: signal.Signals | None = None
        self._received_at = math.inf
        self._interruptible = False
        self._handlers_before: dict[int, Any] = {}
        self._timer_was_set = False
        self._pid = os.getpid()
        self._checks: list[Callable[[], None]] = []

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._timer_was_set = any(signal.getitimer(signal.ITIMER_REAL))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            is_under_nohup = (
                number == signal.SIGHUP and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            )
            if not is_under_nohup:
                self._handlers_before[number] = signal.signal(number, self._handle)
        received_before = RaisingSignals.received_before()
        if received_before is not None and self.received is None:
            self._receive(received_before)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        outer = RaisingSignals._active
        if outer is not None and self.received is not None:
            # the run may have finished all the same, and be one of several
            outer._received = self.received
            outer._received_at = self._received_at
        was_active = bool(self._handlers_before)
        alarm_would_kill = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
        if was_active and not self._timer_was_set and alarm_would_kill:
            # stop a timer that an environment may have left running
            signal.setitimer(signal.ITIMER_REAL, 0)

    def seconds_since(self) -> float:
        """Return the seconds since the first signal; minus infinity if there was none."""
        return time.monotonic() - self._received_at

    def add_check(self, check: Callable[[], None]) -> None:
        """Add a function for `check` to call; it may raise to end the current wait."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise `StopRequested` if a signal has arrived; else run the added checks. Call this during every wait."""
        if self.received is not None:
            raise StopRequested(self.received)
        for check in self._checks:
            check()

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Context in which a signal raises `StopRequested` at once; outside of it, a signal is only recorded.

        Do not use it around calls into Ray, which does not propagate exceptions from signal handlers.
        """
        try:
            self._interruptible = True  # first, so that no signal is missed in between
            self.check()
            yield
        finally:
            self._interruptible = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _in_fork(number)
            return
        if _is_copy(number, self.received, self._received_at):
            return
        if self.received is not None:  # the second signal
            if number == signal.SIGINT and hasattr(sys, "ps1"):
                raise Interrupted  # a notebook or shell must keep its other variables
            end_at_once(number)
        self._receive(signal.Signals(number))
        if self._interruptible:
            self._interruptible = False
            raise StopRequested(signal.Signals(number))
        name = signal.Signals(number).name
        trigger = "once more"
        if number == signal.SIGTERM:
            trigger += f" after {COPIES_S[number]:g} s"
        text = f"{name}: stopping ... ({trigger}: at once)"
        # In another thread, because this one may hold the lock of the display; and not by `threading`, because this one
        # may also hold a lock of that module.
        _thread.start_new_thread(self._on_first, (text,))

    def _receive(self, received: signal.Signals) -> None:
        self.received = received
        self._received_at = time.monotonic()


def _in_fork(number: int) -> None:
    """Handle a signal in a process that a simulator has forked: take the default action, but ignore Ctrl-C.

    Ctrl-C reaches all processes of a terminal. The run then closes its environments, which end their own processes.
    """
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


CLOSING_S = 8.0  # time limit for closing the environments of this process
REPEAT_ALARM_S = 0.5  # interval of further alarms, for code that has caught the first TimeoutError


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Context that raises TimeoutError in the running call after `seconds`, and then every REPEAT_ALARM_S.

    Outside the main thread, it does nothing.
    """

    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler_before = signal.signal(signal.SIGALRM, late)
    timer_before = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_ALARM_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer_before)
        signal.signal(signal.SIGALRM, handler_before)


_hanging: list[str] = []  # names of threads that this process must not wait for when it ends


def leave_at_exit(name: str) -> None:
    """Note that threads of `name` hang, and could block or crash the exit of this process: see `leave_if_noted`."""
    if not _hanging:
        atexit.register(_leave_after_others)
    _hanging.append(name)


def leave_if_noted(code: int) -> None:
    """End this process at once with `code` if a hanging thread was noted; call this when all else is done."""
    if _hanging:
        _flush()
        os._exit(code)


def _leave_after_others() -> None:
    """End the user's program at exit if a hanging thread was noted, with exit code 1 if an exception has ended it."""
    leave_if_noted(int(hasattr(sys, "last_value")))


def _flush() -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
