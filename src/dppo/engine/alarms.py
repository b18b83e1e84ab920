"""Alarms: the time at which each actor needs attention next."""

import math
from heapq import heappop, heappush

from dppo.engine.actors import Actor, State
from dppo.engine.messages import Limits


class Alarms:
    """A heap with the next alarm of each actor, so that a tick attends to those that are due and to no others."""

    def __init__(self, actors: dict[int, Actor], limits: Limits) -> None:
        self._actors, self._limits = actors, limits
        self._heap: list[tuple[float, int]] = []  # times, and ids of actors; some are out of date

    def set(self, actor: Actor) -> None:
        """Set the alarm of an actor whose times have changed; if the next one is later than before, it may wait."""
        start_at = actor.start_at if actor.state is State.ABSENT else math.inf
        when = min(actor.due, actor.look_at, start_at, actor.move_at(self._limits))
        if when < actor.alarm_at:
            actor.alarm_at = when
            heappush(self._heap, (when, actor.actor_id))

    def due(self, now: float) -> list[Actor]:
        """Return the actors whose alarms are due, and forget these alarms."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            when, actor_id = heappop(self._heap)
            actor = self._actors[actor_id]
            if when == actor.alarm_at:  # else an earlier one has been set since
                actor.alarm_at = math.inf
                due.append(actor)
        return due
