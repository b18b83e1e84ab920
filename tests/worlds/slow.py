"""Environments that wait, be it for a random time or to be disturbed, or that report on their process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.make import make_env
from dppo.envs.simulated import SlowCartPole
from worlds.episodic import Hashed


class Delayed(gym.Wrapper[Any, Any, Any, Any]):
    """Sleeps before each step of `world`, for a random time that does not depend on the seed of the run."""

    def __init__(
        self, world: str = "CartPole-v1", world_kwargs: Any = None, longest_s: float = 0.004
    ) -> None:
        super().__init__(make_env(world, world_kwargs or {}))
        self._longest_s = longest_s
        self._delays = np.random.default_rng()  # seeded by the operating system

    def step(self, action: Any) -> Any:
        time.sleep(self._delays.uniform(0, self._longest_s))
        return self.env.step(action)


class Endless(Hashed):
    """A single endless episode. Each step takes 4 ms if the file `slow` exists when the environment is created."""

    def __init__(self, slow: str) -> None:
        self._step_s = 0.004 if Path(slow).exists() else 0.0

    def step(self, action: Any) -> Any:
        if self._step_s:
            time.sleep(self._step_s)
        return super().step(action)

    def new_length(self) -> int:
        return 0


class Hesitant(gym.Wrapper[Any, Any, Any, Any]):
    """Takes a second for each step after the first `slow_after`, while `folder` contains a file named `slow`.

    It creates the file `waiting-PID` when its first slow step begins. If `folder` contains a file named `interrupt`, it
    removes the file and sends SIGINT to its process, too.
    """

    def __init__(self, env: gym.Env[Any, Any], folder: str, slow_after: int) -> None:
        super().__init__(env)
        self._folder = Path(folder)
        self._fast_steps_left = slow_after

    def step(self, action: Any) -> Any:
        self._fast_steps_left -= 1
        if self._fast_steps_left < 0 and (self._folder / "interrupt").exists():
            (self._folder / "interrupt").unlink()
            signal.raise_signal(signal.SIGINT)
        if self._fast_steps_left < 0 and (self._folder / "slow").exists():
            (self._folder / f"waiting-{os.getpid()}").touch()
            time.sleep(1.0)
        return self.env.step(action)


def hesitant_cartpole(folder: str, slow_after: int = 0) -> gym.Env[Any, Any]:
    return Hesitant(gym.make("CartPole-v1"), folder, slow_after)


class Reporting(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that writes a report about its process when it is created, and at each reset."""

    def __init__(self, folder: str, **kwargs: Any) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._folder = Path(folder)
        self._rest = kwargs
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
            "blas_threads": [
                pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"
            ],
        }
        path = self._folder / f"{time.monotonic_ns()}-{os.getpid()}"
        path.write_text(json.dumps(report))
        path.rename(path.with_suffix(".json"))


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


def slow_in_one_process(step_s: float, slow: float = 1.0, mark: str = "") -> gym.Env[Any, Any]:
    """Make CartPole whose steps take `step_s`; `slow` times as long in the process that first creates `mark`."""
    if mark:
        with suppress(FileExistsError), open(mark, "x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
        step_s *= slow if Path(mark).read_text(encoding="utf-8") == str(os.getpid()) else 1
    return SlowCartPole(step_s=step_s)
