"""What Ray itself costs: one call to each of N actors that do nothing, there and back, as `dppo` makes them.

    python benchmarks/calls.py --actors 8

No segment can be collected in less; `overhead` in run.py has this inside.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np

from dppo.cluster.session import RaySession

ROUNDS = 200
WARM_UP = 20


class Idle:
    """Takes a policy of the default model's size, and returns a segment's worth of small arrays."""

    def segment(self, request: tuple[int, int], weights: np.ndarray) -> tuple[dict[str, int], np.ndarray]:
        return {"sampler": request[0], "index": request[1]}, np.zeros((64, 8), np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=8)
    num_actors = parser.parse_args().actors
    session = RaySession(
        address=None,
        num_actors=num_actors,
        cpus_per_actor=1.0,
        resources={},
        store_bytes=256 * 2**20,
        dashboard=False,
        notify=print,
    )
    import ray

    remote_class = ray.remote(Idle).options(num_cpus=1)
    actors = [remote_class.remote() for _ in range(num_actors)]
    calls = [actor.segment.options(num_returns=2) for actor in actors]
    weights = np.zeros(9_155, np.float32)
    times = []
    for index in range(WARM_UP + ROUNDS):
        began = time.perf_counter()
        waiting = dict(call.remote((number, index), weights) for number, call in enumerate(calls))
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=60)
            ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0)
            ray.get([ref for report in ready for ref in (report, waiting.pop(report))], timeout=60)
        times.append(1e3 * (time.perf_counter() - began))
    session.close()
    kept = sorted(times[WARM_UP:])
    p90 = kept[int(0.9 * len(kept))]
    print(f"{num_actors} actors: median {median(kept):.1f} ms, best {kept[0]:.1f}, 90th percentile {p90:.1f}")


if __name__ == "__main__":
    main()
