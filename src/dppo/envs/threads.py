"""Environments in threads: for simulators that wait, and for resets in the background."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

import numpy as np

from dppo.envs.closing import close_all
from dppo.envs.episode import CheckedEnv, ResetOptions
from dppo.log import logger
from dppo.process_state.forks import FORKS, leave

CLOSING_S = 4.0  # longest wait for calls in progress; less than a run waits for its actors

_ending: deque[Thread] = deque()


class Worker:
    """A thread that makes calls one after the other. It is a daemon: one that hangs does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def begin(self, call: Callable[[], Any]) -> Future[Any]:
        """Let the thread make a call after all earlier ones."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def end(self, last_call: Callable[[], Any]) -> Future[Any]:
        """Let the thread end after one more call; see `wait_for_ends`."""
        future = self.begin(last_call)
        self._calls.put(None)
        _ending.append(self._thread)
        return future

    def _work(self) -> None:
        process = FORKS.number
        while (work := self._calls.get()) is not None:
            call, future = work
            try:
                result = call()
            except BaseException as error:
                if process != FORKS.number:
                    leave(error)
                future.set_exception(error)
            else:
                if process != FORKS.number:
                    leave(None)
                future.set_result(result)


def result_of(future: Future[Any]) -> Any:
    """Wait for a call, and return its result or raise its exception, without frames of the library."""
    error = future.exception()
    if error is not None:
        raise error
    return future.result()


def wait_for_ends() -> None:
    """Wait a few seconds for the threads that are to end; log those that do not."""
    until = time.monotonic() + CLOSING_S
    while _ending:
        thread = _ending.popleft()
        thread.join(max(0.0, until - time.monotonic()))
        if thread.is_alive():
            logger.warning("%s: not closed, a call did not return in time", thread.name)


class EnvThread:
    """An environment in a thread of its own, which makes all calls to it; a reset may be begun before it is needed."""

    def __init__(self, make: Callable[[], Any], name: str) -> None:
        """Make the environment, or raise the exception of its constructor; `name` it in messages."""
        self._worker = Worker(name)
        self._making = self._worker.begin(make)
        self._resets: dict[str, Future[Any]] = {}  # arguments -> reset that has begun
        try:
            self.env = result_of(self._making)
        except BaseException:  # also Ctrl-C, while the thread goes on
            self.close()
            raise

    def step(self, action: Any) -> Any:
        return result_of(self._worker.begin(partial(self.env.step, action)))

    def begin_reset(self, **arguments: Any) -> None:
        """Begin a reset, of which the next `reset` with these arguments returns the result."""
        if str(arguments) not in self._resets:
            self._resets = {
                str(arguments): self._worker.begin(partial(self.env.reset, **arguments))
            }

    def reset(self, **arguments: Any) -> Any:
        self.begin_reset(**arguments)
        return result_of(self._resets.pop(str(arguments)))

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Return the result of a function of the environment, which its thread calls."""
        return result_of(self._worker.begin(partial(function, self.env)))

    def get_wrapper_attr(self, name: str) -> Callable[[], Any]:
        """Wrap a method of the environment, so that its thread calls it."""
        find = getattr(self.env, "get_wrapper_attr", partial(getattr, self.env))
        method = find(name)
        return lambda: result_of(self._worker.begin(method))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)

    def close(self) -> None:
        """Close the environment, if it could be made, after the call in progress; see `wait_for_ends`."""
        self._worker.end(lambda: close_all([self._making.result()]))


class Standby:
    """Let the environments of each slot take turns: one plays an episode while others reset for the next ones."""

    def __init__(self, playing: list[CheckedEnv], spares: list[CheckedEnv]) -> None:
        """Exchange the environments in `playing`, one for each slot, with `spares`. All of them are in threads."""
        self._playing = playing
        slots = len(playing)
        self._spares = [deque(spares[slot::slots]) for slot in range(slots)]

    def reset(self, slot: int, episode: int, options: ResetOptions) -> np.ndarray:
        """Let the next environment of a slot play `episode`, as `CheckedEnv.reset`; begin the resets of later ones."""
        spares = self._spares[slot]
        spares.append(self._playing[slot])
        playing = spares.popleft()
        self._playing[slot] = playing
        for later_episode, spare in enumerate(spares, episode + 1):
            spare.env.begin_reset(**spare.reset_arguments(later_episode, options))
        return playing.reset(episode, options)
