"""A simulator that takes a given time, for demonstrations and benchmarks: `dppo/SlowCartPole-v0`."""

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv

SLOW_CARTPOLE = "dppo/SlowCartPole-v0"


class SlowCartPole(CartPoleEnv):
    """CartPole that is slow: deterministic in everything but time."""

    def __init__(
        self,
        *,
        step_s: float = 0.003,
        reset_s: float = 0.0,
        burn: bool = False,
        render_mode: str | None = None,
    ) -> None:
        """Take `step_s` seconds for a step, dynamics included, and `reset_s` for a reset; raise ValueError for others.

        `burn`: use CPU instead of sleeping; times are then CPU times.
        """
        for setting, value in (("step_s", step_s), ("reset_s", reset_s)):
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(
                    f"{setting}={value!r}: must be a finite number of seconds, of at least 0."
                )
        if not isinstance(burn, bool):
            raise ValueError(f"burn={burn!r}: must be true (use CPU) or false (sleep).")
        super().__init__(render_mode=render_mode)
        self._step_s = step_s
        self._reset_s = reset_s
        self._burn = burn
        self._clock = time.thread_time if burn else time.perf_counter

    def reset(self, **arguments: Any) -> Any:
        """Reset the environment, in at least `reset_s` seconds."""
        return self._spending(self._reset_s, partial(super().reset, **arguments))

    def step(self, action: Any) -> Any:
        """Step the environment, in at least `step_s` seconds."""
        return self._spending(self._step_s, partial(super().step, action))

    def _spending(self, seconds: float, call: Callable[[], Any]) -> Any:
        started = self._clock()
        result = call()
        if not self._burn:
            time.sleep(max(0.0, seconds - (self._clock() - started)))
        while self._burn and self._clock() - started < seconds:
            pass
        return result


def register() -> None:
    """Register `dppo/SlowCartPole-v0` with Gymnasium, once, with the time limit of CartPole-v1."""
    if SLOW_CARTPOLE not in gymnasium.registry:
        gymnasium.register(
            SLOW_CARTPOLE, entry_point="dppo.envs.simulated:SlowCartPole", max_episode_steps=500
        )
