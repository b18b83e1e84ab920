"""Environments with one fault each, as packages have them, for remedies that their messages name."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from worlds.joint import Agents

BOX = gym.spaces.Box(-1, 1, (2,), np.float32)
TWO = gym.spaces.Discrete(2)


class Fine(gym.Env[Any, Any]):
    """Without fault; episodes take 5 steps. `space` and `obs` are those of its observations, for others to change."""

    metadata = {"render_modes": ["rgb_array", "rgb_array_list"], "render_fps": 10}  # noqa: RUF012
    obs: Any = np.zeros(2, np.float32)
    reward: Any = 1.0

    def __init__(self, render_mode: str | None = None) -> None:
        self.observation_space: Any = BOX
        self.action_space: Any = TWO
        self.render_mode = render_mode
        self.taken = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.taken = 0
        return self.obs, {}

    def step(self, action: Any) -> Any:
        self.taken += 1
        return self.obs, self.reward, False, self.taken == 5, {}

    def render(self) -> Any:
        image = np.full((32, 32, 3), 40 * self.taken, np.uint8)
        return [image] if self.render_mode == "rgb_array_list" else image


class OldReset(Fine):
    """A gymnasium.Env that was ported half: reset takes nothing, and returns the observation alone."""

    def reset(self) -> Any:  # type: ignore[override]
        self.taken = 0
        return self.obs


class OldStep(OldReset):
    """One whose step returns a single flag, too, and whose seed is set by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int | None] = []

    def seed(self, seed: int | None = None) -> None:
        self.seeds.append(seed)

    def step(self, action: Any) -> Any:
        self.taken += 1
        return self.obs, self.reward, self.taken == 5, {"TimeLimit.truncated": True}


class SeveralRewards(Fine):
    """A package with several objectives."""

    reward = np.array([1.0, 0.5])


class WrongShape(Fine):
    """An observation that is not of its space."""

    obs = np.zeros(3, np.float32)


class Flaky(Fine):
    """Loses its connection in each seventh step."""

    steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 7:
            raise ConnectionError("lost")
        return super().step(action)


class Overshoots(Fine):
    """Exceeds its space by `share` of the distance of its limits."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.obs = np.array([0.0, 1.0 + 2 * share], np.float32)


class EmptyPart(Fine):
    """An observation with a part that has no elements, or no parts."""

    def __init__(self, name: str) -> None:
        super().__init__()
        empty: Any = {
            "objects": gym.spaces.Box(-1, 1, (0,), np.float32),
            "others": gym.spaces.Dict(),
        }[name]
        self.observation_space = gym.spaces.Dict({name: empty, "state": BOX})
        self.obs = self.observation_space.sample()


def fixed_mode(render_mode: str = "rgb_array") -> Fine:
    return Fine(render_mode)


class Herd(Agents):
    """Agents; those that leave are missing in some parts of what their last step returns, or leave without an end.

    `strays`: an agent that is not among the possible ones; `parts`: the rewards are lists.
    """

    def __init__(
        self,
        leaves_out: tuple[int, ...] = (),
        vanish: bool = False,
        strays: tuple[str, ...] = (),
        parts: bool = False,
    ) -> None:
        super().__init__()
        self._leaves_out = leaves_out
        self._vanish = vanish
        self._strays = strays
        self._parts = parts

    def step(self, actions: dict[str, Any]) -> Any:
        parts = list(super().step(actions))
        for part in self._leaves_out:
            parts[part] = {agent: parts[part][agent] for agent in self.agents}
        if self._vanish:
            parts[2] = dict.fromkeys(parts[2], False)
        if self._parts:
            parts[1] = {agent: [reward, 1.0] for agent, reward in parts[1].items()}
        self.agents += self._strays
        return tuple(parts)
