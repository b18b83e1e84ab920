"""The tasks of samples.py, the settings of rl-baselines3-zoo for them, and what every side measures in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

WINDOW = 20  # episodes whose mean is a return
EVALUATE_EVERY = 2048  # env steps
EVALUATED_EPISODES = 4  # of an evaluation without noise
LONGER = 4  # times the env steps of a task, in a run that ends where it reaches the good return


@dataclass(frozen=True)
class Task:
    """A learning problem that anybody can install."""

    env_id: str
    steps: int
    """Env steps of a run to its end; with `--until good`, at most four times as many."""
    modest: float
    good: float
    """Returns, as means of 20 training episodes, at which the task counts as begun and as learned."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Of dppo, where the task itself needs them: memory, parts of the observation to leave out."""
    needs: tuple[str, ...] = ()
    """Modules that dppo does not install."""
    held_out: bool = False
    """Kept out of all tuning, and run at the end."""
    continuous: bool = False
    """Actions are real numbers, as soft actor-critic needs them."""


MUJOCO, BOX2D = ("mujoco",), ("Box2D",)
TASKS = {
    "CartPole": Task("CartPole-v1", 50_000, 195, 475),
    "Acrobot": Task("Acrobot-v1", 100_000, -200, -100),
    "MountainCar": Task("MountainCar-v0", 150_000, -195, -130),
    "MountainCarContinuous": Task("MountainCarContinuous-v0", 100_000, 50, 85, continuous=True),
    "Pendulum": Task("Pendulum-v1", 150_000, -800, -250, continuous=True),
    "LunarLander": Task("LunarLander-v3", 200_000, 0, 200, needs=BOX2D),
    "LunarLanderContinuous": Task(
        "LunarLanderContinuous-v3", 200_000, 0, 200, needs=BOX2D, continuous=True
    ),
    "BipedalWalker": Task("BipedalWalker-v3", 300_000, 0, 200, needs=BOX2D, continuous=True),
    "Reacher": Task("Reacher-v5", 100_000, -20, -8, needs=MUJOCO, continuous=True),
    "InvertedDoublePendulum": Task(
        "InvertedDoublePendulum-v5", 100_000, 1000, 8000, needs=MUJOCO, continuous=True
    ),
    "Hopper": Task("Hopper-v5", 200_000, 500, 2000, needs=MUJOCO, continuous=True),
    "HalfCheetah": Task("HalfCheetah-v5", 200_000, 500, 1500, needs=MUJOCO, continuous=True),
    "Walker2d": Task(
        "Walker2d-v5", 200_000, 400, 1500, needs=MUJOCO, held_out=True, continuous=True
    ),
    "Pusher": Task("Pusher-v5", 100_000, -60, -45, needs=MUJOCO, held_out=True, continuous=True),
    "Tanks": Task("bench_envs:tanks", 50_000, -100, -40, continuous=True),
    "DoorKey": Task(
        "bench_envs:make_doorkey",
        100_000,
        0.3,
        0.9,
        {"drop_obs": ("mission",)},
        needs=("minigrid",),
    ),
    "Shop": Task("bench_envs:Shop", 50_000, -1.45, -1.25),
    "CartPoleNoVelocity": Task(
        "bench_envs:cartpole_positions", 100_000, 195, 475, {"memory": "lstm"}
    ),
    # the side `sensors` hides the state from policy and critic, `critic-obs` from the policy alone
    "CartPoleSensors": Task(
        "bench_envs:cartpole_sensors", 100_000, 195, 475, {"memory": "lstm", "drop_obs": ("state",)}
    ),
    "PendulumSensors": Task(
        "bench_envs:pendulum_sensors",
        100_000,
        -800,
        -250,
        {"memory": "lstm", "drop_obs": ("state",)},
    ),
}

