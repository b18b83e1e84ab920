"""An environment that returns something invalid. Actors import this module by name: `faulty_worlds:Faulty`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np


class Faulty(gym.Env[Any, Any]):
    """Count steps in the observation; return one invalid value at step `at_step` of each episode in `episodes`."""

    def __init__(
        self,
        *,
        obs: Any = None,
        reward: Any = 1.0,
        terminated: Any = False,
        at_step: int = 3,
        episodes: Sequence[int] = (0,),
        length: int = 6,
        space: gym.Space[Any] | None = None,
    ) -> None:
        self.observation_space = space or gym.spaces.Box(-100, 100, (2,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._bad = (obs, reward, terminated)
        self._at_step, self._episodes, self._length = at_step, episodes, length
        self.episode, self.steps = -1, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, bool, dict[str, Any]]:
        self.steps += 1
        _, reward, terminated = self._bad if self._is_bad() else (None, 1.0, False)
        return self._observe(), reward, terminated, self.steps >= self._length, {}

    def _is_bad(self) -> bool:
        return self.steps == self._at_step and self.episode in self._episodes

    def _observe(self) -> Any:
        if self._is_bad() and self._bad[0] is not None:
            return self._bad[0]
        return np.full(2, self.steps, self.observation_space.dtype)
