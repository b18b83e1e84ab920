"""Environments in which only memory helps, and some that reveal an off-by-one."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from worlds.episodic import Episodic


class Recalls(Episodic):
    """Show a bit in the first observation only, and reward the action that equals it. Episodes take 3 to 7 steps.

    They end by a terminal state or, one in three, by a time limit.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def begin(self) -> None:
        self.bit = int(self.np_random.integers(2))
        self.length = int(self.np_random.integers(3, 8))

    def step(self, action: Any) -> Any:
        self.steps += 1
        over = self.steps >= self.length
        cut = self.length % 3 == 0
        return self.observation(), float(action == self.bit), over and not cut, over and cut, {}

    def observation(self) -> np.ndarray:
        shown = 0 if self.steps else 2 * self.bit - 1
        return np.array([shown, self.steps / 8], np.float32)


class Pictured(gym.ObservationWrapper[Any, Any, Any]):
    """The same as an image."""

    def __init__(self) -> None:
        super().__init__(Recalls())
        self.observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return np.full((8, 8, 3), 128 + 100 * observation[0] + 20 * observation[1]).astype(np.uint8)


class Named(gym.ObservationWrapper[Any, Any, Any]):
    """The same as a Dict."""

    def __init__(self) -> None:
        super().__init__(Recalls())
        self.observation_space = gym.spaces.Dict(
            {"bit": gym.spaces.Discrete(3), "time": gym.spaces.Box(-1, 1, (1,))}
        )

    def observation(self, observation: np.ndarray) -> dict[str, Any]:
        return {"bit": int(observation[0]) + 1, "time": observation[1:]}
