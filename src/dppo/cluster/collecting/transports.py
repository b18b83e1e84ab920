"""Transports carry out the engine's commands: InProcess in this process, RayTransport on Ray."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from dppo.assemble import SamplerPlan
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
from dppo.cluster.wire import Question
from dppo.ppo.progress import ProgressRecord, replaying
from dppo.signals import StopSignals


class Transport(Protocol):
    """Processes that host samplers, and the way to and from them."""

    parallel: bool
    """True if actors work while the learner does something else."""

    def do(self, command: ForTransport) -> None:
        """Carry out a command; does not wait."""

    def events(self, stop: StopSignals) -> list[Event]:
        """Return what has happened, perhaps nothing.

        Waits for: the first event, half a second at most where actors run elsewhere. Fails when: `stop` was asked for.
        """

    def take_seconds(self) -> float:
        """Return the seconds spent since the last call on sending questions and taking in answers."""

    def close(self) -> None:
        """Stop all processes; close all environments."""


class _SayNowAndThen:
    """Print how far a long replay has come."""

    def __init__(self, notify: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._notify = notify
        self._clock = clock
        self._said_at = 0.0

    def __call__(self, replayed: int, to_replay: int) -> None:
        now = self._clock()
        if replayed == 1:
            self._said_at = now
        if now - self._said_at >= Limits().quiet_s:
            self._said_at = now
            self._notify(replaying(replayed, to_replay))


class InProcess:
    """One actor in this process, without Ray: for debugging, for fast environments, and as the oracle of the rest."""

    parallel = False

    def __init__(self, plan: SamplerPlan, notify: Callable[[str], None] = lambda text: None) -> None:
        self._actor = PPOActor(plan, progress=ProgressRecord(on_replay=_SayNowAndThen(notify)))
        self._threads = limit_to_one_thread()
        self._to_do: deque[Start | Ask | Describe] = deque()

    def do(self, command: ForTransport) -> None:
        """Close the environments at once if it is a `Kill`; put anything else off until `events`."""
        if isinstance(command, Kill):
            self._to_do.clear()
            self._actor.close()
        elif not isinstance(command, Look):  # nobody is here to look while it works
            self._to_do.append(command)

    def events(self, stop: StopSignals) -> list[Event]:
        """Work off one command."""
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
            return [Answered(*about, self._actor.make_segments(question, command.policy))]

    def take_seconds(self) -> float:
        """Return zero: nothing is sent anywhere."""
        return 0.0

    def close(self) -> None:
        """Close all environments."""
        self._actor.close()
        self._threads.restore_original_limits()
