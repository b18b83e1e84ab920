"""Plants, and controllers that keep something between their steps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from worlds.episodic import Episodic


class Drift(Episodic):
    """A position that drifts away by an amount that follows from the seed; each step costs its distance from 0.

    Observations are of float64, with a text that a policy cannot read.
    """

    observation_space = gym.spaces.Dict(
        position=gym.spaces.Box(-np.inf, np.inf, (1,), np.float64), note=gym.spaces.Text(10)
    )
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, steps: int = 5) -> None:
        self._length = steps

    def begin(self) -> None:
        self._drift = self.np_random.uniform(0.1, 0.5)
        self._position = 0.0

    def step(self, action: np.ndarray) -> Any:
        assert self.action_space.contains(action)
        self._position += self._drift + float(action[0])
        self.steps += 1
        info = {"energy": abs(float(action[0])), "violations": float(abs(self._position) > 0.4)}
        over = self.steps == self._length
        return self.observation(), -abs(self._position), False, over, info

    def observation(self) -> dict[str, Any]:
        return {"position": np.array([self._position]), "note": f"step {self.steps}"}


class Integral:
    """Adds up what it sees: an integrator, whose sum must not leak into another episode."""

    def __init__(self) -> None:
        self._sum = 0.0

    def act(self, obs: dict[str, Any]) -> np.ndarray:
        assert obs["position"].dtype == np.float64
        assert obs["note"].startswith("step ")
        self._sum += obs["position"][0]
        return np.clip([-0.5 * obs["position"][0] - 0.3 * self._sum], -1, 1)


class Resetting(Integral):
    """The same, reset before each episode."""

    def reset(self) -> None:
        self._sum = 0.0


def still(obs: Any) -> np.ndarray:
    """Do nothing."""
    return np.zeros(1)


def nothing(obs: Any) -> None:
    """Return no action."""


def far(obs: Any) -> np.ndarray:
    """Return an action outside its bounds, after two good ones."""
    return np.array([1.5 if obs["note"] == "step 2" else 0.0])
