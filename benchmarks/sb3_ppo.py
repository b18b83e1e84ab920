"""Train once with Stable-Baselines3, in its own virtual environment, and print the times as one line of JSON.

python sb3_ppo.py '{"env": {"env_id": "CartPole-v1"}, "workers": 0, "num_envs": 8, "num_steps": 128, ...}'

The keys are the fields of `Work` in rows.py. `threads` is the number of torch threads; null: torch's default.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from itertools import pairwise
from pathlib import Path


def main() -> None:
    work = json.loads(sys.argv[1])
    if work["threads"] is not None:
        os.environ["OMP_NUM_THREADS"] = str(work["threads"])
    warnings.filterwarnings("ignore")

    import stable_baselines3
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import bench_envs

    if work["threads"] is not None:
        torch.set_num_threads(work["threads"])

    class Clock(BaseCallback):
        """Record when each collection starts and ends; end the training when its time is up."""

        def __init__(self) -> None:
            super().__init__()
            self.starts: list[float] = []
            self.ends: list[float] = []

        def _on_rollout_start(self) -> None:
            self.starts.append(time.perf_counter())

        def _on_rollout_end(self) -> None:
            self.ends.append(time.perf_counter())

        def _on_step(self) -> bool:
            return len(self.ends) < 4 or time.perf_counter() - self.starts[0] < work["budget_s"]

    envs = make_vec_env(
        functools.partial(bench_envs.make, **work["env"]),
        n_envs=work["num_envs"],
        seed=work["seed"],
        vec_env_cls=SubprocVecEnv if work["workers"] else DummyVecEnv,
    )
    algorithm, policy, more = PPO, "CnnPolicy" if work["env"].get("atari") else "MlpPolicy", {}
    if work["lstm"]:
        from sb3_contrib import RecurrentPPO

        # an LSTM for the policy and another for the value
        algorithm, policy = (RecurrentPPO, "MlpLstmPolicy")
        more = {"policy_kwargs": {"lstm_hidden_size": work["lstm"]}}
    model = algorithm(
        # separate 64x64 tanh trunks for policy and value, or the Nature CNN shared by both; Adam with eps 1e-5
        policy,
        envs,
        n_steps=work["num_steps"],
        n_epochs=work["update_epochs"],
        batch_size=work["minibatch_size"],
        learning_rate=2.5e-4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
        max_grad_norm=0.5,
        seed=work["seed"],
        device="cpu",
        **more,
    )
    clock = Clock()
    model.learn(total_timesteps=work["total_timesteps"], callback=clock)
    finished = time.perf_counter()
    envs.close()
    done = len(clock.ends)  # a last collection that was cut short does not count
    starts = [*clock.starts, finished][: done + 1]
    print(
        json.dumps(
            {
                "steps": done * work["num_steps"] * work["num_envs"],
                "iteration_s": [after - before for before, after in pairwise(starts)],
                "update_s": [
                    after - end for end, after in zip(clock.ends, starts[1:], strict=True)
                ],
                "versions": {
                    "stable-baselines3": stable_baselines3.__version__,
                    "torch": torch.__version__,
                },
                "threads": torch.get_num_threads(),
            }
        )
    )


if __name__ == "__main__":
    main()
