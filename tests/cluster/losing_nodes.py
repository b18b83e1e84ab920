"""Two learners on a cluster that loses nodes, in a process of its own; tells what becomes of them as a line of JSON.

First the node goes that holds segments, and no learner; then one that a learner runs on.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import ray
from made_up import SPACES, settings, some_segments
from ray.cluster_utils import Cluster

from dppo.cluster.ray_trainers import RayTrainers
from dppo.errors import ClusterError
from dppo.ppo.normalizer import Statistics

NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}


@ray.remote(num_cpus=0, resources={"store": 1}, max_retries=0)
def large() -> np.ndarray:
    return np.zeros(2**20, np.float32)


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    second = cluster.add_node(**NODE)
    store = cluster.add_node(**NODE | {"num_cpus": 0}, resources={"store": 1})
    notes: list[str] = []
    told: dict[str, Any] = {"notes": notes}
    config, segments = settings(learner_cpus=2), some_segments()

    trainers = RayTrainers(config, SPACES, notes.append)
    lost = large.remote()
    ray.wait([lost], fetch_local=False)
    cluster.remove_node(store, allow_graceful=False)
    try:
        trainers.update([*segments[:3], lost], Statistics(), 3)
    except ClusterError as error:
        told["lost segments"] = str(error)
    told["notes of lost segments"] = len(notes)
    trainers.close()

    trainers = RayTrainers(config, SPACES, notes.append)
    before = trainers.weights(), trainers.state()
    trainers.update(segments, Statistics(), 3)
    expected = trainers.weights().tobytes()
    trainers.load(*before)
    cluster.add_node(**NODE)
    cluster.remove_node(second, allow_graceful=False)
    time.sleep(5)  # processes of a node that dies like this live a little longer
    trainers.update(segments, Statistics(), 3)
    told["same weights"] = trainers.weights().tobytes() == expected
    told["incidents"] = [incident.kind for incident in trainers.take_incidents()]
    print("told", json.dumps(told), flush=True)
    trainers.close()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
