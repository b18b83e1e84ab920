"""Alarms: the times at which something has to be done about an actor. Pure: no clock."""

import math
from heapq import heappop, heappush

from dppo.cluster.collecting.messages import Limits
from dppo.cluster.collecting.roster import Actor


class Alarms:
    """A heap with the next alarm of each actor, so that a tick attends to those that are due and to no others."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._heap: list[tuple[float, int]] = []  # times, and ids of actors; some are out of date
        self._actors: dict[int, Actor] = {}

    def set(self, actor: Actor) -> None:
        """Set the alarm of an actor whose times have changed; if the next one is later than before, it may wait."""
        when = actor.next_alarm(self._limits)
        if when < actor.alarm_at:
            actor.alarm_at = when
            self._actors[actor.actor_id] = actor
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
