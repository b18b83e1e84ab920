"""Small environments: a point to push, a counter, wide observations, and spaces by name."""

from __future__ import annotations

import math
import os
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import TimeLimit


class PointMass(gym.Env[Any, Any]):
    """Push a point to a goal on a square.

    Observation [6]: position, velocity, goal. Action [2]: force, from -1 to 1. Reward: minus the distance to
    the goal. `is_success`: the point is within 0.1 of the goal.
    """

    def __init__(self) -> None:
        high = np.array([2, 2, 1, 1, 1, 1], np.float32)
        self.observation_space = gym.spaces.Box(-high, high, dtype=np.float32)
        self.action_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
        self._position = self._velocity = self._goal = np.zeros(2)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._position = self.np_random.uniform(-1, 1, 2)
        self._velocity = np.zeros(2)
        self._goal = self.np_random.uniform(-1, 1, 2)
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        force = np.clip(np.asarray(action, np.float64), -1, 1)
        self._velocity = 0.8 * self._velocity + 0.2 * force
        self._position = np.clip(self._position + 0.2 * self._velocity, -2, 2)
        away_x, away_y = self._goal - self._position
        distance = math.sqrt(away_x * away_x + away_y * away_y)
        return self._observation(), -distance, False, False, {"is_success": distance < 0.1}

    def _observation(self) -> np.ndarray:
        return np.concatenate([self._position, self._velocity, self._goal]).astype(np.float32)


def point_mass() -> gym.Env[Any, Any]:
    """Return PointMass with episodes of 50 steps."""
    return TimeLimit(PointMass(), 50)


class Counting(gym.Env[Any, Any]):
    """The observation is the number of steps since the reset, the reward is the action.

    It terminates at step `terminate_after` and is truncated at step `truncate_after`, if given.
    """

    def __init__(
        self,
        *,
        num_actions: int = 4,
        terminate_after: int | None = None,
        truncate_after: int | None = None,
    ) -> None:
        self.observation_space = gym.spaces.Box(0, np.inf, (1,), np.float32)
        self.action_space = gym.spaces.Discrete(num_actions)
        self._terminate_after = terminate_after
        self._truncate_after = truncate_after
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        terminated = self._steps == self._terminate_after
        truncated = self._steps == self._truncate_after
        return np.array([self._steps], np.float32), float(action), terminated, truncated, {}


class Wide(gym.Env[Any, Any]):
    """An observation of `size` numbers that all say how many steps the episode has had; it has 50."""

    def __init__(self, size: int) -> None:
        self.observation_space = gym.spaces.Box(0.0, 100.0, (size,), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
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


class Odd(gym.Env[Any, Any]):
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
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(self.observation_space.shape or (), np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return (
            np.zeros(self.observation_space.shape or (), np.float32),
            1.0,
            self._steps == 2,
            False,
            {},
        )


def changeable() -> Odd:
    """Return an environment whose spaces depend on environment variables, like a simulator that was updated."""
    return Odd(os.environ.get("ODD_OBS", "box"), os.environ.get("ODD_ACT", "two"))
