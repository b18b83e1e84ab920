"""Small environments: a point to push, a counter, wide observations, and spaces by name."""

from __future__ import annotations

import math
import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit

from worlds.episodic import Episodic

HIGH = np.array([2, 2, 1, 1, 1, 1], np.float32)


class PointMass(Episodic):
    """Push a point to a goal on a square.

    Observation [6]: position, velocity, goal. Action [2]: force, from -1 to 1. Reward: minus the distance to
    the goal. `is_success`: the point is within 0.1 of the goal.
    """

    observation_space = gym.spaces.Box(-HIGH, HIGH)
    action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def begin(self) -> None:
        self._position = self.np_random.uniform(-1, 1, 2)
        self._velocity = np.zeros(2)
        self._goal = self.np_random.uniform(-1, 1, 2)

    def step(self, action: Any) -> Any:
        force = np.clip(np.asarray(action, np.float64), -1, 1)
        self._velocity = 0.8 * self._velocity + 0.2 * force
        position = self._position + 0.2 * self._velocity
        self._position = np.clip(position, -2, 2)
        away_x, away_y = self._goal - self._position
        distance = math.sqrt(away_x * away_x + away_y * away_y)
        info = {"is_success": distance < 0.1}
        return self.observation(), -distance, False, False, info

    def observation(self) -> np.ndarray:
        return np.concatenate([self._position, self._velocity, self._goal]).astype(np.float32)


def point_mass() -> gym.Env[Any, Any]:
    """Return PointMass with episodes of 50 steps."""
    return TimeLimit(PointMass(), 50)


def to_goal(obs: np.ndarray) -> np.ndarray:
    """Push the point to the goal, and stop it there."""
    force: np.ndarray = np.clip(2 * (obs[4:] - obs[:2]) - obs[2:4], -1, 1)
    return force


class Counting(Episodic):
    """The observation is the number of steps since the reset, the reward is the action.

    It terminates at step `terminate_after` and is truncated at step `truncate_after`, if given.
    """

    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)

    def __init__(
        self,
        *,
        num_actions: int = 4,
        terminate_after: int | None = None,
        truncate_after: int | None = None,
    ) -> None:
        self.action_space = gym.spaces.Discrete(num_actions)
        self._terminate_after = terminate_after
        self._truncate_after = truncate_after

    def step(self, action: Any) -> Any:
        self.steps += 1
        terminated = self.steps == self._terminate_after
        truncated = self.steps == self._truncate_after
        return self.observation(), float(action), terminated, truncated, {}

    def observation(self) -> np.ndarray:
        return np.array([self.steps], np.float32)


class Wide(Episodic):
    """An observation of `size` numbers that all say how many steps the episode has had; it has 50."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, size: int = 2**15) -> None:
        self.observation_space = gym.spaces.Box(0.0, 100.0, (size,), np.float32)

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation(), float(action), self.steps == 50, False, {}

    def observation(self) -> np.ndarray:
        return np.full(self.observation_space.shape or (), self.steps, np.float32)


class Odd(Episodic):
    """Has the spaces of the given names; each episode has two steps."""

    SPACES = {  # noqa: RUF012
        "box": gym.spaces.Box(-1, 1, (3,), np.float32),
        "wider": gym.spaces.Box(-1, 1, (5,), np.float32),
        "dict": gym.spaces.Dict({"mission": gym.spaces.Text(9), "gear": gym.spaces.Discrete(5)}),
        "text": gym.spaces.Text(9),
        "list": gym.spaces.Sequence(gym.spaces.Discrete(3)),
        "graph": gym.spaces.Graph(gym.spaces.Discrete(3), None),
        "empty": gym.spaces.Box(-1, 1, (0,), np.float32),
        "whole": gym.spaces.Box(0, 9000, (2,), np.int64),
        "two": gym.spaces.Discrete(2),
        "three": gym.spaces.Discrete(3),
    }

    def __init__(self, obs: str = "box", act: str = "two") -> None:
        self.observation_space = self.SPACES[obs]
        self.action_space = self.SPACES[act]

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.observation(), 1.0, self.steps == 2, False, {}

    def observation(self) -> np.ndarray:
        return np.zeros(self.observation_space.shape or (), np.float32)


def changeable() -> Odd:
    """Return an environment whose spaces depend on environment variables, like a simulator that was updated."""
    return Odd(os.environ.get("ODD_OBS", "box"), os.environ.get("ODD_ACT", "two"))
