"""Small environments with observations of all kinds: every one follows from the seed and the actions."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.wrappers import FrameStackObservation, GrayscaleObservation

from worlds.episodic import Episodic

WHOLE = spaces.Dict(
    camera=spaces.Box(0, 255, (8, 9, 3), np.uint8),
    dials=spaces.MultiDiscrete([3, 2], start=[-1, 5]),
    gear=spaces.Discrete(4, start=2),
    lamps=spaces.MultiBinary(3),
    mission=spaces.Text(20),
    robot=spaces.Dict(
        arm=spaces.Tuple([spaces.Box(-9, 9, (2,), np.float64), spaces.Box(0, 15, ())]),
        note=spaces.Text(9),
    ),
    tool=spaces.OneOf([spaces.Discrete(3), spaces.Box(-1, 1, (2,))]),
)
TEXTS = ("mission", "robot.note")  # which cannot be learned on


class World(Episodic):
    """A point that drifts, and that the actions push; an episode ends far out, and is truncated after 15 steps."""

    action_space: Any = spaces.Discrete(3)

    def begin(self) -> None:
        self.at = self.np_random.normal(size=2) * 0.5

    def step(self, action: Any) -> Any:
        self.steps += 1
        noise = self.np_random.normal(size=2) * 0.2
        self.at = self.at + noise + 0.1 * (np.mean(action) - 1)
        far = float(np.abs(self.at).max())
        return self.observation(), 1.0 - far, far > 2, self.steps == 15, self.info()

    def pixels(self, shape: tuple[int, ...]) -> np.ndarray:
        noise = self.np_random.integers(0, 60, shape)
        brightness = np.clip(90 + 40 * self.at[0], 0, 190)
        pixels: np.ndarray = (noise + brightness).astype(np.uint8)
        return pixels


class Level(World):
    """A single number, without an axis."""

    observation_space = spaces.Box(-9, 9, (), np.float32)

    def observation(self) -> Any:
        return np.float32(self.at[0])


class Picture(World):
    """An image, with the channels behind."""

    def __init__(self, size: int = 8, channels: int = 3) -> None:
        self.shape = size, size, channels
        self.observation_space = spaces.Box(0, 255, self.shape, np.uint8)

    def observation(self) -> Any:
        return self.pixels(self.shape)


class Guarded(Picture):
    """An image, of a state in which one of the actions is not allowed."""

    def action_masks(self) -> np.ndarray:
        allowed: np.ndarray = np.arange(3) != self.steps % 3
        return allowed


def stacked(stack: int) -> gym.Env[Any, Any]:
    """Return Guarded with stacks of gray frames, by wrappers of its own."""
    return FrameStackObservation(GrayscaleObservation(Guarded()), stack)


class Codes(World):
    """A small image of codes and a direction, as MiniGrid has them."""

    observation_space = spaces.Dict(
        direction=spaces.Discrete(4), image=spaces.Box(0, 255, (7, 7, 3), np.uint8)
    )

    def observation(self) -> Any:
        codes = self.np_random.integers(1, 11, (7, 7, 3))
        if self.at[0] > 0:
            codes //= 2
        return {"direction": self.steps % 4, "image": codes.astype(np.uint8)}


class Film(World):
    """Four images, each with the channels behind, and actions that are real numbers."""

    observation_space = spaces.Box(0, 255, (4, 10, 12, 1), np.uint8)
    action_space = spaces.Box(-1, 1, (2,))

    def observation(self) -> Any:
        return self.pixels((4, 10, 12, 1))


class Everything(World):
    """A leaf of each kind; two of them are texts."""

    observation_space = WHOLE

    def observation(self) -> Any:
        number = self.steps
        at = np.clip(self.at, -9, 9)
        tool: tuple[int, Any] = (0, number % 3)
        if number % 2 == 0:
            tool = (1, np.clip(self.at, -1, 1).astype(np.float32))
        return {
            "tool": tool,
            "mission": "push",
            "robot": {"arm": (at, np.float32(number)), "note": "b"},
            "lamps": np.array([number & 1, number & 2, number & 4], bool),
            "gear": 2 + number % 4,
            "dials": np.array([number % 3 - 1, 5 + number % 2]),
            "camera": self.pixels((8, 9, 3)),
        }


class Numbers(World):
    """Vectors and categories, and no image."""

    observation_space = spaces.Dict(
        goal=spaces.Box(-9, 9, (2,), np.float64),
        step=spaces.Discrete(16),
        lamps=spaces.MultiBinary(2),
    )

    def observation(self) -> Any:
        return {
            "goal": np.clip(self.at, -9, 9),
            "step": self.steps,
            "lamps": np.array([self.steps & 1, self.steps & 2], bool),
        }


PLAIN: dict[str, gym.Space[Any]] = {
    "discrete": spaces.Discrete(16, start=-1),
    "many": spaces.Discrete(5000),
    "multidiscrete": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multibinary": spaces.MultiBinary((2, 2)),
    "number": spaces.Box(-9, 9, (), np.float64),
    "grid": spaces.Box(-9, 9, (2, 3), np.int32),
    "one of": spaces.OneOf([spaces.Discrete(3), spaces.Box(-9, 9, (2,))]),
    "tuple": spaces.Tuple([spaces.Discrete(2), spaces.Box(-9, 9, (2,))]),
}


class Plain(World):
    """Has the requested space as its only one."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self.observation_space = PLAIN[kind]

    def observation(self) -> Any:
        number = self.steps
        at = self.at.astype(np.float32)
        return {
            "discrete": number - 1,
            "many": 300 * number,
            "multidiscrete": np.array([[number % 2, 2], [3, number % 5]]),
            "multibinary": np.array([[1, 0], [0, number % 2]], np.int8),
            "number": np.float64(self.at[0]),
            "grid": np.full((2, 3), number % 9, np.int32),
            "one of": (0, number % 3) if number % 2 else (1, at),
            "tuple": (number % 2, at),
        }[self._kind]
