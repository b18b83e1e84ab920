"""Patience: the time that a step, a reset and a constructor may take; and alarms. Pure: no Ray, no clock."""

import math
from heapq import heappop, heappush

from dppo.cluster.collecting.messages import Limits
from dppo.cluster.collecting.roster import Actor
from dppo.cluster.wire import Answer
from dppo.envs.activity import Activity, Phase

TIMES = 20  # the longest seen
MEASURED = 8  # answers before that counts
LEAST_S = {Phase.MAKE: 300.0, Phase.RESET: 300.0, Phase.STEP: 60.0}
SETTINGS = {Phase.MAKE: "start_timeout_s", Phase.RESET: "reset_timeout_s", Phase.STEP: "step_timeout_s"}


class Patience:
    """Limits that are set, and for all others the twentyfold of what was measured, `segment_timeout_s` at most.

    An actor that has just been replaced gets the whole of that, so that something slow that is rare costs a replay and
    not the run.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._answers, self._said = limits, 0, False
        self._longest_s = dict.fromkeys(LEAST_S, 0.0)

    def limit(self, phase: Phase, *, replaced: bool) -> tuple[str, float]:
        """Return the name of the setting that limits the time of a phase, and that time in seconds."""
        phase = Phase.STEP if phase is Phase.REPLAY else phase
        whole_s = self._limits.segment_timeout_s
        given = self._limits.of_phases.get(SETTINGS.get(phase, ""))
        if given is not None:
            return SETTINGS[phase], given
        measured_s = max(LEAST_S.get(phase, math.inf), TIMES * self._longest_s.get(phase, math.inf))
        if replaced or self._answers < MEASURED or measured_s >= whole_s:
            return "segment_timeout_s", whole_s
        return SETTINGS[phase], measured_s

    def looked(self, actor: Actor, progress: Activity, now: float, *, replaced: bool) -> None:
        """Note what an actor was seen to do; if it has progressed, its deadline counts from now."""
        limit = self.limit(progress.phase, replaced=replaced or self._limits.max_actor_restarts == 0)
        self._saw(progress.phase, actor.progressed(progress, now, limit))

    def answered(self, answer: Answer) -> None:
        """Note the time of a mean step."""
        steps = sum(report.steps for report, _ in answer.made)
        self._saw(Phase.STEP, answer.timings.env_s / max(1, steps))
        self._answers += 1

    def _saw(self, phase: Phase, seconds: float) -> None:
        if phase in self._longest_s:
            self._longest_s[phase] = max(self._longest_s[phase], seconds)

    def news(self) -> list[str]:
        """Return a line about the limits, once, when they are those of what was measured."""
        if self._said or self._answers < MEASURED:
            return []
        self._said, limits = True, [self.limit(phase, replaced=False) for phase in SETTINGS]
        said = ", ".join(f"{name}={seconds:.3g}" for name, seconds in limits if name != "segment_timeout_s")
        return [f"Hung actors are replaced after {said}."] if said else []


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
