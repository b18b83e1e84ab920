"""An environment whose observations are large: whether a process carries them about can be told by its memory."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Wide(gym.Env[Any, Any]):
    """An observation of `size` numbers that all say how many steps the episode has had; it has 50."""

    def __init__(self, size: int) -> None:
        self.observation_space = gym.spaces.Box(0.0, 100.0, (size,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        return self._observation(), float(action), self._steps == 50, False, {}

    def _observation(self) -> np.ndarray:
        return np.full(self.observation_space.shape or (), self._steps, np.float32)


def wide(size: int = 2**15) -> gym.Env[Any, Any]:
    return Wide(size)
