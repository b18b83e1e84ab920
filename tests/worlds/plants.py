"""A plant with one state, controllers for it, and controllers that fail."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from worlds.episodic import Episodic

LENGTH = 10  # steps of an episode


class Plant(Episodic):
    """A level between 0 and 1 that leaks, and is to be held at 0.5 by a valve."""

    observation_space = gym.spaces.Box(0.0, 2.0, (1,), np.float64)
    action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)

    def __init__(self, target: float = 0.5) -> None:
        self._target = target

    def begin(self) -> None:
        self._level = float(self.np_random.uniform())

    def step(self, action: np.ndarray) -> Any:
        self._level = 0.8 * self._level + 0.4 * float(action[0])
        self.steps += 1
        error = abs(self._level - self._target)
        return self.observation(), -error, False, self.steps == LENGTH, {}

    def observation(self) -> np.ndarray:
        return np.array([self._level])


def nondeterministic() -> Plant:
    plant = Plant()
    plant.spec = gym.envs.registration.EnvSpec("Plant-v0", nondeterministic=True)
    return plant


def proportional(obs: np.ndarray) -> np.ndarray:
    return np.clip(0.25 + 2.0 * (0.5 - obs), 0.0, 1.0)


class Integrating:
    """Keeps an integral, which `reset` clears."""

    def reset(self) -> None:
        self._integral = 0.25

    def act(self, obs: np.ndarray) -> np.ndarray:
        self._integral += 0.1 * (0.5 - float(obs[0]))
        return np.clip(self._integral + (0.5 - obs), 0.0, 1.0)


class Raising:
    def __init__(self) -> None:
        raise RuntimeError("no licence")

    def act(self, obs: np.ndarray) -> np.ndarray:
        return obs


def wide(obs: np.ndarray) -> np.ndarray:
    return np.zeros(3)


class FailingLate:
    """Raises in the last step of each episode."""

    def reset(self) -> None:
        self._steps = 0

    def act(self, obs: np.ndarray) -> np.ndarray:
        self._steps += 1
        if self._steps == LENGTH:
            raise ZeroDivisionError("in the last step")
        return np.zeros(1)
