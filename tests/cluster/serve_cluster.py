"""A Ray cluster of two nodes on this machine, in a process of its own, for tests that a user's cluster is needed for.

Commands come on standard input, one a line; each is answered by a line of JSON:

    add              another node of two CPUs
    remove           SIGKILL to everything on the node that was added last
    shut down        the same in good order, as when a node is preempted
    ask              somebody else's actor, which lives on the head, counts to the next number
    free             CPUs that nobody uses

At the end of the input the cluster is stopped: by its own processes, never by `ray stop`, which stops everybody's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray
from ray.cluster_utils import Cluster

NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}


class Counter:
    def __init__(self) -> None:
        self._number = 0

    def next(self) -> int:
        self._number += 1
        return self._number


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    added = [cluster.add_node(**NODE)]
    ray.init(address=cluster.address, log_to_driver=False)
    counter: Any = ray.remote(Counter).options(num_cpus=0).remote()
    ray.get(counter.next.remote())
    answer({"address": cluster.address})
    for line in sys.stdin:
        command = line.strip()
        if command == "add":
            added.append(cluster.add_node(**NODE))
            answer(len(added) + 1)
        elif command in ("remove", "shut down"):
            cluster.remove_node(added.pop(), allow_graceful=command == "shut down")
            answer(len(added) + 1)
        elif command == "ask":
            answer(ray.get(counter.next.remote(), timeout=30))
        elif command == "free":
            answer(ray.available_resources().get("CPU", 0.0))
    ray.shutdown()
    cluster.shutdown()


def answer(content: Any) -> None:
    print("answer", json.dumps(content), flush=True)


if __name__ == "__main__":
    main()
