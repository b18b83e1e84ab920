"""Transports execute the engine's commands: InProcess in this process, RayTransport on Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dppo.cluster.collecting.actor import PPOActor, limit_to_one_thread
from dppo.cluster.collecting.messages import (
    Answered,
    Ask,
    Describe,
    Described,
    Event,
    ForTransport,
    Kill,
    Limits,
    Look,
    Start,
    Started,
)
from dppo.cluster.plans import SamplerPlan
from dppo.cluster.wire import Question
from dppo.envs.progress import ProgressRecord, replaying
from dppo.signals import StopSignals


@dataclass(frozen=True, slots=True)
class UnderWay:
    """The state of the questions that have not been answered."""

    steps: int
    """Env steps made for them so far."""
    processes: int
    """Processes that are working on them."""


class Transport(Protocol):
    """Starts and stops the processes that host samplers, and exchanges messages with them."""

    parallel: bool
    """True if actors work while the learner is busy."""

    def do(self, command: ForTransport) -> None:
        """Execute a command; does not wait."""

    def events(self, stop: StopSignals) -> list[Event]:
        """Return new events, if any.

        Waits for: the first event, half a second at most if actors run elsewhere. Fails when: `stop` was requested.
        """

    def under_way(self) -> UnderWay:
        """Return how many env steps have been made for unanswered questions; does not wait."""

    def take_seconds(self) -> float:
        """Return the seconds spent on sending questions and receiving answers since the last call."""

    def close(self) -> None:
        """Stop all processes; close all environments."""


class ReplayLog:
    """Logs the progress of a long replay every half minute."""

    def __init__(self, notify: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._notify = notify
        self._clock = clock
        self._logged_at = 0.0

    def __call__(self, replayed: int, to_replay: int) -> None:
        """Take note of one more replayed step."""
        now = self._clock()
        if replayed == 1:
            self._logged_at = now
        if now - self._logged_at >= Limits().quiet_s:
            self._logged_at = now
            self._notify(replaying(replayed, to_replay))


class _NotOfTheEnvironment(BaseException):
    """Carries an exception through the code that reports those of environments."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class InProcess:
    """One actor in this process, without Ray: for debugging, for fast environments, and as the reference in tests."""

    parallel = False

    def __init__(self, plan: SamplerPlan, notify: Callable[[str], None] = lambda text: None) -> None:
        self._progress = ProgressRecord(on_replay=ReplayLog(notify))
        self._actor = PPOActor(plan, progress=self._progress)
        self._threads = limit_to_one_thread()
        self._to_do: deque[Start | Ask | Describe] = deque()

    def do(self, command: ForTransport) -> None:
        """Close the environments at once on `Kill`; queue everything else for `events`."""
        if isinstance(command, Kill):
            self._to_do.clear()
            self._actor.close()
        elif not isinstance(command, Look):  # this process cannot look at itself while it works
            self._to_do.append(command)

    def events(self, stop: StopSignals) -> list[Event]:
        """Execute one queued command."""
        with stop.interruptible():
            if not self._to_do:
                return []
            command = self._to_do.popleft()
            if isinstance(command, Start):
                return [Started(command.actor_id, command.process)]
            about = command.actor_id, command.process, command.ask_id
            if isinstance(command, Describe):
                return [Described(*about, self._actor.describe(command.sampler_id))]
            question = Question(command.requests, command.hosted, command.spaces)
            try:
                return [Answered(*about, self._actor.make_segments(question, command.policy))]
            except _NotOfTheEnvironment as carrier:
                raise carrier.error from None

    def call_at_steps(self, call: Callable[[], None]) -> None:
        """Call `call` after each env step: nobody else can look while this process is busy."""

        def on_step(steps: int) -> None:
            try:
                call()
            except BaseException as error:
                raise _NotOfTheEnvironment(error) from None

        self._progress.on_step = on_step

    def under_way(self) -> UnderWay:
        """Return how many env steps have been made for the question that is being answered."""
        return UnderWay(self._progress.look().steps, 1)

    def take_seconds(self) -> float:
        """Return zero: nothing is sent anywhere."""
        return 0.0

    def close(self) -> None:
        """Close all environments."""
        self._actor.close()
        self._threads.restore_original_limits()
