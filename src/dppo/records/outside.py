"""Calls that leave this process, to the disk of a run folder or to a tracker: in a thread of their own, with deadlines.

A disk can block for minutes, for example one that a server lends over the network, and a tracker's server can be out of
reach. The loop waits for their answers as it always did, but not in the call itself: so signals are heard, a line says
what the run waits for, and the wait ends.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from dppo.log import logger
from dppo.ppo.exchange.records import Incident
from dppo.records.metrics.reading import Row
from dppo.records.observer import Observer, Result

T = TypeVar("T")

ENDING_S = 6.0  # time without progress after which a call is given up once a signal has arrived: a run ends within 10 s
MOMENT_S = 0.02  # time in which a call usually ends
TICK_S = 0.25  # between two looks at a call that is waited for
PROGRESS_S = 0.005  # CPU time of the thread that counts as progress
MAX_QUEUED = 10_000  # calls for whose results nothing waits


class NoAnswer(OSError):
    """A call was given up because it made no progress."""


@dataclass(eq=False, slots=True)
class _Call:
    action: str
    function: Callable[[], Any]
    ended: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None
    cancelled: bool = False


def never() -> float:
    return -math.inf


class OutsideThread:
    """Makes calls to one place, such as a disk, one after the other in a thread of its own."""

    said_s = 10.0
    """Seconds of waiting after which a line is logged, and rows wait in memory instead of the run."""
    limit_s = 120.0
    """Seconds without progress after which the loop gives a call up."""

    def __init__(
        self,
        place: str,
        *,
        notify: Callable[[str], object] = logger.warning,
        since_signal: Callable[[], float] = never,
    ) -> None:
        """Name the place, as in "waiting for PLACE"; the thread starts with the first call.

        Args:
            notify: prints a line.
            since_signal: returns the seconds since a signal asked the run to stop.
        """
        self.place = place
        self.notify = notify
        self._since_signal = since_signal
        self._queue: deque[_Call | None] = deque()  # None ends the thread
        self._unawaited: deque[_Call] = deque()  # whose errors later calls raise
        self._ready = threading.Condition()
        self._thread: threading.Thread | None = None
        self._current: _Call | None = None
        self._closed = False
        self._progressed_at = time.monotonic()
        self._cpu_ticks_before = 0
        # start of the silence of the place, once a line was logged about it
        self._silent_since: float | None = None

    # ------------------------------------------------------------------ for the loop

    def call(self, action: str, function: Callable[[], T], limit_s: float | None = None) -> T:
        """Return the result of a call, or raise its error; `action` describes it, as in "writing metrics.jsonl".

        Raises NoAnswer if nothing has got on for `limit_s` (default: 120), or for 6 s after a signal. A call that has
        not begun is left out then.
        """
        self._raise_earlier_error()
        call = self._submit(action, function)
        if not self._wait_for(call, self.limit_s if limit_s is None else limit_s):
            call.cancelled = True
            call.function = _nothing  # it may hold large arrays
            raise NoAnswer(
                f"{self.place} has not answered for {self._quiet_s():.0f} s ({self._doing()})"
            )
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def post(
        self, action: str, function: Callable[[], object], patience_s: float | None = None
    ) -> bool:
        """Make a call, and wait for its end while the place makes progress; otherwise it is made later.

        Its error is raised here, or by the next call of any kind. Returns whether it has ended. Raises NoAnswer if too
        many calls are waiting.

        Args:
            patience_s: seconds without progress after which the wait ends (default: 10); 0: do not wait.
        """
        self._raise_earlier_error()
        if self.is_full:
            self.call(action, function)
            return True
        call = self._submit(action, function)
        self._unawaited.append(call)
        if patience_s != 0:
            self._wait_for(call, self.said_s if patience_s is None else patience_s)
            self._raise_earlier_error()
        return call.ended.is_set()

    def settle(self) -> None:
        """Wait for the calls that were posted, while the place makes progress; raise the first of their errors."""
        if self._unawaited:
            self._wait_for(self._unawaited[-1], self.said_s)
            self._raise_earlier_error()

    @property
    def is_full(self) -> bool:
        """True if the queue is full, so that `post` waits."""
        return len(self._queue) >= MAX_QUEUED

    def close(self) -> None:
        """End the thread after the calls that are left, without waiting for it."""
        with self._ready:
            self._closed = True
            self._queue.append(None)
            self._ready.notify()

    # ------------------------------------------------------------------ waiting

    def _submit(self, action: str, function: Callable[[], Any]) -> _Call:
        call = _Call(action, function)
        with self._ready:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=f"dppo: {self.place}", daemon=True
                )
                self._thread.start()
            if self._current is None and not self._queue:
                self._progressed_at = time.monotonic()
            self._queue.append(call)
            self._ready.notify()
        return call

    def _wait_for(self, call: _Call, limit_s: float) -> bool:
        """Wait until a call has ended; False if it is given up."""
        return call.ended.wait(MOMENT_S) or self._wait_longer_for(call, limit_s)

    def _wait_longer_for(self, call: _Call, limit_s: float) -> bool:
        """Look at the progress of the place while waiting for a call that takes long."""
        while not call.ended.wait(0 if self._is_over(limit_s) else TICK_S):
            self._say_if_due()
            if self._is_over(limit_s):
                return call.ended.is_set()
        return True

    def _is_over(self, limit_s: float) -> bool:
        quiet_s = self._quiet_s()
        return quiet_s >= limit_s or min(quiet_s, self._since_signal()) >= ENDING_S

    def _quiet_s(self) -> float:
        """Return the seconds in which the thread has made no progress: it has ended no call, and used no CPU."""
        cpu_ticks = self._cpu_ticks()
        if cpu_ticks != self._cpu_ticks_before:
            self._cpu_ticks_before = cpu_ticks
            self._progressed_at = time.monotonic()
        return time.monotonic() - self._progressed_at

    def _cpu_ticks(self) -> int:
        """Return the CPU time of the thread in units of PROGRESS_S; 0 where the system does not report it."""
        thread = self._thread
        if (
            thread is None
            or thread.ident is None
            or not thread.is_alive()
            or not hasattr(time, "pthread_getcpuclockid")
        ):
            return 0
        return int(time.clock_gettime(time.pthread_getcpuclockid(thread.ident)) / PROGRESS_S)

    def _say_if_due(self) -> None:
        quiet_s = self._quiet_s()
        if quiet_s >= self.said_s and self._silent_since is None:
            self._silent_since = time.monotonic() - quiet_s
            self.notify(f"waiting for {self.place}: {self._doing()} for {quiet_s:.0f} s")

    def _doing(self) -> str:
        current = self._current
        if current is None:
            return "starting"
        return current.action

    def _raise_earlier_error(self) -> None:
        while self._unawaited and self._unawaited[0].ended.is_set():
            error = self._unawaited.popleft().error
            if error is not None:
                raise error

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (call := self._next()) is not None:
            if not call.cancelled:
                try:
                    call.result = call.function()
                except BaseException as error:  # the loop raises it
                    call.error = error
            self._current = None
            self._progressed_at = time.monotonic()
            call.ended.set()
            self._say_that_it_answers()

    def _next(self) -> _Call | None:
        with self._ready:
            while not self._queue:
                self._ready.wait()
            call = self._queue.popleft()
            self._current = call
            self._progressed_at = time.monotonic()
        return call

    def _say_that_it_answers(self) -> None:
        since = self._silent_since
        self._silent_since = None
        if since is not None and not self._closed:
            self.notify(f"{self.place} answers again, after {time.monotonic() - since:.0f} s")


def _nothing() -> None:
    """Take the place of a call that is left out."""


class FileWriter(Observer):
    """An observer that writes a file, in two parts: `snapshot` runs in the loop, `write` in a thread, see `OnDisk`."""

    takes_incidents = False

    def snapshot(self, row: Row) -> Any:
        """Return what `write` needs of an iteration, which the loop may change later; None if there is nothing."""
        return None

    def write(self, snapshot: Any) -> None:
        """Write what `snapshot` has returned."""

    def flush(self) -> None:
        """Wait until all lines so far would survive a power cut."""

    def on_iteration(self, row: Row) -> None:
        """Write the row at once."""
        snapshot = self.snapshot(row)
        if snapshot is not None:
            self.write(snapshot)


class OnDisk(Observer):
    """Makes the calls of a `FileWriter` in the thread of the disk.

    A row is written while the run goes on, unless an observer may look for it in its file: see `Observers.iteration`.
    """

    def __init__(self, writer: FileWriter, disk: OutsideThread, name: str) -> None:
        self._writer = writer
        self._disk = disk
        self._action = f"writing {name}"
        self.flush = writer.flush
        """Called in the thread of the disk."""
        self.settle = disk.settle
        """Waits until all rows so far are written, while the disk makes progress."""

    def on_iteration(self, row: Row) -> None:
        """Begin to write the row, once the earlier ones are written or wait for a disk that blocks."""
        snapshot = self._writer.snapshot(row)
        if snapshot is not None:
            self._disk.settle()
            self._disk.post(self._action, partial(self._writer.write, snapshot), patience_s=0)

    def on_incident(self, incident: Incident) -> None:
        """Write the incident."""
        if self._writer.takes_incidents:
            self._disk.post(self._action, partial(self._writer.on_incident, incident))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Write what is left; warn if that does not end."""
        if not self._disk.post(
            self._action, partial(self._writer.on_end, result, error), self._disk.limit_s
        ):
            logger.warning(
                "%s does not answer: %s was not finished", self._disk.place, self._action
            )
