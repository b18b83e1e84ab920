"""PPOLearner: the master. One iteration, to be read aloud."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.cluster.pool import ActorPool, Collected
from dppo.cluster.recovery import ReplayLedger
from dppo.ppo.normalizer import Statistics
from dppo.ppo.segment import Episode, PolicySnapshot
from dppo.signals import StopSignals

if TYPE_CHECKING:  # torch is imported while Ray starts
    from dppo.cluster.trainers import Trainers

EPISODE_WINDOW = 100  # episodes that the mean return and length are taken over


@dataclass(frozen=True, slots=True)
class Iteration:
    """What one iteration came to."""

    number: int
    """1, 2, ..."""
    losses: dict[str, float]
    collected: Collected
    update_s: float
    ended: float
    """When, by `time.monotonic`: before the next segments were asked for, so that none began earlier."""


class PPOLearner:
    """Requests segments, trains on them, publishes the new weights.

    Owns what is known between two iterations: how far the run is, the normalisers' statistics, and the ledger from
    which any sampler can be rebuilt.
    """

    def __init__(self, pool: ActorPool, trainers: Trainers, ledger: ReplayLedger, statistics: Statistics) -> None:
        self._pool = pool
        self._trainers = trainers
        self._ledger = ledger
        self._statistics = statistics
        self.iteration = 0
        self.global_step = 0
        self.episodes = 0
        self.recent: deque[Episode] = deque(maxlen=EPISODE_WINDOW)
        self.incidents: Counter[str] = Counter()

    def begin(self) -> None:
        """Ask for the first segments."""
        self._request()

    def begin_again(self, lost: Collected) -> None:
        """Ask once more for segments that were lost before they were learnt from: the same are made again."""
        self.incidents["segments_lost"] += 1
        self.incidents.update(incident.kind for incident in (*lost.incidents, *self._trainers.take_incidents()))
        self._pool.renew()
        self._request()

    def collect(self, stop: StopSignals) -> Collected:
        """Receive the segments that were asked for, unless `stop` comes first.

        Waits for: every sampler. Fails when: an environment raises, or more actors are lost than may be. May be given
        up at any moment: nothing has changed then.
        """
        return self._pool.receive(stop)

    def learn(self, collected: Collected, *, last: bool) -> Iteration:
        """Train, publish, and ask for more unless this is the last iteration.

        Consumes: segments of policy version k. Produces: policy version k + 1. Fails when: a loss is not finite, or
        the segments are lost on their way to learners elsewhere: then `begin_again`.
        """
        began = time.monotonic()
        merged = self._statistics.merged([report.statistics for report in collected.reports])
        # Rewards are scaled by all returns seen so far. Observations must be seen as they were when acted on.
        statistics = Statistics(obs=self._statistics.obs, returns=merged.returns)
        losses = self._trainers.update(collected.segments, statistics, self.iteration)
        update_s = time.monotonic() - began
        self._record(collected, merged)
        ended = time.monotonic()
        if not last:
            self._request()
        return Iteration(self.iteration, losses, collected, update_s, ended)

    def _request(self) -> None:
        self._pool.request(self.snapshot(), self.iteration)

    def _record(self, collected: Collected, statistics: Statistics) -> None:
        """Make these segments part of the run: everything in sampler order, whatever order they came in."""
        self._statistics = statistics
        for report in collected.reports:
            self._ledger.record(report)
            self.global_step += report.steps
            self.episodes += len(report.episodes)
            self.recent.extend(report.episodes)
            self.incidents.update(incident.kind for incident in report.incidents)
        self.incidents.update(incident.kind for incident in (*collected.incidents, *self._trainers.take_incidents()))
        self.iteration += 1

    # ------------------------------------------------------------------ what is known between two iterations

    def snapshot(self) -> PolicySnapshot:
        """The current policy, as samplers get it: a copy."""
        weights = self._trainers.weights()
        if self._statistics.obs is None:
            return PolicySnapshot(self.iteration, weights)
        mean, std = self._statistics.obs.mean_and_std()
        return PolicySnapshot(self.iteration, weights, mean, std)

    def weights_sha256(self) -> str:
        """A fingerprint of all weights: equal when every bit is."""
        return hashlib.sha256(self._trainers.weights().tobytes()).hexdigest()

    def state(self) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, Any]]:
        """All that the next iteration depends on: named arrays by part, and plain values."""
        spec = self._trainers.spec
        arrays = {
            "model": spec.unflatten(self._trainers.weights()),
            "optimizer": self._trainers.state(),
            "normalizer": self._statistics.arrays(),
            "samplers": self._ledger.arrays(),
        }
        values = {
            "iteration": self.iteration,
            "global_step": self.global_step,
            "episodes": self.episodes,
            "recent": [astuple(episode) for episode in self.recent],
            "incidents": dict(self.incidents),
        }
        return arrays, values

    def load(self, arrays: dict[str, dict[str, np.ndarray]], values: dict[str, Any]) -> None:
        """Go on from what `state` gave; samplers are rebuilt by their first request."""
        self._trainers.load(self._trainers.spec.flatten(arrays["model"]), arrays["optimizer"])
        self._statistics = self._statistics.loaded(arrays["normalizer"])
        self._ledger.load(arrays["samplers"])
        self.iteration = values["iteration"]
        self.global_step = values["global_step"]
        self.episodes = values["episodes"]
        self.recent.extend(Episode(*episode) for episode in values["recent"])
        self.incidents.update(values["incidents"])
