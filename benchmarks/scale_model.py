"""A model of an iteration from the costs of the driver, and the same iteration with the real engine in virtual time.

`scale.py --model` prints both for 64, 512 and 4,096 actors. The driver is one thread, which asks, takes in answers and
trains; the actors work meanwhile.
"""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from dppo.engine.engine import CollectionEngine
from dppo.engine.hosting import shares
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Answered, Ask, Command, Describe, Limits, Process, Started
from dppo.ppo.exchange.questions import Answer
from dppo.ppo.exchange.records import PolicySnapshot, SamplerCarry, SegmentReport, Timings
from dppo.spaces.actions import DiscreteActions
from dppo.spaces.spaces import Spaces

LIMITS = Limits(segment_timeout_s=1e6, max_actor_restarts=3)
SPACES = Spaces(np.dtype(("float32", (4,))), DiscreteActions(2))


@dataclass(frozen=True)
class Costs:
    """Seconds of the driver, as results/scale.md has them."""

    question_s: float = 150e-6
    answer_s: float = 400e-6
    segment_s: float = 6e-6
    """Of the learner for each segment: moments, statistics."""
    row_s: float = 17e-6
    """Of an update for each row: batch and SGD."""
    policy_s: float = 2e-3
    """To send a policy of 1 MB, besides the questions."""
    latency_s: float = 2e-3
    """Until a question reaches an actor that has the policy, and an answer the driver."""


@dataclass(frozen=True)
class Work:
    """An iteration."""

    actors: int
    segment_s: float
    """Mean duration of the steps of all samplers of an actor."""
    rows: int
    """Of a segment."""
    lag: int = 0
    samplers_per_actor: int = 1
    sigma: float = 0.0
    """Spread of the logarithm of the times of segments."""

    @property
    def samplers(self) -> int:
        return self.actors * self.samplers_per_actor


def driver_s(work: Work, costs: Costs) -> float:
    """Return the seconds of the driver in an iteration."""
    of_actors = work.actors * (costs.question_s + costs.answer_s)
    return of_actors + update_s(work, costs) + costs.policy_s


def update_s(work: Work, costs: Costs) -> float:
    """Return the seconds of an update."""
    return work.samplers * (costs.segment_s + work.rows * costs.row_s)


def modelled_s(work: Work, costs: Costs) -> float:
    """Return the seconds of an iteration with even segments.

    In turns, the first question waits for nothing, and the last answer for all others. With lag, actors or the driver
    set the pace, whoever is slower.
    """
    question, answer = costs.question_s, costs.answer_s
    if work.lag:
        return max(work.segment_s, driver_s(work, costs))
    talking = work.actors * max(question, answer) + min(question, answer)
    return talking + 2 * costs.latency_s + work.segment_s + update_s(work, costs) + costs.policy_s


class Simulated:
    """The engine with actors that take virtual time, and a driver that takes the time of its costs."""

    def __init__(self, work: Work, costs: Costs, seed: int = 0) -> None:
        self._work, self._costs, self._rng = work, costs, random.Random(seed)
        self._ledger = ReplayLedger(work.samplers, replay=True, policy_lag=work.lag)
        self._engine = CollectionEngine(shares(work.samplers, work.actors), self._ledger, LIMITS)
        self._now = 0.0
        self._free = [0.0] * work.actors
        self._arriving: list[tuple[float, int, Ask]] = []
        self._do(self._engine.describe(0.0))
        for actor in range(work.actors):
            self._do(self._engine.on(Started(Process(actor, 1)), 0.0))
            for command in self._engine.tick(0.0):
                if isinstance(command, Describe):
                    self._do(
                        self._engine.on(Answered(command.process, command.ask_id, SPACES), 0.0)
                    )

    def iteration_s(self, iterations: int = 9, warm_up: int = 3) -> float:
        """Return the mean seconds of an iteration after the warm-up."""
        began, asked = 0.0, 0
        for index in range(iterations):
            if index == warm_up:
                began = self._now
            while asked <= index + self._work.lag:
                self._do(
                    self._engine.request(
                        PolicySnapshot(index, np.zeros(1, np.float32)), asked, self._now
                    )
                )
                asked += 1
            while not self._engine.requests.finished:
                self._now = max(self._now, self._arriving[0][0])
                while self._arriving and self._arriving[0][0] <= self._now:
                    _, _, ask = heapq.heappop(self._arriving)
                    self._now += self._costs.answer_s
                    self._do(self._engine.on(answer_to(ask), self._now))
                self._do(self._engine.tick(self._now))
            self._engine.requests.take(self._now, 0.0, [])
            self._now += update_s(self._work, self._costs) + self._costs.policy_s
        return (self._now - began) / (iterations - warm_up)

    def _do(self, commands: list[Command]) -> None:
        for command in commands:
            if isinstance(command, Ask):
                self._now += self._costs.question_s
                actor = command.process.actor_id
                begins = max(self._free[actor], self._now + self._costs.latency_s)
                self._free[actor] = begins + self._segment_s()
                heapq.heappush(
                    self._arriving,
                    (self._free[actor] + self._costs.latency_s, command.ask_id, command),
                )

    def _segment_s(self) -> float:
        sigma = self._work.sigma
        return self._work.segment_s * math.exp(sigma * self._rng.gauss(0.0, 1.0) - sigma**2 / 2)


def answer_to(ask: Ask) -> Any:
    """Return the event of an answer without arrays."""
    version = ask.policy.version
    made = tuple(
        (report(one.sampler_id, one.index, version), "segment") for one in ask.question.requests
    )
    return Answered(ask.process, ask.ask_id, Answer(made, Timings(1.0, 1.0)))


def report(sampler: int, index: int, version: int) -> SegmentReport:
    """Return the report of a segment that is an episode."""
    one, episode = np.zeros(1), np.full(1, index)
    carry = SamplerCarry(episode, one, episode, one, one.astype(np.uint32))
    return SegmentReport(sampler, index, version, 64, carry, (np.zeros(64, np.int64),), env_s=1.0)
