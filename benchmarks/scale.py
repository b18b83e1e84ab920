"""Measure what many actors cost: the engine, the driver on Ray, rows and policies; model an iteration from these.

    python benchmarks/scale.py                             the engine at 64, 1,000 and 10,000 actors, without Ray
    python benchmarks/scale.py --actors 64 1000 10000
    python benchmarks/scale.py --real 8 64 256             the driver with real actors on Ray, 70 MB each
    python benchmarks/scale.py --pending 0 1000 10000      the driver with 8 actors, and further calls that do not end
    python benchmarks/scale.py --policies                  the driver with policies of 0.04 to 30 MB
    python benchmarks/scale.py --arguments                 Ray's calls with arguments of some sizes, or with references
    python benchmarks/scale.py --rows                      the learner's parts in an iteration
    python benchmarks/scale.py --model                     an iteration of 64 to 4,096 actors, from these costs

The engine is measured in virtual time. Each actor hosts one sampler. Answers arrive one at a time, in a random order,
each in a batch of its own, which is the worst case. The CPU time that counts is that of the engine alone: requests,
events, ticks, questions, ledger. The last lines have, for each number of actors, this number and the microseconds per
answer, the median of some repeats. results/scale.md has the other figures, and what follows from them.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import scale_costs
from scale_model import SPACES, Costs, Simulated, Work, answer_to, driver_s, modelled_s

from dppo.engine.engine import CollectionEngine
from dppo.engine.hosting import shares
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Answered, Ask, Command, Describe, Limits, Process, Started
from dppo.ppo.exchange.records import PolicySnapshot

REPEATS = 5
ANSWERS = 10_000  # of a measurement, at least
SEGMENT_S = 1.0  # of virtual time
LIMITS = Limits(segment_timeout_s=600.0, max_actor_restarts=3)
COSTS = Costs()
CASES = [  # actors, samplers of each, seconds of a step, lag, learners
    (64, 1, 0.01, 0, 0),
    (64, 1, 0.01, 1, 0),
    (512, 1, 0.01, 0, 0),
    (512, 1, 0.01, 1, 0),
    (512, 1, 0.1, 0, 0),
    (512, 1, 0.1, 1, 0),
    (4096, 1, 0.1, 0, 0),
    (4096, 1, 0.1, 1, 0),
    (4096, 1, 0.1, 1, 8),
    (512, 8, 0.1, 1, 0),
    (4096, 1, 0.01, 1, 8),
    (512, 8, 0.01, 1, 8),
]


class Run:
    """The engine with actors that always answer; measures the seconds spent in the engine."""

    def __init__(self, num_actors: int) -> None:
        self.seconds = 0.0
        self._now = 0.0
        self._index = 0
        self._rng = random.Random(num_actors)
        self._engine = CollectionEngine(
            shares(num_actors, num_actors), ReplayLedger(num_actors, replay=True), LIMITS
        )
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
        answers = [answer_to(ask) for ask in asks]
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


def print_engine(numbers: list[int]) -> None:
    """Print the engine's costs."""
    found = {}
    for num_actors in numbers:
        found[num_actors], start = microseconds(num_actors)
        print(f"{num_actors:,} actors: {start:.1f} us to start each of them")
    print("number of actors, microseconds of the engine per answer:")
    for num_actors, per_answer in found.items():
        print(num_actors, f"{per_answer:.1f}")


def print_driver(cases: list[dict[str, Any]]) -> None:
    """Print the costs of the driver with real actors."""
    print("actors, other pending calls, lag, by reference, policy in MB:", end=" ")
    print("microseconds of a question, of an answer, of other threads per answer; answers/s")
    for case in cases:
        one = scale_costs.real(**case)
        about = ", ".join(
            str(case.get(name, 0)) for name in ("num_actors", "pending", "lag", "by_reference")
        )
        about += f", {one['policy_mb']:.2f}"
        costs = ", ".join(
            f"{one[name]:.0f}" for name in ("question_us", "answer_us", "other_threads_us")
        )
        print(f"{about}: {costs}; {one['answers_per_s']:.0f}", flush=True)
        print(
            f"    Ray started in {one['ray_s']:.1f} s, the first question went out {one['first_question_s']:.1f} s "
            f"later, the first segments of all were there after {one['first_segments_s']:.1f} s"
        )


def print_rows() -> None:
    """Print the learner's costs."""
    print(
        "samplers, steps, numbers of an observation: milliseconds to make a batch, of SGD, of the loop; make_batch"
    )
    for samplers, steps, width in (
        (64, 64, 4),
        (512, 64, 4),
        (4096, 64, 4),
        (64, 64, 376),
        (512, 64, 376),
    ):
        one = scale_costs.learner(samplers, steps, width)
        made, sgd, own = (one[name] for name in ("make_batch_ms", "sgd_ms", "learner_ms"))
        share, rows = made / (made + sgd), samplers * steps
        print(
            f"{samplers}, {steps}, {width}: {made:.1f}, {sgd:.1f}, {own:.1f}; {share:.1%} of an update; in us: "
            f"{1e3 * made / rows:.2f} and {1e3 * sgd / rows:.1f} a row, {1e3 * own / samplers:.1f} a segment",
            flush=True,
        )


def print_model() -> None:
    """Print iterations as modelled and as simulated, as a table in Markdown."""
    print(
        "| actors x samplers | step | lag | learners | driver | modelled | simulated | actors busy |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for actors, samplers, step_s, lag, learners in CASES:
        costs = replace(COSTS, row_s=COSTS.row_s / learners) if learners else COSTS
        work = Work(actors, 64 * samplers * step_s, 64, lag, samplers)
        modelled, simulated = modelled_s(work, costs), Simulated(work, costs).iteration_s()
        print(
            f"| {actors:,} x {samplers} | {1e3 * step_s:.0f} ms | {lag} | {learners} | {driver_s(work, costs):.2f} s | "
            f"{modelled:.2f} s | {simulated:.2f} s | {work.segment_s / simulated:.0%} |",
            flush=True,
        )

    for sigma in (0.16, 0.5):
        found = [
            Simulated(Work(512, 6.4, 64, lag, sigma=sigma), COSTS).iteration_s()
            for lag in (0, 1, 3)
        ]
        print(
            f"512 actors, spread {sigma}, lag 0, 1, 3: {', '.join(f'{one:.1f} s' for one in found)}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", type=int, nargs="+", default=[64, 1000, 10_000])
    parser.add_argument("--real", type=int, nargs="+", metavar="ACTORS")
    parser.add_argument("--pending", type=int, nargs="+", metavar="CALLS")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1], help="of --real")
    for name in ("arguments", "policies", "rows", "model"):
        parser.add_argument(f"--{name}", action="store_true")
    wanted = parser.parse_args()
    if wanted.real:
        print_driver(
            [{"num_actors": number, "lag": lag} for number in wanted.real for lag in wanted.lags]
        )
    elif wanted.pending:
        print_driver([{"num_actors": 8, "lag": 1, "pending": number} for number in wanted.pending])
    elif wanted.arguments:
        scale_costs.print_arguments()
    elif wanted.policies:
        sizes = [{"num_actors": 8, "lag": 1, "hidden": hidden} for hidden in scale_costs.POLICIES]
        print_driver([*sizes, {"num_actors": 8, "lag": 1, "by_reference": True}])
    elif wanted.rows:
        print_rows()
    elif wanted.model:
        print_model()
    else:
        print_engine(wanted.actors)


if __name__ == "__main__":
    main()
