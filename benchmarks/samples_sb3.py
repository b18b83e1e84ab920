"""Train once with Stable-Baselines3, in its own virtual environment, and print the episodes as one line of JSON.

python samples_sb3.py '{"task": "CartPole", "side": "sb3", "seed": 1, "until": null}'

Prints: {"episodes": [[env steps of the run at its end, return], ...], "steps": all env steps, "update_s": CPU seconds
of all updates, "evaluations": [[env steps, mean return], ...]}. With "until": "good" the run ends where it reaches this
return; with "greedy": true the policy is evaluated without noise. Masks and memory are sb3-contrib's.
Sides: sb3, zoo, sb3-sac, sb3-sac-segments, crossq.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
# As many gradient steps as env steps: after each step of the environments, or after segments of 64 steps of each.
EACH_STEP = {"n_envs": 8, "train_freq": 1, "gradient_steps": -1}
OFF_POLICY = {
    "sb3-sac": EACH_STEP,
    "sb3-sac-segments": {"n_envs": 8, "train_freq": 64, "gradient_steps": 512},
    "crossq": EACH_STEP,
}
FIRST_EVALUATED_SEED = 10_000  # of the episodes of an evaluation


def main() -> None:
    work = json.loads(sys.argv[1])
    warnings.filterwarnings("ignore")
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import torch
    from samples_tasks import EVALUATE_EVERY, TASKS, ZOO, counted, learned, most_steps
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)

    class Episodes(BaseCallback):
        """Keep the return of each episode, as `Monitor` measures it, with the number of env steps so far."""

        def __init__(self) -> None:
            super().__init__()
            self.ended: list[tuple[int, float]] = []
            self.evaluations: list[tuple[int, float]] = []
            self._next_evaluation = EVALUATE_EVERY

        def _on_step(self) -> bool:
            if work.get("greedy") and self.num_timesteps >= self._next_evaluation:
                self._next_evaluation += EVALUATE_EVERY
                mean_return = greedy_return(self.model, task.env_id)
                self.evaluations.append((self.num_timesteps, mean_return))
            new = [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            self.ended += [(self.num_timesteps, float(one)) for one in new]
            done = (
                new
                and work["until"] is not None
                and learned([one for _, one in self.ended], task.good)
            )
            return not done

    task = TASKS[work["task"]]
    is_tuned = work["side"] == "zoo"
    settings = dict(ZOO[work["task"]] if is_tuned else OFF_POLICY.get(work["side"], {}))
    n_envs, normalize = settings.pop("n_envs", 1), settings.pop("normalize", False)
    envs = make_vec_env(partial(make, task.env_id), n_envs=n_envs, seed=work["seed"])
    if normalize:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    algorithm, policy = algorithm_for(work["task"], work["side"])
    model = algorithm(policy, envs, seed=work["seed"], device="cpu", **arguments(settings))
    episodes, seconds = Episodes(), [0.0]
    model.train = counted(model.train, seconds)
    schedules = any(str(value).startswith("lin_") for value in ZOO.get(work["task"], {}).values())
    most = task.steps if is_tuned and schedules else most_steps(task, work["until"])
    model.learn(work.get("at_most") or most, callback=episodes)
    envs.close()
    print(
        json.dumps(
            {
                "episodes": episodes.ended,
                "evaluations": episodes.evaluations,
                "steps": model.num_timesteps,
                "update_s": sum(seconds),
            }
        )
    )


def greedy_return(model: Any, env_id: str) -> float:
    """Return the mean return of a few episodes without noise, in an environment of their own."""
    from samples_tasks import EVALUATED_EPISODES

    normalizer = model.get_vec_normalize_env()
    env = make(env_id)
    total = 0.0
    for number in range(EVALUATED_EPISODES):
        observation, _ = env.reset(seed=FIRST_EVALUATED_SEED + number)
        ended = False
        while not ended:
            if normalizer is not None:
                observation = normalizer.normalize_obs(observation)
            action, _ = model.predict(observation, deterministic=True)
            observation, reward, terminated, truncated, _ = env.step(action)
            total += float(reward)
            ended = terminated or truncated
    env.close()
    return total / EVALUATED_EPISODES


def make(env_id: str) -> Any:
    """Make the environment of a task; what the MLP of SB3 cannot read is flattened."""
    import bench_envs
    import gymnasium as gym

    if ":" not in env_id:
        return gym.make(env_id)
    env = getattr(bench_envs, env_id.partition(":")[2])()
    if not isinstance(env.observation_space, gym.spaces.Dict):
        return env
    parts = [name for name in env.observation_space.spaces if name != "mission"]
    return gym.wrappers.FlattenObservation(gym.wrappers.FilterObservation(env, parts))


def algorithm_for(task: str, side: str) -> tuple[Any, str]:
    """Return the class of this side that can solve the task, and its policy."""
    import sb3_contrib
    from stable_baselines3 import PPO, SAC

    if side.startswith("sb3-sac"):
        return SAC, "MlpPolicy"
    if side == "crossq":
        return sb3_contrib.CrossQ, "MlpPolicy"
    if task == "Shop":
        return sb3_contrib.MaskablePPO, "MlpPolicy"
    if task == "CartPoleNoVelocity":
        return sb3_contrib.RecurrentPPO, "MlpLstmPolicy"
    return PPO, "MlpPolicy"


def arguments(settings: dict[str, Any]) -> dict[str, Any]:
    """Translate settings: `lin_X` falls linearly from X to zero, and `policy` describes the network."""
    from torch import nn

    policy = dict(settings.pop("policy", {}))
    if "activation" in policy:
        policy |= {"activation_fn": nn.ReLU, "net_arch": policy.pop("hidden_sizes")}
        del policy["activation"]
    found = {
        name: linear(float(str(value)[4:])) if str(value).startswith("lin_") else value
        for name, value in settings.items()
    }
    return found | ({"policy_kwargs": policy} if policy else {})


def linear(start: float) -> Any:
    return lambda left: left * start


if __name__ == "__main__":
    main()
