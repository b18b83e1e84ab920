"""A factory that asks for its number and for a folder, and wrappers."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit

from worlds.faulty import is_first

NUMBER = 3


class Numbered(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole whose reward says which one it is.

    The first one, if it `meddles`, changes state of the process; if `killing` names a file that is not there, it makes
    it and kills the process.
    """

    def __init__(
        self,
        *,
        meddles: bool = False,
        killing: str = "",
        sampler_id: int,
        env_index: int,
        scratch_dir: str,
        render_mode: Any,
    ) -> None:
        super().__init__(TimeLimit(CartPoleEnv(render_mode=render_mode), 15))
        self._meddles = meddles and sampler_id == env_index == 0
        self._killing = killing
        self.place = sampler_id + env_index / 10
        self.log = Path(scratch_dir, "log")
        self.log.write_text("made\n")

    def reset(self, **arguments: Any) -> Any:
        self._meddle()
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self._meddle()
        if self._meddles and self._killing and is_first(Path(self._killing)):
            os.kill(os.getpid(), signal.SIGKILL)
        obs, _, terminated, truncated, info = super().step(action)
        return obs, self.place, terminated, truncated, info

    def _meddle(self) -> None:
        if self._meddles:
            np.random.seed(1)
            random.seed(np.random.uniform())
            os.chdir(tempfile.gettempdir())
            if torch := sys.modules.get("torch"):
                torch.manual_seed(random.randrange(99))
                torch.set_default_dtype(torch.float64)
                torch.set_num_threads(2)


class Doubled(gym.RewardWrapper[Any, Any]):
    """Doubles the reward."""

    def reward(self, reward: Any) -> Any:
        return 2 * reward


class PlusOne(gym.RewardWrapper[Any, Any]):
    """Adds one to the reward."""

    def reward(self, reward: Any) -> Any:
        return reward + 1


def nothing(env: Any) -> None:
    """Forget to return the environment."""


class _Failing(CartPoleEnv):
    def step(self, action: Any) -> Any:
        raise RuntimeError("1 1 failed")


def numbered_failing(sampler_id: int, env_index: int) -> gym.Env[Any, Any]:
    """Return CartPole; in environment 1 of sampler 1, one that fails."""
    return _Failing() if sampler_id == env_index == 1 else CartPoleEnv()
