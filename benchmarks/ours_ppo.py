"""Train once with dppo and print the times as one line of JSON, as sb3_ppo.py does.

python ours_ppo.py '{"env": {"env_id": "CartPole-v1"}, "workers": 0, "num_envs": 8, "num_steps": 128, ...}'

The keys are the fields of `Work` in rows.py. `workers` is the number of Ray actors; 0 trains in process. `samplers`
share the environments evenly; null: one sampler in process, one per environment with workers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import pairwise
from pathlib import Path


def main() -> None:
    work = json.loads(sys.argv[1])

    import dppo
    from dppo.tools.compare.measured import measure_cycle

    env_id, env_kwargs = work["env"]["env_id"], {}
    if work["env"].get("step_s"):
        env_id, env_kwargs = "dppo/SlowCartPole-v0", {"step_s": work["env"]["step_s"]}
    elif work["env"].get("atari"):
        env_id, env_kwargs = "bench_envs:make", work["env"]
    workers, envs = work["workers"], work["num_envs"]
    samplers = work.get("samplers") or (envs if workers else 1)
    with tempfile.TemporaryDirectory() as folder:
        config = dppo.Config(
            env_id=env_id,
            env_kwargs=env_kwargs,
            num_actors=workers,
            num_samplers=samplers,
            envs_per_sampler=envs // samplers,
            num_steps=work["num_steps"],
            update_epochs=work["update_epochs"],
            minibatch_size=work["minibatch_size"],
            total_timesteps=work["total_timesteps"],
            learning_rate=2.5e-4,
            ent_coef=0.01,
            norm_obs=False,
            norm_reward=False,
            seed=work["seed"],
            progress="off",
            run_dir=Path(folder) / "run",
            **work.get("settings", {}),
        )
        result = dppo.train(config)
        metrics = result.metrics  # read before the folder is removed
    walls = [row["time/wall_s"] for row in metrics]
    print(
        json.dumps(
            {
                "steps": result.global_step,
                "iteration_s": [walls[0], *(after - before for before, after in pairwise(walls))],
                "update_s": [row["perf/update_s"] for row in metrics],
                "cycle": measure_cycle(metrics, config.batch_size),
                "versions": {"dppo": dppo.__version__},
            }
        )
    )


if __name__ == "__main__":
    main()
