"""Environments of the benchmarks, the same for every library: this file imports none of them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

POSITIONS = "bench_envs:cartpole_positions"


class Sleeping(gym.Wrapper):
    """Make each step take `step_s` seconds, dynamics included, as in dppo/SlowCartPole-v0."""

    def __init__(self, env: gym.Env, step_s: float) -> None:
        super().__init__(env)
        self._step_s = step_s

    def step(self, action: Any) -> Any:
        started = time.perf_counter()
        result = self.env.step(action)
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - started)))
        return result


class PositionsOnly(gym.ObservationWrapper):
    """Leave the velocities out: [position of the cart, angle of the pole]. The policy has to remember."""

    def __init__(self, env: gym.Env) -> None:
        super().__init__(env)
        space: Any = env.observation_space
        self.observation_space = gym.spaces.Box(space.low[[0, 2]], space.high[[0, 2]], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[[0, 2]]


class Stamping(gym.Wrapper):
    """Write the time of day into the file `stamp` at the first step of all processes."""

    def __init__(self, env: gym.Env, stamp: str) -> None:
        super().__init__(env)
        self._stamp: str | None = stamp

    def step(self, action: Any) -> Any:
        if self._stamp is not None:
            with contextlib.suppress(FileExistsError):
                file = os.open(self._stamp, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                os.write(file, repr(time.time()).encode())
                os.close(file)
            self._stamp = None
        return self.env.step(action)


def cartpole_positions() -> gym.Env:
    """Make CartPole without velocities."""
    return PositionsOnly(gym.make("CartPole-v1"))


def make(env_id: str = "CartPole-v1", step_s: float = 0.0, stamp: str | None = None) -> gym.Env:
    """Make `env_id`, with `step_s` seconds per step, and with `stamp` if given."""
    env = cartpole_positions() if env_id == POSITIONS else gym.make(env_id)
    if step_s > 0:
        env = Sleeping(env, step_s)
    return env if stamp is None else Stamping(env, stamp)


def read_stamp(path: Path) -> float | None:
    """Return the time of the first step, in seconds since the epoch; None before it."""
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None
