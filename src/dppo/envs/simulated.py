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


class SlowSimulator(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Slow an environment down to a given time of a step and of a reset, and change nothing else."""

    def __init__(self, env: gymnasium.Env[Any, Any], step_s: float, reset_s: float, *, burn: bool) -> None:
        for setting, value in (("step_s", step_s), ("reset_s", reset_s)):
            is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
            if not is_number or not 0 <= value < math.inf:
                raise ValueError(f"{setting}={value!r}: must be a finite number of seconds, of at least 0.")
        if not isinstance(burn, bool):
            raise ValueError(f"burn={burn!r}: must be true (use CPU) or false (sleep).")
        super().__init__(env)
        self._step_s, self._reset_s, self._burn = step_s, reset_s, burn
        self._clock = time.thread_time if burn else time.perf_counter

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, in at least `reset_s` seconds."""
        return self._spending(self._reset_s, partial(self.env.reset, **arguments))

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Step the environment, in at least `step_s` seconds."""
        return self._spending(self._step_s, partial(self.env.step, action))

    def _spending(self, seconds: float, call: Callable[[], Any]) -> Any:
        started = self._clock()
        result = call()
        if not self._burn:
            time.sleep(max(0.0, seconds - (self._clock() - started)))
        while self._burn and self._clock() - started < seconds:
            pass
        return result


def slow_cartpole(
    *, step_s: float = 0.003, reset_s: float = 0.0, burn: bool = False, render_mode: str | None = None
) -> SlowSimulator:
    """Return CartPole that is slow: deterministic in everything but time.

    Args:
        step_s: time of a step in seconds, dynamics included.
        reset_s: time of a reset in seconds.
        burn: use CPU instead of sleeping; times are then CPU times.

    Raise ValueError if a number is out of range.
    """
    return SlowSimulator(CartPoleEnv(render_mode=render_mode), step_s, reset_s, burn=burn)


def register() -> None:
    """Register `dppo/SlowCartPole-v0` with Gymnasium, once, with the time limit of CartPole-v1."""
    if SLOW_CARTPOLE not in gymnasium.registry:
        gymnasium.register(SLOW_CARTPOLE, entry_point="dppo.envs.simulated:slow_cartpole", max_episode_steps=500)
