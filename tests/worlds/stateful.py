"""An environment without an end, with state that survives resets, which `get_state` and `set_state` carry over."""

from __future__ import annotations

import os
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.wrappers import FrameStackObservation, TimeLimit

from worlds.episodic import Episodic


class Hidden(gym.Env[Any, Any]):
    """Rewards each fifth step of the instance, and draws from a generator that no seed sets.

    `fault`: what its `get_state` or `set_state` does wrong, from segment `after` on; None: nothing.
    """

    observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, fault: str | None = None, after: int = 0, sleep_s: float = 0.0) -> None:
        self.steps = 0
        self.place = np.zeros(3)
        self.random = np.random.default_rng(5)
        self._fault = fault
        self._after = after
        self._sleep_s = sleep_s
        self.asked = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.place = np.zeros(3)
        return self.place.copy(), {}

    def step(self, action: Any) -> Any:
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
            odd = {
                "set": {1, 2},
                "generator": self.random,
                "large": bytes(2**24),
                "forgets": os.urandom(8),
            }
            return {"odd": odd.get(self._fault), "steps": self.steps}
        return {"steps": self.steps, "place": self.place, "random": self.random.bit_generator.state}

    def set_state(self, state: Any) -> None:
        self.steps = state["steps"]
        self.place = state["place"].copy()
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


class Arm(Episodic):
    """Follows from its seed. `get_state` returns joint positions, for logs: no clock, no goal and no generator."""

    observation_space = gym.spaces.Box(-10, 10, (3,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    length = 30
    goal = 0.0

    def __init__(self, sleep_s: float = 0.0) -> None:
        self._sleep_s = sleep_s

    def get_state(self) -> Any:
        return self.joints.copy()

    def set_state(self, state: Any) -> None:
        self.joints = np.array(state)

    def begin(self) -> None:
        self.joints = self.np_random.uniform(-1, 1, 2)
        self.goal = float(self.np_random.uniform(-2, 2))

    def step(self, action: Any) -> Any:
        time.sleep(self._sleep_s)
        self.steps += 1
        self.joints = np.clip(
            self.joints + 0.2 * np.asarray(action) + 0.02 * self.np_random.normal(size=2), -5, 5
        )
        reward = -abs(float(self.joints.sum()) - self.goal)
        return self.observation(), reward, False, self.steps >= self.length, {}

    def observation(self) -> np.ndarray:
        return np.array([*self.joints, self.goal], np.float32)


class Clockless(Arm):
    """Leaves out only its clock, which shows in no segment but the one in which the episode ends."""

    length = 70

    def get_state(self) -> Any:
        return [self.joints, self.goal, self.np_random.bit_generator.state]

    def set_state(self, state: Any) -> None:
        self.joints, self.goal, self.np_random.bit_generator.state = state


class Worn(Arm):
    """Returns a complete state, with the number of steps of the instance, to which a replay does not lead."""

    made = 0

    def step(self, action: Any) -> Any:
        self.made += 1
        return super().step(action)

    def get_state(self) -> Any:
        generator = self.np_random.bit_generator.state
        return [self.joints, self.goal, generator, self.steps, self.made]

    def set_state(self, state: Any) -> None:
        self.joints, self.goal, generator, self.steps, self.made = state
        self.np_random.bit_generator.state = generator


class Misleading(Arm):
    """Adds something to its state that is never the same."""

    def get_state(self) -> Any:
        return {"joints": self.joints.copy(), "id": os.urandom(8)}

    def set_state(self, state: Any) -> None:
        self.joints = state["joints"]
