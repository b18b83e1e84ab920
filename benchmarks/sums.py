"""Measure one sum of gradients over the learners of one machine, by `dppo` and by gloo alone.

    python benchmarks/sums.py --learners 2

The processes do nothing else and use one thread each. results/learners.md explains the effect on a run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from collections.abc import Callable
from functools import partial
from statistics import median

from measure import REPO

sys.path.insert(0, str(REPO / "src"))
PARAMETERS = (57_763, 1_015_075, 18_366_499, 50_003_875)  # of the models in learners.py
REPEATS = 15


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--learners", type=int, default=2)
    size = parser.parse_args().learners
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=learner, args=(rank, size, store.port)) for rank in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def learner(rank: int, size: int, port: int) -> None:
    """Run one process: sum at every size. The first rank prints."""
    import torch
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from dppo.learners.sums import RankGroup

    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size)
    for parameters in PARAMETERS:
        group = RankGroup()
        shared, own = group.zeros_like(torch.empty(parameters)), torch.zeros(parameters)
        ours, by_gloo = (
            seconds(partial(group.sum_, shared)),
            seconds(partial(distributed.all_reduce, own)),
        )
        if rank == 0:
            print(
                f"{size} learners, {parameters:,} parameters: dppo {1e3 * ours:.2f} ms, gloo {1e3 * by_gloo:.2f} ms",
                flush=True,
            )
    distributed.destroy_process_group()


def seconds(work: Callable[[], object]) -> float:
    """Return the median time of `work`, which all ranks start together."""
    from torch import distributed

    work()
    times = []
    for _ in range(REPEATS):
        distributed.barrier()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


if __name__ == "__main__":
    main()