RELU_256 = {
    "log_std_init": -2,
    "ortho_init": False,
    "activation": "relu",
    "hidden_sizes": [256, 256],
}
LANDER = {
    "n_envs": 16,
    "n_steps": 1024,
    "batch_size": 64,
    "gae_lambda": 0.98,
    "gamma": 0.999,
    "n_epochs": 4,
}
ZOO: dict[str, dict[str, Any]] = {
    # Source: DLR-RM/rl-baselines3-zoo, hyperparams/ppo.yml; of the latest version of each task that it lists
    "CartPole": {
        "n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
        "learning_rate": "lin_0.001", "clip_range": "lin_0.2",
    },
    "Acrobot": {"normalize": True, "n_envs": 16, "n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4},
    "MountainCar": {"normalize": True, "n_envs": 16, "n_steps": 16, "gae_lambda": 0.98, "n_epochs": 4},
    "MountainCarContinuous": {
        "normalize": True, "batch_size": 256, "n_steps": 8, "gamma": 0.9999, "learning_rate": 7.77e-05,
        "ent_coef": 0.00429, "clip_range": 0.1, "gae_lambda": 0.9, "max_grad_norm": 5, "vf_coef": 0.19, "use_sde": True,
        "policy": {"log_std_init": -3.29, "ortho_init": False},
    },
    "Pendulum": {
        "n_envs": 4, "n_steps": 1024, "gamma": 0.9, "learning_rate": 1e-3, "use_sde": True, "sde_sample_freq": 4,
    },
    "LunarLander": LANDER | {"ent_coef": 0.01},
    "LunarLanderContinuous": LANDER | {"ent_coef": 0.01},
    "BipedalWalker": {"normalize": True, "n_envs": 32, "n_steps": 2048, "gamma": 0.999, "clip_range": 0.18},
    "Reacher": {
        "normalize": True, "batch_size": 32, "n_steps": 512, "gamma": 0.9, "learning_rate": 0.000104019,
        "ent_coef": 7.52585e-08, "clip_range": 0.3, "n_epochs": 5, "gae_lambda": 1.0, "max_grad_norm": 0.9,
        "vf_coef": 0.950368,
    },
    "InvertedDoublePendulum": {
        "normalize": True, "batch_size": 512, "n_steps": 128, "gamma": 0.98, "learning_rate": 0.000155454,
        "ent_coef": 1.05057e-06, "clip_range": 0.4, "gae_lambda": 0.8, "vf_coef": 0.695929,
    },
    "Hopper": {
        "normalize": True, "batch_size": 32, "n_steps": 512, "gamma": 0.999, "learning_rate": 9.80828e-05,
        "ent_coef": 0.00229519, "n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671,
        "policy": RELU_256,
    },
    "HalfCheetah": {
        "normalize": True, "n_steps": 512, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096,
        "policy": RELU_256,
    },
    "Walker2d": {
        "normalize": True, "batch_size": 32, "n_steps": 512, "learning_rate": 5.05041e-05, "ent_coef": 0.000585045,
        "clip_range": 0.1, "n_epochs": 20, "max_grad_norm": 1, "vf_coef": 0.871923,
    },
    "DoorKey": {"normalize": True, "n_envs": 8, "n_steps": 128, "learning_rate": 2.5e-4},
}  # fmt: skip


def most_steps(task: Task, until: str | None) -> int:
    """Return the env steps of a run that does not end earlier."""
    return task.steps if until is None else LONGER * task.steps


def learned(returns: Sequence[float], good: float) -> bool:
    """Return whether the last episodes surely reach the good return (their mean is computed elsewhere, too)."""
    return len(returns) >= WINDOW and sum(returns[-WINDOW:]) / WINDOW >= good + 1e-6


def counted(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return `function`, whose calls append the CPU seconds of this process to `seconds`."""

    def call(*given: Any, **named: Any) -> Any:
        began = time.process_time()
        try:
            return function(*given, **named)
        finally:
            seconds.append(time.process_time() - began)

    return call
