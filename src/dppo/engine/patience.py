"""Patience: the timeouts of actors, for each phase of a question."""

import math

from dppo.engine.actors import Actor
from dppo.engine.deadline import Limit
from dppo.engine.messages import Limits
from dppo.envs.activity import STARTS, Activity, Phase
from dppo.ppo.exchange.questions import Answer

FACTOR = 20  # limit, in units of the longest measured duration
MEASURED = 8  # answers before measured durations count
MIN_S = {Phase.MAKE: 300.0, Phase.RESET: 300.0, Phase.STEP: 60.0, Phase.IDLE: 60.0}
COUNTED_AS = {Phase.REPLAY: Phase.STEP, **dict.fromkeys(STARTS, Phase.MAKE)}
SETTINGS = {
    Phase.MAKE: "start_timeout_s",
    Phase.RESET: "reset_timeout_s",
    Phase.STEP: "step_timeout_s",
}


class Patience:
    """Timeouts per phase: the configured value, or else 20 times the measured duration, at most `segment_timeout_s`.

    The first replacement in a row gets the full `segment_timeout_s`, so that a rare slow event costs a single replay;
    so does the last one before the run ends or gives up an episode. A process that hangs each time is given up after
    the shorter timeouts in between. The constructor of each replacement gets all of it, too, because the lost process
    may still hold the licence that it waits for.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._answers = 0  # with a measured step
        self._reported = False
        self._longest_s = dict.fromkeys(MIN_S, 0.0)

    def limit(self, phase: Phase, *, full: bool) -> Limit:
        """Return the setting that limits the time of a phase, and that time in seconds; `full`: do not shorten it."""
        phase = COUNTED_AS.get(phase, phase)
        setting = SETTINGS.get(phase, "")
        configured_s = self._limits.phase_timeouts_s.get(setting)
        if configured_s is not None:
            return setting, configured_s
        measured_s = math.inf
        if phase in MIN_S:
            measured_s = max(MIN_S[phase], FACTOR * self._longest_s[phase])
        if full or self._answers < MEASURED or measured_s >= self._limits.segment_timeout_s:
            return self._limits.segment_limit
        return setting, measured_s

    def record_look(self, actor: Actor, progress: Activity, now: float) -> None:
        """Record the activity of an actor; if it has progressed, its deadline counts from now."""
        deadline = actor.deadline
        limit = self._limit_of(actor, progress)
        standstill_s = 0.0
        if actor.queue:
            standstill_s = deadline.record_look(progress, now, limit)
        if not standstill_s:
            self.record_standstill(actor)
        deadline.standstill = (
            progress.phase,
            0.0 if progress.phase is Phase.IDLE else standstill_s,
        )

    def longest_wait_s(self, actor: Actor) -> float:
        """Return the seconds without progress after which an actor is replaced, wherever it is now."""
        progress = actor.deadline.progress
        if progress is None or not actor.queue:
            return self.limit(Phase.STEP, full=self._is_first_or_last(actor))[1]
        return self._limit_of(actor, progress)[1]

    def _limit_of(self, actor: Actor, progress: Activity) -> Limit:
        still_imports = progress.num_calls == 0
        is_made_again = actor.losses > 0 and progress.phase in STARTS
        full = still_imports or is_made_again or self._is_first_or_last(actor)
        return self.limit(progress.phase, full=full)

    def _is_first_or_last(self, actor: Actor) -> bool:
        """Return whether this is the first process after a loss, or the last one before an episode is given up."""
        return actor.losses == 1 or actor.losses >= self._limits.max_actor_restarts

    def record_standstill(self, actor: Actor) -> None:
        """Count the time for which an actor stood in a place, now that it has gone on: it did not hang there."""
        phase, standstill_s = actor.deadline.standstill
        if standstill_s > self._longest_s.get(phase, math.inf):
            self._longest_s[phase] = standstill_s

    def measure(self, answer: Answer, after_s: float = 0.0) -> None:
        """Measure the mean step of each sampler, and the share of messages in the time since the question.

        Steps of segments with a replay or an incident do not count: programs or environments may have been started.
        """
        longest_s = self._longest_s
        longest_s[Phase.IDLE] = max(longest_s[Phase.IDLE], after_s - answer.timings.total_s)
        reports = [report for report, _ in answer.results if not report.incidents]
        if not reports or answer.timings.replayed_steps:
            return
        for report in reports:
            mean_s = report.env_s / max(1, report.steps)
            longest_s[Phase.STEP] = max(longest_s[Phase.STEP], mean_s)
        self._answers += 1

    def news(self) -> list[str]:
        """Return a line about the timeouts, once, when they follow from measured durations."""
        if self._reported or self._answers < MEASURED:
            return []
        self._reported = True
        limits = [self.limit(phase, full=False) for phase in SETTINGS]
        parts = [f"{name}={seconds:.3g}" for name, seconds in limits if name != "segment_timeout_s"]
        if parts:
            return [
                f"From now on, hung actors are replaced after {', '.join(parts)}, derived from measured times."
            ]
        return []
