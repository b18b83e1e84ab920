"""A Ray cluster of two nodes on this machine, in its own process, for tests with a running cluster.

The head has a licence_a, the other node two licence_b.

It reads commands from standard input, one per line, and answers each with a line of JSON:

    add              another node of two CPUs
    add prescott     the same, where NumPy computes as on another type of CPU
    remove           send SIGKILL to all processes of the newest node
    shut down        end the newest node gracefully, as when a node is preempted
    ask              let an unrelated actor on the head count to the next number
    free             return the number of idle CPUs

At the end of the input the cluster is stopped; without `ray stop`, which would stop all clusters of the machine.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import ray
from nodes import NODE
from ray.cluster_utils import Cluster

STARTS = 4


class Counter:
    def __init__(self) -> None:
        self._number = 0

    def next(self) -> int:
        self._number += 1
        return self._number


def started_cluster() -> tuple[Cluster, Any]:
    """Return a cluster of two nodes, and the second one.

    Ray gives a node 30 s to register, which may be too little on a busy machine.
    """
    for _ in range(STARTS - 1):
        cluster = Cluster()
        try:
            return cluster, add_nodes(cluster)
        except Exception:
            traceback.print_exc()
            cluster.shutdown()
    cluster = Cluster()
    return cluster, add_nodes(cluster)


def add_nodes(cluster: Cluster) -> Any:
    cluster.add_node(**NODE, resources={"licence_a": 1})
    return cluster.add_node(**NODE, resources={"licence_b": 2})


def main() -> None:
    cluster, second = started_cluster()
    added = [second]
    ray.init(address=cluster.address, log_to_driver=False)
    counter: Any = ray.remote(Counter).options(num_cpus=0).remote()
    ray.get(counter.next.remote())
    answer({"address": cluster.address})
    for line in sys.stdin:
        command = line.strip()
        if command.startswith("add"):
            _, _, cpu = command.partition(" ")
            settings = {"env_vars": {"OPENBLAS_CORETYPE": cpu.title()}}
            env: dict[str, Any] = settings if cpu else {}
            added.append(cluster.add_node(**NODE, **env))
            answer(len(added) + 1)
        elif command in ("remove", "shut down"):
            cluster.remove_node(added.pop(), allow_graceful=command == "shut down")
            answer(len(added) + 1)
        elif command == "ask":
            answer(ray.get(counter.next.remote(), timeout=120))
        elif command == "free":
            answer(ray.available_resources().get("CPU", 0.0))
    ray.shutdown()
    cluster.shutdown()


def answer(content: Any) -> None:
    print("answer", json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
