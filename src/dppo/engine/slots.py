"""Slots: how many samplers may have environments at once, and how fast these may start."""

import math
import sys
from collections.abc import Iterable

from dppo.engine.actors import Actor
from dppo.engine.messages import Limits, Process

ENDING_S = 6.0  # for which the environments of a lost process count: its keeper ends its children within 5 s


class Slots:
    """Knows of which samplers each process has the environments, and grants new ones while there is room."""

    def __init__(self, limits: Limits) -> None:
        self._most, self._start_s = limits.most_hosted, limits.start_s
        self.limited = self._start_s > 0 or self._most < sys.maxsize
        """False if any number of environments may exist, and start at once."""
        self._held: dict[Process, tuple[Actor, set[int]]] = {}
        self._ending: dict[Process, float] = {}  # lost ones, and the time until which they count
        self._waiting: dict[int, Actor] = {}  # by id
        self._next_start = -math.inf

    def grant(self, actor: Actor, samplers: tuple[int, ...], now: float) -> tuple[int, ...]:
        """Return those of `samplers` whose environments the process of an actor has, or may make now."""
        if not self.limited:
            return samplers
        for process, until in list(self._ending.items()):
            self._ending[process] = min(until, now + ENDING_S)
            if until <= now:
                del self._ending[process], self._held[process]
        own = self._held.setdefault(actor.process, (actor, set()))[1]
        new = [sampler for sampler in samplers if sampler not in own]
        if self._used() + len(new) > self._most:
            for process, (one, held) in self._held.items():
                if process == one.process and not one.asked:  # it has closed what it did not host any more
                    held.intersection_update({*one.holds, *one.samplers})
        may = new[: max(0, self._most - self._used())] if now >= self._next_start else []
        if may:
            own.update(may)
            self._next_start = now + len(may) * self._start_s
        if len(may) < len(new):
            self._waiting[actor.actor_id] = actor
        return tuple(sampler for sampler in samplers if sampler in own)

    def take_waiting(self) -> list[Actor]:
        """Return the actors that were not granted all since the last call."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())

    def ended(self, actor: Actor) -> None:
        """Note that the process of an actor was lost or killed."""
        if actor.process in self._held:
            self._ending[actor.process] = math.inf

    def idle_holders(self, running: Iterable[Actor]) -> list[Actor]:
        """Return idle actors with environments of samplers that moved away, if others wait for a slot.

        They would close them with their next question, which may wait for these others.
        """
        short = self._waiting and self._used() >= self._most
        return [one for one in running if not one.asked and one.holds.keys() - set(one.samplers)] if short else []

    def _used(self) -> int:
        return sum(len(held) for _, held in self._held.values())

    def __str__(self) -> str:
        ending = sum(len(self._held[process][1]) for process in self._ending)
        lost = f", those of {ending} in processes that have just ended" if ending else ""
        return f"environments of {self._used()} of at most {self._most} samplers exist (licences){lost}"
