"""Environments with delays, so that segments arrive in an unpredictable order."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np


class Delayed(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps before each step, for a random time that does not depend on the seed of the run."""

    def __init__(self, env: gym.Env[Any, Any], longest_s: float) -> None:
        super().__init__(env)
        self._longest_s = longest_s
        self._delays = np.random.default_rng()  # seeded by the operating system

    def step(self, action: Any) -> Any:
        time.sleep(self._delays.uniform(0, self._longest_s))
        return self.env.step(action)


def delayed_cartpole(longest_s: float = 0.004) -> gym.Env[Any, Any]:
    return Delayed(gym.make("CartPole-v1"), longest_s)


def delayed_pendulum(longest_s: float = 0.004) -> gym.Env[Any, Any]:
    return Delayed(gym.make("Pendulum-v1"), longest_s)


class Endless(gym.Env[Any, Any]):
    """A single endless episode whose observations depend on all actions.

    Each step takes 4 ms if the file `slow` exists when the environment is created.
    """

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, slow: str) -> None:
        self._step_s = 0.004 if Path(slow).exists() else 0.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._state = seed or 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        if self._step_s:
            time.sleep(self._step_s)
        self._state = (self._state * 1_103_515_245 + 12_345 + int(action)) % 2**31
        return self._obs(), self._state % 7 / 7, False, False, {}

    def _obs(self) -> np.ndarray:
        return np.array([self._state % 1009 / 505 - 1, self._state % 997 / 499 - 1], np.float32)
