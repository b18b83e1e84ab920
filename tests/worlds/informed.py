"""An environment whose info has numbers."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import gymnasium as gym
import numpy as np

SEEN: dict[str, list[float]] = defaultdict(list)
"""Numbers of steps of this process, by name."""


class Informed(gym.Env[Any, Any]):
    """Its info has numbers of each step, of every third, and of the last one; each episode draws its own."""

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        self._scale = float(self.np_random.uniform(0.1, 1.0))
        info = {"energy": 1e9}
        return self._observation(), info

    def step(self, action: Any) -> Any:
        self._steps += 1
        done = self._steps == 17
        info = self._info(action)
        if done:
            info["total"] = np.int64(self._steps)
            info["solved"] = True
            info["parts"] = [1, 2]
        return self._observation(), 1.0, False, done, info

    def _observation(self) -> np.ndarray:
        return np.array([self._steps], np.float32)

    def _info(self, action: int) -> dict[str, Any]:
        numbers: dict[str, Any] = {}
        numbers["energy"] = self._scale * self._steps
        if self._steps % 3 == 0:
            numbers["flow"] = np.float32(action)
        for key, number in numbers.items():
            SEEN[key].append(float(number))
        info = numbers | {"name": "x"}
        info["nan"] = float("nan")
        return info
