"""Simulators of which a process may have few instances: a further one raises, or replaces the first in silence."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np

from worlds.episodic import Episodic


class Engine(Episodic):
    """Raises where its process has `most` instances already."""

    observation_space = gym.spaces.Box(-10, 10, (4,), np.float32)
    action_space = gym.spaces.Discrete(2)
    alive: ClassVar[list[Engine]] = []

    def __init__(self, most: int = 1, slow: str = "") -> None:
        """Be slow in the process that makes the file `slow` first."""
        if len(Engine.alive) >= most:
            raise PermissionError("there should be only one engine in a process")
        Engine.alive.append(self)
        self.step_s = 0.0
        with suppress(OSError):
            os.close(os.open(slow, os.O_CREAT | os.O_EXCL))
            Engine.step_s_of_process = 0.01
        if slow:
            self.step_s = Engine.step_s_of_process

    step_s_of_process = 0.0005

    def begin(self) -> None:
        self.x = self.np_random.normal(size=4).clip(-5, 5)

    def step(self, action: int) -> Any:
        time.sleep(self.step_s)
        self.steps += 1
        self.x = np.clip(self.x + (0.1 if action else -0.1), -9, 9)
        return self.observation(), float(self.x[0]), False, self.steps >= 20, {}

    def observation(self) -> np.ndarray:
        return self.x.astype(np.float32)

    def close(self) -> None:
        if self in Engine.alive:
            Engine.alive.remove(self)


class Replaced(Engine):
    """A further instance takes the simulation of the process, and the steps of earlier ones are those of the newest."""

    newest: ClassVar[Any] = None

    def __init__(self, hangs_s: float = 0.0) -> None:
        """Wait for so long in a step of an instance that has been replaced."""
        self.step_s = 0.0
        self.hangs_s = hangs_s
        Replaced.newest = self

    def step(self, action: int) -> Any:
        if Replaced.newest is not self:
            time.sleep(self.hangs_s)
            Replaced.newest.x = Replaced.newest.x + 0.01
            self.x = self.x + 0.01
        return super().step(action)

    def close(self) -> None:
        pass


class OnPort(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that needs a port of its own place."""

    ports: ClassVar[set[int]] = set()

    def __init__(self, sampler_id: int, env_index: int) -> None:
        self.port = 10 * sampler_id + env_index
        if self.port in self.ports:
            raise OSError("the port is in use")
        self.ports.add(self.port)
        super().__init__(gym.make("CartPole-v1"))

    def close(self) -> None:
        self.ports.remove(self.port)
