"""Calls into Ray, in threads of their own: Ray waits for minutes if the network loses packets in silence.

The loop of a run, its panel and its signals go on meanwhile. The watch of a session (`watch.py`) reads how long each
call has been waiting, logs that, and ends the run if it takes too long.
"""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import wraps
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

from dppo.errors import ClusterError
from dppo.user_code import in_a_line

P = ParamSpec("P")
T = TypeVar("T")

TICK_S = 0.5  # interval between two checks while a thread waits for a call


class Abandoned(BaseException):
    """The caller no longer waits for this call. `except Exception` does not catch it."""


class RayThread(threading.Thread):
    """A thread that may call Ray. It never keeps the process from ending."""

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)


def calls_ray(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function that calls Ray, and must run in a `RayThread`; tests/test_architecture.py finds unmarked ones."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        assert isinstance(threading.current_thread(), RayThread), (
            f"{function.__qualname__} runs outside of a RayThread"
        )
        return function(*args, **kwargs)

    return checked


@dataclass(eq=False, slots=True)
class _Call:
    """A function to be called, and its result."""

    function: Callable[[], Any]
    action: str
    result: Future[Any] | None = None
    """None if nobody waits for the result."""
    abandoned: bool = False


class RayCalls:
    """Makes calls into Ray, one after the other, in one thread.

    Waits for: nothing, but in `call` and `close`. Fails when: a posted call has failed, at the next `check`.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Start the thread; `waiting` measures by `clock`."""
        self._clock = clock
        self._tasks = SimpleQueue[_Call | None]()
        self._current: _Call | None = None
        self._began = 0.0  # time at which the current call began, or last heard from Ray
        self._failed: BaseException | None = None
        self._thread = RayThread(self._work, f"dppo-calls-{name}")
        self._thread.start()

    def post(self, function: Callable[[], object], action: str) -> None:
        """Let the thread call `function` after all earlier calls; does not wait."""
        self._tasks.put(_Call(function, action))

    def call(
        self,
        function: Callable[[], T],
        action: str,
        check: Callable[[], None] = lambda: None,
        timeout_s: float = math.inf,
    ) -> T:
        """Return what `function` returns, called after all earlier calls.

        `check` is called twice a second meanwhile. If it raises, or after `timeout_s`, the call is abandoned: it ends
        at its next `heard`, and its result is dropped.

        Raises: what `function` or `check` raises; ClusterError after `timeout_s`.
        """
        result = Future[T]()
        call = _Call(function, action, result)
        self._tasks.put(call)
        deadline = time.monotonic() + timeout_s
        try:
            while not wait([result], min(TICK_S, max(0.0, deadline - time.monotonic()))).done:
                check()
                if time.monotonic() >= deadline:
                    raise ClusterError(f"Ray has not answered for {timeout_s:g} s ({action}).")
        except BaseException:
            call.abandoned = True
            raise
        return result.result()

    def heard(self) -> None:
        """Record that Ray has just answered; only functions that `call` or `post` runs may use this.

        Raise Abandoned if the caller no longer waits for the call.
        """
        self._began = self._clock()
        current = self._current
        if current is not None and current.abandoned:
            raise Abandoned

    def waiting(self) -> tuple[float, str]:
        """Return the seconds since Ray answered the current call, and its description; 0 and "" without a call."""
        current = self._current
        began = self._began
        if current is None:
            return 0.0, ""
        return self._clock() - began, current.action

    def check(self) -> None:
        """Raise the error of a posted call that has failed."""
        error = self._failed
        if error is None:
            return
        if isinstance(error, OSError) or type(error).__module__.startswith("ray."):
            raise ClusterError(
                f"Ray has failed: {in_a_line(error, 300)}. Resume from the last checkpoint (--resume); before the "
                f"first one, start again."
            )
        raise error

    def close(self, timeout_s: float) -> bool:
        """Let the thread end after all earlier calls; return whether it has ended within `timeout_s`."""
        self._tasks.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (call := self._tasks.get()) is not None:
            if call.abandoned:
                continue
            self._began = self._clock()
            self._current = call
            try:
                result = call.function()
            except BaseException as error:
                self._end(call, None, error)
            else:
                self._end(call, result, None)
            # an idle thread must not keep the objects of a call alive
            del call

    def _end(self, call: _Call, result: object, error: BaseException | None) -> None:
        self._current = None
        if call.result is None:
            self._failed = self._failed or error
        elif error is not None:
            call.result.set_exception(error)
        else:
            call.result.set_result(result)
