"""PPOLearner: the training loop."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from dppo.engine.collector import Collected, Collector
from dppo.engine.ledger import ReplayLedger
from dppo.errors import SegmentsLost
from dppo.log import logger
from dppo.ppo.exchange.records import (
    Episode,
    Experience,
    Incident,
    IncidentKind,
    PolicySnapshot,
    SegmentReport,
    Update,
)
from dppo.ppo.exchange.scales import Statistics, ValueScale
from dppo.process_state.borders import take_changes
from dppo.run.env_faults import EnvFaults
from dppo.signals import StopSignals

if TYPE_CHECKING:  # torch is imported while Ray starts
    from dppo.learners.trainers import Trainers

EPISODE_WINDOW = 100  # number of recent episodes for the mean return and length
# kinds of which several actors report the same incident
SHARED_KINDS = {IncidentKind.OTHER_CPU, IncidentKind.GLOBAL_STATE}
# kinds of which an iteration logs the first alone
ABANDONED_KINDS = {IncidentKind.REPLAY_MISMATCH, IncidentKind.EPISODE_ABANDONED}


@dataclass(frozen=True, slots=True)
class Iteration:
    """The result of one iteration."""

    number: int
    """1, 2, ..."""
    update: Update
    collected: Collected
    """The collected reports, without the segments."""
    incidents: tuple[Incident, ...]
    """Resolved faults of samplers, actors and learners during the iteration."""
    update_s: float
    ended: float
    """Time of `time.monotonic` at the end of the update."""


class ActingPolicy(NamedTuple):
    """A policy that collects segments, with the statistics of its normalizers."""

    snapshot: PolicySnapshot
    statistics: Statistics


class PPOLearner:
    """Requests segments, trains on them, publishes the new weights.

    Owns the state between two iterations, which `RunState` captures and restores: the progress of the run, the
    statistics of the normalizers, and the ledger from which any sampler can be rebuilt.
    """

    def __init__(
        self,
        collector: Collector,
        trainers: Trainers,
        ledger: ReplayLedger,
        statistics: Statistics,
        *,
        policy_lag: int = 0,
        freeze_norm_after: int | None = None,
    ) -> None:
        """Begin a new run; a `RunState` continues an earlier one.

        Args:
            policy_lag: K; segment k is collected with policy max(0, k - K). If K > 0, actors do not wait for learning.
            freeze_norm_after: env steps after which statistics no longer change; None: never.
        """
        self._collector = collector
        self.trainers = trainers
        self.ledger = ledger
        self.statistics = statistics
        self.value_scale: ValueScale | None = None
        self.policy_lag = policy_lag
        self.policies: dict[int, ActingPolicy] = {}
        """The policies that collect segments, by the index of the segment, from the current one on."""
        self.env_options: Callable[[], dict[str, Any] | None] = lambda: None
        """Returns the options for resets under the policies to come: see `RunInfo.set_env`."""
        self.env_faults = EnvFaults(ledger)  # faults are counted, not limited
        self.prior_versions = 0
        """Number of first policy versions in whose place a controller (`prior`) collects."""
        self.iteration = 0
        self.global_step = 0
        self.episodes = 0
        self.recent: deque[Episode] = deque(maxlen=EPISODE_WINDOW)
        self.incidents: Counter[str] = Counter()
        self.reports: Sequence[SegmentReport] = ()
        """The reports of the last iteration, in sampler order."""
        self._freeze_norm_after = math.inf if freeze_norm_after is None else freeze_norm_after
        self.inherited_freeze: int | None = None
        """`freeze_norm_after` as a branch takes it over from its origin; None if it has its own."""
        self._last_requested = -1  # index of segments
        # messages that several actors send, and that are logged once
        self._logged: set[str] = set()
        self._new_incidents: list[Incident] = []  # incidents since the last iteration

    def run(self, iterations: int, stop: StopSignals) -> Iterator[Iteration]:
        """Train until `iterations` are done.

        Consumes: segments k, of policy version max(0, k - K). Produces: policy version k + 1. Waits for: every sampler.
        Fails when: environments fail too often, an actor's restart budget is spent, a loss is not finite, or `stop` is
        requested during a wait. The caller may stop iterating: the state is as after the last finished iteration.
        """
        self._log_changes()
        self._last_requested = self.iteration - 1
        self._request(iterations)
        while self.iteration < iterations:
            collected = self.env_faults.checked(self._collector.receive(stop))
            iteration = self._update(collected, stop)
            self._request(iterations)
            yield iteration

    def inherit_freeze(self, steps: int | None) -> None:
        """Stop updating the statistics after so many env steps, as the origin of a branch does; None: no change."""
        if steps is not None:
            self.inherited_freeze = steps
            self._freeze_norm_after = steps

    def _request(self, iterations: int) -> None:
        """Ask for the segments that the current policy is to collect: K + 1 at the start, then one per iteration.

        After a resume, segments that were in flight are requested with the policies that they had then.
        """
        current = ActingPolicy(self.snapshot(), self.statistics)
        for index in range(self._last_requested + 1, self.iteration + self.policy_lag + 1):
            self.policies.setdefault(index, current)
            if index < iterations:
                self._collector.request(self.policies[index].snapshot, index)
                self._last_requested = index

    def _update(self, collected: Collected, stop: StopSignals) -> Iteration:
        """Train on these segments, and commit them to the run."""
        while True:
            began = time.monotonic()
            statistics = self.statistics
            if self.global_step < self._freeze_norm_after:
                statistics = statistics.merged([report.statistics for report in collected.reports])
            scale = statistics.reward_scale()  # of all returns seen so far
            try:
                experience = Experience(collected.segments, collected.policy, scale, self.iteration)
                if collected.policy.version < self.prior_versions:
                    # the clone of the controller acts with the scale after this update
                    experience = replace(experience, next_obs_scale=statistics.obs_scale())
                update = self.trainers.update(experience)
                break
            except SegmentsLost as error:
                collected = self._collect_again(collected, error, stop)
        update_s = time.monotonic() - began
        self.value_scale = update.value_scale
        self._commit(collected, statistics, update.incidents)
        return Iteration(
            self.iteration,
            update,
            replace(collected, segments=[]),
            self._take_new_incidents(),
            update_s,
            time.monotonic(),
        )

    def take_open_incidents(self) -> tuple[Incident, ...]:
        """Return, and count, the incidents of the iteration that the end of the run has interrupted."""
        self._record(self._collector.take_incidents())
        return self._take_new_incidents()

    def count_unlearned(self, incidents: Sequence[Incident]) -> tuple[Incident, ...]:
        """Log, count and return incidents of an iteration that is dropped; a resumed run meets them again."""
        self._log_incidents(incidents)
        return self._take_new_incidents()

    def _take_new_incidents(self) -> tuple[Incident, ...]:
        incidents = tuple(self._new_incidents)
        self._new_incidents.clear()
        return incidents

    def _collect_again(
        self, collected: Collected, error: SegmentsLost, stop: StopSignals
    ) -> Collected:
        """Collect the lost segments again, and later segments that were in flight."""
        logger.warning("%s; they are collected again", error)
        self._record([Incident(IncidentKind.SEGMENTS_LOST, str(error)), *collected.incidents])
        self._collector.renew()
        for index in range(collected.index, self._last_requested + 1):
            self._collector.request(self.policies[index].snapshot, index)
        return self.env_faults.checked(self._collector.receive(stop), is_repeated=True)

    def _commit(
        self, collected: Collected, statistics: Statistics, trainer_incidents: Sequence[Incident]
    ) -> None:
        """Make these segments part of the run, in sampler order rather than in order of arrival."""
        self.statistics = statistics
        self.reports = collected.reports
        for report in collected.reports:
            self.global_step += report.steps
            self.episodes += len(report.episodes)
            self.recent.extend(episode for episode in report.episodes if not episode.explored)
        self._log_incidents(
            [incident for report in collected.reports for incident in report.incidents]
        )
        self._record(collected.incidents)
        self._record(trainer_incidents)
        self.policies.pop(collected.index)
        self.iteration += 1

    def _log_incidents(self, incidents: Sequence[Incident]) -> None:
        """Record and log the incidents of all samplers; all others were logged when they happened."""
        abandoned = []
        for incident in incidents:
            if incident.message in self._logged:
                continue
            if incident.kind in SHARED_KINDS:
                self._logged.add(incident.message)
            if incident.kind in ABANDONED_KINDS:
                abandoned.append(incident)
            else:
                self.env_faults.log(incident)
            self._record([incident])
        if abandoned:
            count_text = f" (and {len(abandoned) - 1} more like it)" if len(abandoned) > 1 else ""
            logger.warning("%s%s", abandoned[0].message, count_text)

    def _log_changes(self) -> None:
        """Log state of this process that code of users has changed; actors may send the same messages."""
        for change in take_changes():
            logger.warning("%s.", change)
            self._logged.add(f"{change}.")
            self._record([Incident(IncidentKind.GLOBAL_STATE, f"{change}.")])

    def _record(self, incidents: Sequence[Incident]) -> None:
        """Count incidents, and keep them for the next `Iteration`."""
        self._new_incidents += incidents
        for incident in incidents:
            self.count(incident)

    def count(self, incident: Incident) -> None:
        """Count an incident of the run."""
        self.incidents[incident.kind.value] += 1

    def incident_metrics(self) -> dict[str, float]:
        """Return the incidents so far; evaluations add theirs to a row that exists already."""
        return {f"incidents/{kind}": count for kind, count in self.incidents.items()}

    def snapshot(self) -> PolicySnapshot:
        return PolicySnapshot(
            self.iteration,
            self.trainers.weights(),
            self.statistics.obs_scale(),
            self.value_scale,
            self.env_options(),
        )

    def policy_in(self, arrays: dict[str, dict[str, np.ndarray]], version: int) -> PolicySnapshot:
        """Read the policy of a checkpoint of this run, to act with."""
        scale = self.statistics.loaded(arrays["normalizer"]).obs_scale()
        return PolicySnapshot(version, self.trainers.spec.flatten(arrays["model"]), scale)

    def weights_sha256(self) -> str:
        return hashlib.sha256(self.trainers.weights().tobytes()).hexdigest()
