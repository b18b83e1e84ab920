"""Measure the cost of Ray's calls: one round trip to each of N idle actors.

    python benchmarks/calls.py --actors 8

Without data; with a policy out and a segment back, as Ray serializes them; and with both pickled in one piece, as
`dppo` sends them. Collecting segments cannot take less time. The row `overhead` of run.py includes the last figure.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from measure import REPO, ours_environment

ROUNDS = 200
WARM_UP = 20
PAUSE_S = 0.01  # between rounds, as a simulator's steps would be


class Idle:
    """Return a segment that was made beforehand."""

    def __init__(self, segment: Any) -> None:
        self._segment = segment

    def nothing(self) -> None:
        pass

    def segment(self, request: Any, snapshot: Any) -> Any:
        return self._segment

    def packed_segment(self, asked: bytes) -> bytes:
        pickle.loads(asked)
        return pickle.dumps(self._segment, pickle.HIGHEST_PROTOCOL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--actors", type=int, default=8)
    num_actors = parser.parse_args().actors
    os.environ.update(ours_environment())  # for Ray's processes
    sys.path.insert(0, str(REPO / "src"))
    from dppo.config import Actors, Learners
    from dppo.transports.ray.session import RaySession, demand_of

    settings = Actors(num_actors=num_actors)
    session = RaySession(
        settings, demand_of(settings, Learners()), store_bytes=256 * 2**20, notify=print
    )
    import ray

    request, snapshot, segment = a_request()
    remote_class = ray.remote(Idle).options(num_cpus=1, enable_task_events=False)
    actors = [remote_class.remote(segment) for _ in range(num_actors)]

    def packed(actor: Any) -> Any:
        return actor.packed_segment.remote(
            pickle.dumps((request, snapshot), pickle.HIGHEST_PROTOCOL)
        )

    ways: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
        "no data": (lambda actor: actor.nothing.remote(), lambda answer: answer),
        "policy and segment": (
            lambda actor: actor.segment.remote(request, snapshot),
            lambda answer: answer,
        ),
        "both in one piece": (packed, pickle.loads),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(WARM_UP + ROUNDS):
        for way, (ask, take) in ways.items():
            began = time.perf_counter()
            waiting = [ask(actor) for actor in actors]
            while waiting:
                ready, _ = ray.wait(waiting, num_returns=1, timeout=60)
                ready, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0)
                for answer in ray.get(ready, timeout=60):
                    take(answer)
            times[way].append(1e3 * (time.perf_counter() - began))
            time.sleep(PAUSE_S)
    session.close()
    for way, taken in times.items():
        kept = sorted(taken[WARM_UP:])
        p90 = kept[int(0.9 * len(kept))]
        print(
            f"{num_actors} actors, {way}: median {median(kept):.1f} ms, best {kept[0]:.1f}, 90th percentile {p90:.1f}"
        )


def a_request() -> tuple[Any, Any, Any]:
    """Return a request, a policy of the default model, and the answer: 64 steps of CartPole."""
    import numpy as np

    from dppo.config import Config
    from dppo.hosts.plans import sampler_plan
    from dppo.hosts.sampler_builder import build_sampler
    from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
    from dppo.ppo.networks.choice import choose_network

    plan = sampler_plan(Config(env_id="CartPole-v1", num_samplers=8, num_steps=64))
    built = build_sampler(plan, 0)
    snapshot = PolicySnapshot(
        0, np.zeros(choose_network(plan.network, built.spaces).spec.num_parameters, np.float32)
    )
    request = SegmentRequest(0, 0, None)
    return request, snapshot, built.sampler.collect(request, snapshot)


if __name__ == "__main__":
    main()
