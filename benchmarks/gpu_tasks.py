"""Environments for benchmarks/gpu.py: made-up observations, which take no time to simulate."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

SIZE, CHANNELS = 84, 4  # of an image of Pong, as a network sees it
PICTURES = 16
LENGTH = 40  # steps of an episode
ACTIONS: dict[str, spaces.Space[Any]] = {
    "real": spaces.Box(-1, 1, (6,), np.float32),
    "choice": spaces.Discrete(6),
    "choices": spaces.MultiDiscrete([3, 5, 2]),
    "mixed": spaces.Tuple([spaces.Discrete(4), spaces.Box(-1, 1, (2,), np.float32)]),
}


def number_of(action: Any) -> float:
    """Return a number that depends on all parts of an action, for a reward."""
    parts = action if isinstance(action, tuple) else (action,)
    return float(sum(np.sum(np.clip(part, -1, 1)) for part in parts))


class Numbers(gym.Env[Any, Any]):
    """Return `size` random numbers at each step; `kind` names the space of actions."""

    def __init__(self, size: int = 17, kind: str = "real") -> None:
        self.observation_space = spaces.Box(-np.inf, np.inf, (size,), np.float32)
        self.action_space = ACTIONS[kind]
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._observation(), {}

    def _observation(self) -> Any:
        return self.np_random.normal(size=self.observation_space.shape).astype(np.float32)

    def step(self, action: Any) -> Any:
        """Return the next numbers."""
        self._steps += 1
        observation = self._observation()
        reward = number_of(action) * float(observation[0])
        return observation, reward, self._steps == LENGTH, False, {}


class Pictures(gym.Env[Any, Any]):
    """Return one of a few random images at each step, which takes `step_s` seconds."""

    def __init__(self, size: int = SIZE, step_s: float = 0.0) -> None:
        self.observation_space = spaces.Box(0, 255, (size, size, CHANNELS), np.uint8)
        self.action_space = spaces.Discrete(6)
        shape = (PICTURES, size, size, CHANNELS)
        self._images = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
        self._step_s = step_s
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Begin an episode."""
        super().reset(seed=seed)
        self._steps = 0
        return self._next(), {}

    def _next(self) -> Any:
        return self._images[self.np_random.integers(PICTURES)]

    def step(self, action: Any) -> Any:
        """Return the next image."""
        time.sleep(self._step_s)
        self._steps += 1
        return self._next(), float(action == self._steps % 6), self._steps == LENGTH, False, {}


class OnGPU(Numbers):
    """Compute each reward on a GPU, if this process sees one; write the GPUs that it sees into the folder `report`."""

    def __init__(self, report: str) -> None:
        super().__init__(kind="choice")
        import torch

        self._torch = torch
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._factors = torch.ones(1000, device=self._device)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
        Path(report, f"{os.getpid()}.txt").write_text(f"{self._device} {visible}", encoding="utf8")

    def step(self, action: Any) -> Any:
        """Return the next numbers, with a reward from the GPU."""
        observation, reward, terminated, truncated, info = super().step(action)
        reward = float((self._factors * reward).mean())
        return observation, reward, terminated, truncated, info
