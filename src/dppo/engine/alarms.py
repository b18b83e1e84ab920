"""Alarms: the time at which each actor needs attention next."""

import math
from heapq import heappop, heappush

from dppo.engine.actors import Actor, ActorState
from dppo.engine.messages import Limits


class Alarms:
    """A heap with the next alarm of each actor, so that a tick looks only at actors whose alarm is due."""

    def __init__(self, actors: dict[int, Actor], limits: Limits) -> None:
        self._actors = actors
        self._limits = limits
        self._heap: list[tuple[float, int]] = []  # times and ids of actors; some are out of date

    def set(self, actor: Actor) -> None:
        """Set the alarm of an actor whose times have changed; an earlier alarm stays."""
        deadline = actor.deadline
        alarm_at = min(deadline.due, deadline.look_at)
        if actor.state is not ActorState.RUNNING:
            alarm_at = min(alarm_at, actor.move_at(self._limits))
            if actor.state is ActorState.ABSENT:
                alarm_at = min(alarm_at, actor.start_at)
        if alarm_at < actor.alarm_at:
            actor.alarm_at = alarm_at
            heappush(self._heap, (alarm_at, actor.actor_id))

    def due(self, now: float) -> list[Actor]:
        """Forget the alarms that are due; return their actors."""
        due: list[Actor] = []
        while self._heap and self._heap[0][0] <= now:
            alarm_at, actor_id = heappop(self._heap)
            actor = self._actors[actor_id]
            if alarm_at == actor.alarm_at:  # otherwise an earlier one has been set since
                actor.alarm_at = math.inf
                due.append(actor)
        return due
