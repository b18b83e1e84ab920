"""An environment without an end, with state that survives resets, which `get_state` and `set_state` carry over."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import FrameStackObservation, TimeLimit


class Hidden(gym.Env[Any, Any]):
    """Rewards each fifth step of the instance, and draws from a generator that no seed sets.

    `fault`: what its `get_state` or `set_state` does wrong, from segment `after` on; None: nothing.
    """

    observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault: str | None = None, after: int = 0, sleep_s: float = 0.0, kill_at: int = 0) -> None:
        self.steps, self.place, self.random = 0, np.zeros(3), np.random.default_rng(5)
        self._fault, self._after, self._sleep_s, self._kill_at, self.asked = fault, after, sleep_s, kill_at, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.place = np.zeros(3)
        return self.place.copy(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(self._sleep_s)
        self.steps += 1
        self.place[int(action)] += self.random.normal()
        self.place[2] = self.steps % 7
        return self.place.copy(), float(self.steps % 5 == 0) + action, False, False, {}

    def get_state(self) -> Any:
        self.asked += 1
        if self._fault is not None and self.asked > self._after:
            if self._fault == "raises":
                raise OSError("no answer")
            if self._fault == "slow":
                time.sleep(0.01)
            odd = {"set": {1, 2}, "generator": self.random, "large": bytes(2**24), "forgets": os.urandom(8)}
            return {"odd": odd.get(self._fault), "steps": self.steps}
        return {"steps": self.steps, "place": self.place, "random": self.random.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self.steps, self.place = state["steps"], state["place"].copy()
        self.random.bit_generator.state = state["random"]


def endless(**keywords: Any) -> gym.Env[Any, Any]:
    """Return `Hidden` in two wrappers with state of their own; its episodes do not end."""
    return FrameStackObservation(TimeLimit(Hidden(**keywords), 10**9), 2)


def limited(**keywords: Any) -> gym.Env[Any, Any]:
    """Return `Hidden` with episodes of 45 steps, which its wrapper counts."""
    return FrameStackObservation(TimeLimit(Hidden(**keywords), 45), 2)


class Foreign(Hidden):
    """Methods of these names that mean something else."""

    def get_state(self, which: str) -> Any:  # type: ignore[override]
        raise AssertionError(which)


def foreign() -> gym.Env[Any, Any]:
    """Return `Foreign`."""
    return Foreign()
