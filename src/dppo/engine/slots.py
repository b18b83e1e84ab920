"""Slots: how many samplers may have environments at once, and how fast these may start."""

import math
import sys
from collections.abc import Iterable

from dppo.engine.actors import Actor
from dppo.engine.messages import Limits, Process

ENDING_S = 6.0  # time for which the environments of a lost process count: its keeper ends its children within 5 s


class InstanceSlots:
    """Knows of which samplers each process has the environments, and grants new ones while there is room."""

    def __init__(self, limits: Limits) -> None:
        self._max_samplers = limits.most_hosted
        self._start_s = limits.start_s
        self.limited = self._start_s > 0 or self._max_samplers < sys.maxsize
        """False if any number of environments may exist, and start at once."""
        # the actor and the samplers of each process
        self._granted: dict[Process, tuple[Actor, set[int]]] = {}
        # lost processes, and the time until which they count
        self._ending: dict[Process, float] = {}
        self._waiting: dict[int, Actor] = {}  # actors that were not granted all, by id
        self._next_start = -math.inf

    def grant(self, actor: Actor, samplers: tuple[int, ...], now: float) -> tuple[int, ...]:
        """Return the part of `samplers` whose environments the process of an actor has, or may make now."""
        if not (self.limited and samplers):
            return samplers
        self._forget_ended(now)
        granted = self._granted.setdefault(actor.process, (actor, set()))[1]
        new_samplers = [sampler for sampler in samplers if sampler not in granted]
        if self._used() + len(new_samplers) > self._max_samplers:
            self._take_back_closed()
        num_free = max(0, self._max_samplers - self._used())
        startable = new_samplers[:num_free] if now >= self._next_start else []
        if startable:
            granted.update(startable)
            self._next_start = now + len(startable) * self._start_s
        if len(startable) < len(new_samplers):
            self._waiting[actor.actor_id] = actor
        return tuple(sampler for sampler in samplers if sampler in granted)

    def _forget_ended(self, now: float) -> None:
        for process, until in list(self._ending.items()):
            self._ending[process] = min(until, now + ENDING_S)
            if until <= now:
                del self._ending[process]
                del self._granted[process]

    def _take_back_closed(self) -> None:
        """Take back the slots of samplers that an idle process has closed, because it does not host them any more."""
        for process, (actor, granted) in self._granted.items():
            if process == actor.process and not actor.queue:
                granted.intersection_update({*actor.holds, *actor.samplers})

    def take_waiting(self) -> list[Actor]:
        waiting = list(self._waiting.values())
        self._waiting = {}
        return waiting

    def record_end(self, actor: Actor) -> None:
        """Record that the process of an actor was lost or killed."""
        if actor.process in self._granted:
            self._ending[actor.process] = math.inf

    def idle_holders(self, running: Iterable[Actor]) -> list[Actor]:
        """Return idle actors with environments of samplers that moved away, if others wait for a slot.

        They would close them with their next question, which may wait for these others.
        """
        if not self._waiting or self._used() < self._max_samplers:
            return []
        return [
            actor
            for actor in running
            if not actor.queue and actor.holds.keys() - set(actor.samplers)
        ]

    def _used(self) -> int:
        return sum(len(granted) for _, granted in self._granted.values())

    def __str__(self) -> str:
        text = f"environments of {self._used()} of at most {self._max_samplers} samplers exist (licences)"
        ending = sum(len(self._granted[process][1]) for process in self._ending)
        if ending:
            text += f", those of {ending} in processes that have just ended"
        return text
