"""Plants, and controllers that keep something between their steps."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np


class Drift(gym.Env[Any, Any]):
    """A position that drifts away by an amount that follows from the seed; each step costs its distance from 0.

    Observations are of float64, with a text that a policy cannot read.
    """

    observation_space = gym.spaces.Dict(
        position=gym.spaces.Box(-np.inf, np.inf, (1,), np.float64), note=gym.spaces.Text(10)
    )
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, steps: int = 5) -> None:
        self._steps = steps
        self.seeds: list[int | None] = []

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.seeds.append(seed)
        self._drift = self.np_random.uniform(0.1, 0.5)
        self._position = 0.0
        self._count = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> Any:
        assert self.action_space.contains(action)
        self._position += self._drift + float(action[0])
        self._count += 1
        info = {"energy": abs(float(action[0])), "violations": float(abs(self._position) > 0.4)}
        over = self._count == self._steps
        return self._observation(), -abs(self._position), False, over, info

    def _observation(self) -> dict[str, Any]:
        return {"position": np.array([self._position]), "note": f"step {self._count}"}


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


def far(obs: Any) -> np.ndarray:
    """Return an action outside its bounds, after two good ones."""
    return np.array([1.5 if obs["note"] == "step 2" else 0.0])
