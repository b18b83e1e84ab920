"""An environment with real-valued actions whose episodes terminate, or are truncated."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from worlds.episodic import Episodic


class Pushed(Episodic):
    """Keep a point near the middle; it terminates 2 away from it, and is truncated after 25 steps."""

    observation_space = gym.spaces.Dict(
        place=gym.spaces.Box(-9, 9, (2,)), lamp=gym.spaces.Discrete(3)
    )
    action_space = gym.spaces.Box(np.array([0, -3], np.float32), np.array([1, 3], np.float32))

    def begin(self) -> None:
        self._place = self.np_random.uniform(-1, 1, 2)

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        self.steps += 1
        centred = action.astype(np.float64) - self.action_space.low
        push = centred / 3 - 0.5
        noise = self.np_random.normal(size=2)
        self._place = self._place + 0.3 * push + 0.1 * noise
        reward = -float(np.square(self._place).sum())
        terminated = bool(np.abs(self._place).max() > 2)
        return self.observation(), reward, terminated, self.steps >= 25, {}

    def observation(self) -> Any:
        return {"place": self._place.astype(np.float32), "lamp": self.steps % 3}
