"""Two learners on a cluster that loses nodes, in a separate process; prints a report as a line of JSON.

The first lost node holds segments but no learner; the second holds the first learner and its results of the last
update; the third, in the middle of a run, holds the actors and segments that no learner has fetched yet.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import ray
from builders import bits_of, make_config, plan_of
from made_up import POLICY, SPACES, settings, some_segments
from nodes import NODE, SIZES, print_report
from ray.cluster_utils import Cluster

import dppo
from dppo.errors import SegmentsLost
from dppo.learners.ranks import RayTrainers
from dppo.ppo.exchange.records import Experience, Update


@ray.remote(num_cpus=0, resources={"store": 1}, max_retries=0)
def large() -> np.ndarray:
    return np.zeros(2**20, np.float32)


def a_run_that_loses_its_actors_node(cluster: Any, folder: Path) -> dict[str, Any]:
    """Lose the node in the first and the third iteration, between the reports and the update."""
    actors_node = {"num_cpus": 2, "resources": {"simulators": 2}}
    nodes = [cluster.add_node(**NODE | actors_node)]
    base = SIZES | {
        "env_id": "worlds.simple:Wide",
        "env_kwargs": {"size": 2**12},
        "total_timesteps": 16 * 4 * 4,
        "num_learners": 2,
        "num_actors": 2,
        "actor_resources": {"simulators": 1},
        "address": cluster.address,
    }
    update = RayTrainers.update
    to_come = [0, 2]

    def update_after_a_loss(self: RayTrainers, experience: Experience) -> Any:
        if experience.iteration in to_come:
            to_come.remove(experience.iteration)
            nodes.append(cluster.add_node(**NODE | actors_node))
            cluster.remove_node(nodes.pop(0), allow_graceful=False)
        return update(self, experience)

    undisturbed = dppo.train(make_config(base | {"run_dir": folder / "undisturbed"}))
    RayTrainers.update = update_after_a_loss  # type: ignore[method-assign]
    disturbed = dppo.train(make_config(base | {"run_dir": folder / "disturbed"}))
    return {
        "same": disturbed.weights_sha256 == undisturbed.weights_sha256,
        "incidents": disturbed.incidents,
    }


def lose_a_segment(cluster: Cluster, trainers: RayTrainers) -> dict[str, Any]:
    """Lose the node that holds a segment; return what the update says, and whether it has changed anything."""

    def learned() -> dict[str, bytes]:
        return bits_of({"weights": trainers.weights(), **trainers.state()})

    store = cluster.add_node(**NODE | {"num_cpus": 0}, resources={"store": 1})
    before = learned()
    lost = large.remote()
    ray.wait([lost], fetch_local=False)
    cluster.remove_node(store, allow_graceful=False)
    error = ""
    try:
        trainers.update(Experience([*some_segments()[:3], lost], POLICY, 1.0, 3))
    except SegmentsLost as lost_segments:
        error = str(lost_segments)
    return {"lost segments": error, "nothing has changed": learned() == before}


def lose_a_learner(cluster: Cluster, trainers: RayTrainers, nodes: list[Any]) -> dict[str, Any]:
    """Lose the node of the first learner; return the incidents, and whether the weights are those without a loss."""
    before = trainers.weights(), trainers.state()

    def update(iteration: int) -> Update:
        return trainers.update(Experience(some_segments(), POLICY, 1.0, iteration))

    update(3)
    update(4)
    expected = trainers.weights().tobytes()
    trainers.load(*before)
    update(3)
    first, _ = ray.get(trainers.ranks[0].whereabouts.remote())
    cluster.add_node(**NODE)
    [node] = [node for node in nodes if node.node_id == first]
    cluster.remove_node(node, allow_graceful=False)
    time.sleep(5)  # processes of a node that is killed live a little longer
    last = update(4)
    return {
        "same weights": trainers.weights().tobytes() == expected,
        "incidents": [incident.kind for incident in last.incidents],
    }


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE | {"num_cpus": 0})
    ray.init(address=cluster.address, log_to_driver=False)
    learners_nodes = [cluster.add_node(**NODE) for _ in range(2)]
    # too large for Ray to send the state to the driver
    config = settings(learner_cpus=2, hidden_sizes=(256, 256))
    notes: list[str] = []
    trainers = RayTrainers(plan_of(config, SPACES.actions), SPACES, notes.append)
    report: dict[str, Any] = {"notes": notes}
    report |= lose_a_segment(cluster, trainers)
    report |= lose_a_learner(cluster, trainers, learners_nodes)
    trainers.close()

    report["run"] = a_run_that_loses_its_actors_node(cluster, Path(sys.argv[1]))
    print_report(report)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
