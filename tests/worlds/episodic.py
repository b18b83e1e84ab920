"""The bases of other environments: one counts its steps, one follows from its seed and all actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Episodic(gym.Env[Any, Any]):
    """Counts the steps of an episode; `begin` sets its first state."""

    steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.begin()
        return self.observation(), self.info()

    def begin(self) -> None: ...

    def observation(self) -> Any:
        raise NotImplementedError

    def info(self) -> dict[str, Any]:
        return {}


class Hashed(gym.Env[Any, Any]):
    """Episodes of 2 to 5 steps whose observations depend on the seed and on all actions."""

    observation_space = gym.spaces.Box(-4, 4, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.state = (seed or 0) % 2**31
        self.steps = 0
        self.length = self.new_length()
        return self.observation(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        self.state = (self.state * 1_103_515_245 + 12_345 + int(action)) % 2**31
        over = self.steps == self.length
        terminated = over and self.state % 2 == 0
        return self.observation(), self.state % 7 / 7, terminated, over and not terminated, {}

    def new_length(self) -> int:
        return 2 + self.state % 4

    def observation(self) -> np.ndarray:
        return np.array([self.state % 1009 / 504.5 - 1, self.state % 997 / 498.5 - 1], np.float32)
