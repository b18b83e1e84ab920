"""A run on a cluster whose nodes come and go, in a separate process; prints a report as a line of JSON.

A node joins, receives SIGTERM as from a cluster manager, and ends; another joins, is announced to leave, and is lost
later; a third is lost without a word; then there is none but the head, which has no room, until a last one joins.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nodes import NODE, STORE, followed, print_report
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.cluster_utils import Cluster
from ray.core.generated.autoscaler_pb2 import DrainNodeReason  # type: ignore[attr-defined]
from recorder import Notes

import dppo


class Changes(dppo.Observer):
    """Changes the nodes, one step after the other, as soon as the actors have followed the step before."""

    def __init__(self, cluster: Any) -> None:
        self.seen: list[str] = []
        self.left_after_s = self._not_before = 0.0
        self._cluster = cluster
        self._nodes = [cluster.add_node(**NODE)]
        self._steps = iter(
            [
                ("two actors", 2, self._add_by_command),
                ("a node joined", 4, self._terminate),
                ("a node has received SIGTERM", 2, self._wait_for_its_end),
                ("it has ended", 2, self._add),
                ("another node joined", 4, self._announce),
                ("a node is leaving", 2, self._lose),
                ("it has left", 2, self._add),
                ("a third node joined", 4, self._lose),
                ("it was lost", 2, self._lose_all_and_add),
                ("all nodes were replaced", 2, lambda: None),
            ]
        )
        self._step = next(self._steps)

    def on_iteration(self, row: dict[str, float]) -> bool:
        time.sleep(0.05)
        name, actors, change = self._step
        if row["actors/alive"] != actors or time.monotonic() < self._not_before:
            return False
        self.seen.append(name)
        change()
        self._step = next(self._steps, ("", -1, lambda: None))
        return self._step[1] == -1

    def _add(self) -> None:
        self._nodes.append(self._cluster.add_node(**NODE))

    def _add_by_command(self) -> None:
        """Start a node as on a machine of its own."""
        flags = (
            f"--address {self._cluster.address} --block --num-cpus 2 --object-store-memory {STORE}"
        )
        flags += " --min-worker-port 0 --max-worker-port 0 --disable-usage-stats"
        command = [str(Path(sys.executable).with_name("ray")), "start", *flags.split()]
        env = os.environ | {"RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "60"}
        self._by_command = subprocess.Popen(command, env=env, stdout=sys.stderr)

    def _terminate(self) -> None:
        self._by_command.terminate()
        self._terminated = time.monotonic()

    def _wait_for_its_end(self) -> None:
        self._by_command.wait()
        self.left_after_s = time.monotonic() - self._terminated

    def _announce(self) -> None:
        """Do what a preemption notice does."""
        client: Any = GcsClient(self._cluster.address)
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client.drain_node(
            self._nodes[-1].node_id, reason, "will be preempted", int(1000 * (time.time() + 30))
        )

    def _lose(self) -> None:
        self._cluster.remove_node(self._nodes.pop(), allow_graceful=False)

    def _lose_all_and_add(self) -> None:
        self._lose()
        threading.Timer(15, self._add_by_command).start()  # training waits
        self._not_before = time.monotonic() + 12  # Ray takes a moment to notice the loss


def main(folder: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
    changes = Changes(cluster)
    report = followed(folder, cluster.address, changes, Notes(), overlap=True)
    print_report(report | {"seen": changes.seen, "left after": changes.left_after_s})
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
