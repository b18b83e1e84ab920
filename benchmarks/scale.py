"""Measure the cost of an answer to the engine at different numbers of actors, in virtual time and without Ray.

    python benchmarks/scale.py
    python benchmarks/scale.py --actors 64 1000 10000

Each actor hosts one sampler. Answers arrive one at a time, in a random order, each in a batch of its own, which is the
worst case. The CPU time that counts is that of the engine alone: requests, events, ticks, questions, ledger. The last
lines have, for each number of actors, this number and the microseconds per answer, the median of some repeats.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dppo.cluster.collecting.engine import Collecting
from dppo.cluster.collecting.hosting import shares
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import Answered, Ask, Command, Describe, Limits, Process, Started
from dppo.cluster.wire import Answer
from dppo.ppo.exchange.records import PolicySnapshot, SamplerCarry, SegmentReport, Timings
from dppo.spaces.actions import DiscreteActions
from dppo.spaces.spaces import Spaces

REPEATS = 5
ANSWERS = 10_000  # of a measurement, at least
SEGMENT_S = 1.0  # of virtual time
LIMITS = Limits(segment_timeout_s=600.0, max_actor_restarts=3)
SPACES = Spaces(np.dtype(("float32", (4,))), DiscreteActions(2))


class Run:
    """The engine with actors that always answer; measures the seconds spent in the engine."""

    def __init__(self, num_actors: int) -> None:
        self.seconds = 0.0
        self._now = 0.0
        self._index = 0
        self._rng = random.Random(num_actors)
        self._engine = Collecting(shares(num_actors, num_actors), ReplayLedger(num_actors, replay=True), LIMITS)
        self._timed(self._engine.describe, self._now)
        for actor_id in range(num_actors):
            self._on(Started(Process(actor_id, 1)))
            asked = self._timed(self._engine.tick, self._now)
            for describe in [command for command in asked if isinstance(command, Describe)]:
                self._on(Answered(describe.process, describe.ask_id, SPACES))

    def iterate(self) -> int:
        """Collect one segment from each actor; return the number of answers."""
        asked = self._timed(self._engine.request, _policy(self._index), self._index, self._now)
        asks = [command for command in asked if isinstance(command, Ask)]
        self._rng.shuffle(asks)
        answers = [_answered(ask) for ask in asks]
        for event in answers:
            self._now += SEGMENT_S / len(asks)
            self._on(event)
            self._timed(self._engine.tick, self._now)
        self._timed(self._engine.requests.take, self._now, 0.0, [])
        self._index += 1
        return len(answers)

    def _on(self, event: Any) -> list[Command]:
        commands: list[Command] = self._timed(self._engine.on, event, self._now)
        return commands

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.thread_time()
        result = call(*arguments)
        self.seconds += time.thread_time() - began
        return result


def _policy(version: int) -> PolicySnapshot:
    return PolicySnapshot(version, np.zeros(1, np.float32))


def _answered(ask: Ask) -> Answered:
    made = tuple((_report(one.sampler_id, one.index, ask.policy.version), "segment") for one in ask.question.requests)
    return Answered(ask.process, ask.ask_id, Answer(made, Timings(SEGMENT_S, SEGMENT_S)))


def _report(sampler: int, index: int, version: int) -> SegmentReport:
    one, episode = np.zeros(1), np.full(1, index)  # an episode for each segment
    carry = SamplerCarry(episode, one, episode, one, one.astype(np.uint32))
    return SegmentReport(sampler, index, version, 64, carry, (np.zeros(64, np.int64),))


def microseconds(num_actors: int) -> tuple[float, float]:
    """Return the engine's microseconds per answer, the median of some measurements, and per start of an actor."""
    run = Run(num_actors)
    start, figures = 1e6 * run.seconds / num_actors, []
    run.iterate()
    for _ in range(REPEATS):
        run.seconds, answers = 0.0, 0
        while answers < ANSWERS:
            answers += run.iterate()
        figures.append(1e6 * run.seconds / answers)
    return statistics.median(figures), start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, nargs="+", default=[64, 1000, 10_000])
    found = {}
    for num_actors in parser.parse_args().actors:
        found[num_actors], start = microseconds(num_actors)
        print(f"{num_actors:,} actors: {start:.1f} us to start each of them")
    print("number of actors, microseconds of the engine per answer:")
    for num_actors, per_answer in found.items():
        print(num_actors, f"{per_answer:.1f}")


if __name__ == "__main__":
    main()
