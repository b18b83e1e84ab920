"""Environments that take their time, for tests in which the order of arrivals must be anyone's guess."""

from __future__ import annotations

import time
from typing import Any

import gymnasium as gym
import numpy as np


class Delayed(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps before a step, by an amount that nobody can foresee: it depends on nothing of the run."""

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
