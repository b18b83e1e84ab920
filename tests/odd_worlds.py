"""Environments that wait to be disturbed, report their process, kill it, or raise in the user's own lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit
from testbeds import CrashingSimulator


class Hesitant(gym.Wrapper[Any, Any, Any, Any]):
    """Takes a second for each step after the first `slow_after`, while `folder` contains a file named `slow`.

    It creates the file `waiting-PID` when its first slow step begins. If `folder` contains a file named `interrupt`, it
    removes the file and raises KeyboardInterrupt instead.
    """

    def __init__(self, env: gym.Env[Any, Any], folder: str, slow_after: int) -> None:
        super().__init__(env)
        self._folder = Path(folder)
        self._fast_steps_left = slow_after

    def step(self, action: Any) -> Any:
        self._fast_steps_left -= 1
        if self._fast_steps_left < 0 and (self._folder / "interrupt").exists():
            (self._folder / "interrupt").unlink()
            raise KeyboardInterrupt
        if self._fast_steps_left < 0 and (self._folder / "slow").exists():
            (self._folder / f"waiting-{os.getpid()}").touch()
            time.sleep(1.0)
        return self.env.step(action)


def hesitant_cartpole(folder: str, slow_after: int = 0) -> gym.Env[Any, Any]:
    return Hesitant(gym.make("CartPole-v1"), folder, slow_after)


class Reporting(gym.Wrapper[Any, Any, Any, Any]):
    """Writes a report about its process when it is created, and at each reset."""

    def __init__(self, env: gym.Env[Any, Any], folder: str, **rest: Any) -> None:
        super().__init__(env)
        self._folder = Path(folder)
        self._rest = rest
        self._report()

    def reset(self, **keywords: Any) -> Any:
        self._report()
        return self.env.reset(**keywords)

    def _report(self) -> None:
        from threadpoolctl import threadpool_info

        report = {
            "pid": os.getpid(),
            "kwargs": self._rest,
            "heavy": sorted({"torch", "rich", "matplotlib", "tensorboardX"} & sys.modules.keys()),
            "cuda": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "blas_threads": [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"],
        }
        path = self._folder / f"{time.monotonic_ns()}-{os.getpid()}"
        path.write_text(json.dumps(report))
        path.rename(path.with_suffix(".json"))


def reporting_cartpole(folder: str, **rest: Any) -> gym.Env[Any, Any]:
    return Reporting(gym.make("CartPole-v1"), folder, **rest)


class Outside(gym.Wrapper[Any, Any, Any, Any]):
    """Runs its simulator in a separate process, like most game engines; `close` ends it."""

    def __init__(self, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._simulator = subprocess.Popen(["sleep", "1000"])

    def close(self) -> None:
        self._simulator.kill()
        self._simulator.wait()
        self.env.close()


def outside_cartpole(folder: str, slow_after: int = 0) -> gym.Env[Any, Any]:
    return Outside(hesitant_cartpole(folder, slow_after))


def deadly_cartpole(folder: str) -> gym.Env[Any, Any]:
    """CartPole-v1 that kills its process three times in all: in a constructor, in a reset and in a step.

    The files `constructor`, `reset` and `step` in `folder` show that it has happened.
    """
    env: Any = CartPoleEnv()
    for where, when in (("constructor", {}), ("reset", {"at_episode": 1}), ("step", {"at_episode": 5, "at_step": 5})):
        env = CrashingSimulator(env, how="kill", where=where, marker=str(Path(folder) / where), **when)
    return TimeLimit(env, 500)


class LicenceError(Exception):
    """A user's own exception; with two arguments it cannot be unpickled, like many of them."""

    def __init__(self, server: str, code: int) -> None:
        super().__init__(f"{server} said {code}")


class Brittle(gym.Wrapper[Any, Any, Any, Any]):
    """Raises at one place: in its constructor, in the reset that begins its second episode, or in its third step."""

    def __init__(self, where: str) -> None:
        if where == "constructor":
            raise LicenceError("licence server", 503)  # in constructor
        super().__init__(gym.make("CartPole-v1"))
        self._where, self._resets, self._steps = where, 0, 0

    def reset(self, **keywords: Any) -> Any:
        self._resets += 1
        if self._where == "reset" and self._resets == 2:
            raise LicenceError("licence server", 503)  # in reset
        return self.env.reset(**keywords)

    def step(self, action: Any) -> Any:
        self._steps += 1
        if self._where == "step" and self._steps == 3:
            raise LicenceError("licence server", 503)  # in step
        return self.env.step(action)


def line_that_raises(where: str) -> int:
    """Return the number of the line of this file that raises there."""
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if line.endswith(f"# in {where}"))


class Odd(gym.Env[Any, Any]):
    """Has the spaces of the given names; each episode has two steps."""

    SPACES = {  # noqa: RUF012
        "box": gym.spaces.Box(-1, 1, (3,), np.float32),
        "wider": gym.spaces.Box(-1, 1, (5,), np.float32),
        "dict": gym.spaces.Dict({"mission": gym.spaces.Text(9), "gear": gym.spaces.Discrete(5)}),
        "text": gym.spaces.Text(9),
        "list": gym.spaces.Sequence(gym.spaces.Discrete(3)),
        "graph": gym.spaces.Graph(gym.spaces.Discrete(3), None),
        "empty": gym.spaces.Box(-1, 1, (0,), np.float32),
        "whole": gym.spaces.Box(0, 9000, (2,), np.int64),
        "two": gym.spaces.Discrete(2),
        "three": gym.spaces.Discrete(3),
    }

    def __init__(self, obs: str = "box", act: str = "two") -> None:
        self.observation_space = self.SPACES[obs]
        self.action_space = self.SPACES[act]
        self._steps = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(self.observation_space.shape or (), np.float32), {}

    def step(self, action: Any) -> Any:
        self._steps += 1
        return np.zeros(self.observation_space.shape or (), np.float32), 1.0, self._steps == 2, False, {}


def changeable() -> Odd:
    """Return an environment whose spaces depend on environment variables, like a simulator that was updated."""
    return Odd(os.environ.get("ODD_OBS", "box"), os.environ.get("ODD_ACT", "two"))
