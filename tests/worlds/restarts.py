"""A simulator that writes restart files: `get_state` returns the path of one, or of a folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np


class Restarting(gym.Env[Any, Any]):
    """A walk of 40 steps whose position, on disk, is a file of `size` bytes, of which 16 are written.

    `hidden`: it also depends on the steps of the instance, which no replay repeats.
    """

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self,
        scratch_dir: str,
        *,
        size: int = 0,
        files: int = 0,
        padding: int = 0,
        hidden: bool = False,
        sleep_s: float = 0.0,
    ) -> None:
        self._folder = Path(scratch_dir)
        self._size = size
        self._files = files
        self._padding = bytes(padding)
        self._hidden = hidden
        self._sleep_s = sleep_s
        self._steps = 0
        self._numbers = np.zeros(2)
        self._written = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._numbers = np.array([self.np_random.uniform(-1, 1), 0.0])
        return self._numbers.copy(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self._sleep_s)
        self._steps += 1
        push = 0.1 if action else -0.1
        drift = 0.01 * np.sin(self._steps) if self._hidden else 0.0
        self._numbers += push + drift, 1.0
        reward = -abs(float(self._numbers[0]))
        return self._numbers.copy(), reward, False, bool(self._numbers[1] >= 40), {}

    def get_state(self) -> Any:
        self._written += 1
        path = self._folder / f"restart-{self._written}"
        numbers = path
        if self._files:
            (path / "deep").mkdir(parents=True)
            for number in range(self._files):
                (path / "deep" / f"part-{number}").write_bytes(b"part %d" % number)
            numbers = path / "numbers"
        numbers.write_bytes(self._numbers.tobytes() + self._padding)
        if self._size:
            os.truncate(numbers, self._size)
        generator = self.np_random.bit_generator.state
        return {"restart": path, "steps": self._steps, "generator": generator}

    def set_state(self, state: Any) -> None:
        path = state["restart"]
        numbers = path / "numbers" if path.is_dir() else path
        with numbers.open("rb") as file:
            self._numbers = np.frombuffer(file.read(16)).copy()
        self._steps = state["steps"]
        self.np_random.bit_generator.state = state["generator"]


class Outside(Restarting):
    """Returns a path that is not below its folder."""

    def get_state(self) -> Any:
        return Path("/etc")


def outside(scratch_dir: str) -> gym.Env[Any, Any]:
    return Outside(scratch_dir)
