"""A CartPole whose gravity is an option of its reset; it keeps the options of all resets of this process."""

from __future__ import annotations

from typing import Any

from gymnasium.envs.classic_control.cartpole import CartPoleEnv

import dppo

RESETS: list[dict[str, Any] | None] = []


class Graded(CartPoleEnv):
    """`level` is added to the gravity; at `fails_at`, the second step of an episode raises."""

    def __init__(self, fails_at: int = -1) -> None:
        super().__init__()
        self._fails_at = fails_at
        self._steps = 0
        self._level = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        RESETS.append(None if options is None else dict(options))
        self._level = (options or {}).pop("level", 0)  # the environment has its own copy
        self._steps = 0
        self.gravity = 9.8 + self._level
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._level == self._fails_at and self._steps == 2:
            raise RuntimeError(f"level {self._level}")
        return CartPoleEnv.step(self, action)  # type: ignore[no-untyped-call]


class Levels(dppo.Observer):
    """Raises the level after each iteration."""

    def on_start(self, run: dppo.RunInfo) -> None:
        self.run = run
        self.options_at_start = run.env_options
        run.set_env(level=1, list=[1, 2.5])

    def on_iteration(self, row: dict[str, float]) -> None:
        self.run.set_env(level=self.run.env_options["level"] + 1)
