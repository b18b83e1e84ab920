"""PPOLearner: the training loop."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.engine.collector import Collected, Collector
from dppo.engine.ledger import ReplayLedger
from dppo.errors import SegmentsLost, printable
from dppo.log import logger
from dppo.ppo.exchange.records import Episode, Experience, Incident, IncidentKind, PolicySnapshot, Update
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.exchange.statistics import Statistics
from dppo.process_state.borders import take_changes
from dppo.run.env_faults import EnvFaults
from dppo.signals import StopSignals

if TYPE_CHECKING:  # torch is imported while Ray starts
    from dppo.learners.trainers import Trainers

EPISODE_WINDOW = 100  # number of recent episodes for the mean return and length
OF_SEVERAL = {IncidentKind.OTHER_CPU, IncidentKind.GLOBAL_STATE}  # actors of a node, or of a run, send the same
OF_ONE_RUN = ("learning_rate", "rate_factor", "kept")  # in the state of the trainers


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


class PPOLearner:
    """Requests segments, trains on them, publishes the new weights.

    Owns the state between two iterations: the progress of the run, the statistics of the normalizers, and the ledger
    from which any sampler can be rebuilt.
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
        """Begin a new run; `load` or `adopt` continue an earlier one.

        Args:
            policy_lag: K; segment k is collected with policy max(0, k - K). If K > 0, actors do not wait for learning.
            freeze_norm_after: env steps after which statistics no longer change; None: never.
        """
        self._collector = collector
        self._trainers = trainers
        self._ledger = ledger
        self._statistics = statistics
        self.env_faults = EnvFaults(ledger)  # without a limit
        self._lag = policy_lag
        self.env_options: Callable[[], dict[str, Any] | None] = lambda: None
        """Returns the options for resets under the policies to come: see `RunInfo.set_env`."""
        self._value_scale: ValueScale | None = None
        self._freeze_norm_after = math.inf if freeze_norm_after is None else freeze_norm_after
        # The policy that collects a segment, and its statistics, by the index of the segment from the current one on.
        self._acting: dict[int, tuple[PolicySnapshot, Statistics]] = {}
        self._asked = -1  # index of the last requested segments
        self.iteration = 0
        self.global_step = 0
        self.episodes = 0
        self.recent: deque[Episode] = deque(maxlen=EPISODE_WINDOW)
        self.incidents: Counter[str] = Counter()
        self._reported: set[str] = set()  # messages that several actors send, and that are reported once
        self._new_incidents: list[Incident] = []  # since the last iteration

    def run(self, iterations: int, stop: StopSignals) -> Iterator[Iteration]:
        """Train until `iterations` are done.

        Consumes: segments k, of policy version max(0, k - K). Produces: policy version k + 1. Waits for: every sampler.
        Fails when: environments fail too often, an actor's restart budget is spent, a loss is not finite, or `stop` is
        requested during a wait. The caller may stop iterating: the state is that of the last finished iteration.
        """
        self._report_changes()
        self._asked = self.iteration - 1
        self._request(iterations)
        while self.iteration < iterations:
            iteration = self._update(self.env_faults.checked(self._collector.receive(stop)), stop)
            self._request(iterations)
            yield iteration

    def _request(self, iterations: int) -> None:
        """Ask for the segments that the current policy is to collect: K + 1 at the start, then one per iteration.

        After a resume, segments that were in flight are requested with the policies that they had then.
        """
        current = self.snapshot(), self._statistics
        for index in range(self._asked + 1, self.iteration + self._lag + 1):
            self._acting.setdefault(index, current)
            if index < iterations:
                self._collector.request(self._acting[index][0], index)
                self._asked = index

    def _update(self, collected: Collected, stop: StopSignals) -> Iteration:
        """Train on these segments, and commit them to the run."""
        while True:
            began = time.monotonic()
            merged = self._statistics
            if self.global_step < self._freeze_norm_after:
                merged = merged.merged([report.statistics for report in collected.reports])
            scale = merged.reward_scale()  # of all returns seen so far
            try:
                update = self._trainers.update(Experience(collected.segments, collected.policy, scale, self.iteration))
                break
            except SegmentsLost as error:
                collected = self._collect_again(collected, error, stop)
        update_s = time.monotonic() - began
        self._value_scale = update.value_scale
        self._commit(collected, merged, update.incidents)
        incidents, self._new_incidents = tuple(self._new_incidents), []
        return Iteration(self.iteration, update, replace(collected, segments=[]), incidents, update_s, time.monotonic())

    def _collect_again(self, lost: Collected, error: SegmentsLost, stop: StopSignals) -> Collected:
        """Collect the same segments again, and those behind them that were in flight."""
        logger.warning("%s; they are collected again", error)
        self._take(Incident(IncidentKind.SEGMENTS_LOST, str(error)), *lost.incidents)
        self._collector.renew()
        for index in range(lost.index, self._asked + 1):
            self._collector.request(self._acting[index][0], index)
        return self.env_faults.checked(self._collector.receive(stop), again=True)

    def _commit(self, collected: Collected, statistics: Statistics, of_trainers: Sequence[Incident]) -> None:
        """Make these segments part of the run, in sampler order rather than in order of arrival."""
        self._statistics = statistics
        for report in collected.reports:
            self.global_step += report.steps
            self.episodes += len(report.episodes)
            self.recent.extend(report.episodes)
            new = [one for one in report.incidents if one.message not in self._reported]
            self._reported |= {one.message for one in new if one.kind in OF_SEVERAL}
            for incident in new:
                self.env_faults.log(incident)  # the others were reported when they happened
            self._take(*new)
        self._take(*collected.incidents, *of_trainers)
        self._acting.pop(collected.index)
        self.iteration += 1

    def _report_changes(self) -> None:
        """Report state of this process that code of users has changed, which actors may report again."""
        for change in take_changes():
            logger.warning("%s.", change)
            self._reported.add(f"{change}.")
            self._take(Incident(IncidentKind.GLOBAL_STATE, f"{change}."))

    def _take(self, *incidents: Incident) -> None:
        self._new_incidents += incidents
        for incident in incidents:
            self.count(incident)

    def count(self, incident: Incident) -> None:
        """Count an incident among those of the run."""
        self.incidents[incident.kind.value] += 1

    def snapshot(self) -> PolicySnapshot:
        """Return a copy of the current policy for samplers."""
        weights, scale = self._trainers.weights(), self._statistics.obs_scale()
        return PolicySnapshot(self.iteration, weights, scale, self._value_scale, self.env_options())

    def policy_in(self, arrays: dict[str, dict[str, np.ndarray]], version: int) -> PolicySnapshot:
        """Return the policy of a checkpoint of this run, to act with."""
        scale = self._statistics.loaded(arrays["normalizer"]).obs_scale()
        return PolicySnapshot(version, self._trainers.spec.flatten(arrays["model"]), scale)

    def weights_sha256(self) -> str:
        """Return the SHA-256 of all weights."""
        return hashlib.sha256(self._trainers.weights().tobytes()).hexdigest()

    def state(self) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """Return everything that the next iteration depends on: named arrays by part, and plain values."""
        spec = self._trainers.spec
        arrays = {
            "model": spec.unflatten(self._trainers.weights()),
            "optimizer": self._trainers.state(),
            "normalizer": self._statistics.arrays(),
            "samplers": self._ledger.arrays(self.iteration),
        }
        values = {
            "iteration": self.iteration,
            "global_step": self.global_step,
            "episodes": self.episodes,
            "recent": [astuple(episode)[:5] for episode in self.recent],
            "incidents": dict(self.incidents),
            "env_faults": dict(self.env_faults.counts),
        }
        current = [policy for policy, _ in self._acting.values() if policy.version == self.iteration]
        if (options := self.env_options()) is not None:
            values["env_options"] = options
            values["options_current"] = current[0].env_options if current else options
        for index, (policy, statistics) in self._acting.items():
            if policy.version != self.iteration:  # else it is the current one
                name = _in_flight(index - self.iteration)
                arrays[name] = {"weights": policy.weights} | statistics.arrays()
                scale = None if policy.value_scale is None else astuple(policy.value_scale)
                more = {"options": policy.env_options, "version": policy.version, "value_scale": scale}
                values |= {f"{key}_{name}": value for key, value in more.items() if value is not None}
        return arrays, values

    def adopt(self, arrays: dict[str, dict[str, np.ndarray]]) -> None:
        """Start with the weights, optimizer state and normalizer statistics of another run.

        An adapted learning rate and kept segments are left out: this run starts with its own.
        """
        optimizer = arrays["optimizer"].items()
        moments = {name: array for name, array in optimizer if name.partition(".")[0] not in OF_ONE_RUN}
        self._start_with(arrays, moments)

    def _start_with(self, arrays: dict[str, dict[str, np.ndarray]], optimizer: dict[str, np.ndarray]) -> None:
        self._trainers.load(self._trainers.spec.flatten(arrays["model"]), optimizer)
        self._statistics = self._statistics.loaded(arrays["normalizer"])
        self._value_scale = ValueScale.of_state(optimizer)

    def load(self, arrays: dict[str, dict[str, np.ndarray]], values: dict[str, Any]) -> None:
        """Restore the result of `state`; samplers are rebuilt by their first request."""
        self._start_with(arrays, arrays["optimizer"])
        self.iteration = values["iteration"]
        self._ledger.load(arrays["samplers"], self.iteration)
        self.global_step = values["global_step"]
        self.episodes = values["episodes"]
        for env, index, total, length, success in values["recent"]:
            self.recent.append(Episode(int(env), int(index), float(total), int(length), success and bool(success)))
        self.incidents.update({printable(kind): int(count) for kind, count in values["incidents"].items()})
        faults = values.get("env_faults", {})
        self.env_faults.counts.update({printable(name): int(count) for name, count in faults.items()})
        for ahead in range(self._lag):
            name = _in_flight(ahead)
            if name in arrays:
                statistics, scale = self._statistics.loaded(arrays[name]), values.get(f"value_scale_{name}")
                value_scale = None if scale is None else ValueScale(*scale)
                version, weights = values[f"version_{name}"], arrays[name]["weights"]
                self._trainers.spec.unflatten(weights)  # which raises if they do not fit
                options = values.get(f"options_{name}")
                policy = PolicySnapshot(version, weights, statistics.obs_scale(), value_scale, options)
                self._acting[self.iteration + ahead] = policy, statistics
        current = replace(self.snapshot(), env_options=values.get("options_current")), self._statistics
        for index in range(self.iteration, self.iteration + self._lag + 1):
            self._acting.setdefault(index, current)


def _in_flight(ahead: int) -> str:
    """Return the name in a checkpoint of the policy that collects the segments `ahead` of the current ones."""
    return f"in_flight_{ahead}" if ahead else "in_flight"
