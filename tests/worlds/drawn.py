"""An environment that draws itself, and can be one that cannot be played again."""

from __future__ import annotations

import random
from typing import Any

import gymnasium as gym
import numpy as np

from worlds.episodic import Episodic

COLORS = np.array([[230, 20, 20], [20, 200, 20], [20, 20, 230]], np.uint8)


class Drawn(Episodic):
    """Episodes of 3 to 7 steps, whose observations and rewards depend on the seed and all actions.

    `differs`: "reward", that of step 2 is random; "kept", from step 2 on observations count the earlier episodes of the
    instance. The image, 15 x 21, has the color of the last action; `shown`: "grows", by a pixel a step, or what else
    render() returns.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Discrete(3)
    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012

    def __init__(
        self, *, differs: str = "", shown: Any = "image", render_mode: str | None = None
    ) -> None:
        self.render_mode = render_mode
        self._differs = differs
        self._shown = shown
        self._before = -1
        self._action = 0

    def begin(self) -> None:
        self._length = int(self.np_random.integers(3, 8))
        self._before += 1
        self._state = self.np_random.normal(size=2)

    def step(self, action: Any) -> Any:
        self.steps += 1
        self._action = int(action)
        noise = self.np_random.normal(size=2)
        self._state = 0.5 * self._state + (1 + self._action) * noise
        reward = float(self._state[0])
        if self.steps == 2 and self._differs == "reward":
            reward += random.random()
        if self.steps == 2 and self._differs == "kept":
            self._state = self._state + self._before
        ends = self.steps == self._length
        terminated = ends and self._length % 2 == 0
        return self.observation(), reward, terminated, ends, {}

    def observation(self) -> np.ndarray:
        return self._state.astype(np.float32)

    def render(self) -> Any:
        if not isinstance(self._shown, str):
            return self._shown
        growth = self.steps if self._shown == "grows" else 0
        return np.full((15 + growth, 21 + growth, 3), COLORS[self._action])


def seeded(seed: int) -> gym.Env[Any, Any]:
    """Return one whose rewards depend on a seed that its constructor asks for."""
    return gym.wrappers.TransformReward(Drawn(), lambda reward: float(reward) + seed % 1000)
