"""Train on a Ray cluster that is running: python cluster.py RUN_DIR [STEPS], on one of its nodes.

The cluster decides how many actors there are, which changes the time only. The number of samplers is part of the
learning problem and stays. Started again with the same RUN_DIR, the script continues the run: that is what Slurm's
--requeue and a Kubernetes Job need. docs/CLUSTER.md has the job scripts.
"""

import os
import sys

import ray

import dppo

NUM_SAMPLERS = 8

if __name__ == "__main__":
    # dppo uses the cluster that this process is connected to. Without this line, Config(address="auto") connects.
    ray.init(address=os.environ.get("RAY_ADDRESS", "auto"), log_to_driver=False)
    cpus = int(ray.cluster_resources().get("CPU", 1))
    config = dppo.Config.preset(
        "CartPole-v1",  # "mysim:make" for your own: the module must be importable on every node
        run_dir=sys.argv[1],  # on a disk that outlives this node
        num_samplers=NUM_SAMPLERS,
        num_actors=min(NUM_SAMPLERS, cpus),
        total_timesteps=int(sys.argv[2]) if len(sys.argv) > 2 else 100_000,
    )
    result = dppo.train(config, resume="auto")
    print(
        f"{cpus} CPUs, {config.num_actors} actors, {result.global_step:,} steps: {result.episodic_return:.1f}"
    )
