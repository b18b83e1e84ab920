"""Patience: the limits after which an actor counts as hung."""

import math

from dppo.engine.actors import Actor
from dppo.engine.messages import Limits
from dppo.envs.activity import Activity, Phase
from dppo.ppo.exchange.questions import Answer

TIMES = 20  # the longest seen
MEASURED = 8  # answers before that counts
LEAST_S = {Phase.MAKE: 300.0, Phase.RESET: 300.0, Phase.STEP: 60.0, Phase.IDLE: 60.0}
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
        return SETTINGS.get(phase, ""), measured_s

    def looked(self, actor: Actor, progress: Activity, now: float) -> None:
        """Note what an actor was seen to do; if it has progressed, its deadline counts from now."""
        unsure = actor.losses > 0 or self._limits.max_actor_restarts == 0 or progress.moves == 0  # it may still import
        stood_s = actor.progressed(progress, now, self.limit(progress.phase, replaced=unsure))
        if not stood_s:
            self.went_on(actor)
        actor.stood = progress.phase, stood_s * (progress.phase is not Phase.IDLE)

    def went_on(self, actor: Actor) -> None:
        """Count the time for which an actor stood in a place, now that it has gone on: it did not hang there."""
        self._saw(*actor.stood)

    def answered(self, answer: Answer, after_s: float = 0.0) -> None:
        """Note the time of a mean step, and what messages took of the time since the question."""
        self._saw(Phase.IDLE, after_s - answer.timings.total_s)
        self._saw(Phase.STEP, max(report.env_s / max(1, report.steps) for report, _ in answer.made))
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
