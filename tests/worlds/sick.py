"""A simulator with a disease of your choice, for the doctor."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

FOREVER_S = 1000.0
AT = 30  # step of the instance at which it falls ill
MEGABYTE = 2**20
NUMBERS = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
SPACES: dict[str, gym.spaces.Space[Any]] = {
    "several": gym.spaces.Box(0, 2**40, (1,), np.int64),
    "huge": gym.spaces.Box(-1, 1, (300, 300), np.float32),
    "overshoots": gym.spaces.Box(-1, 1, (3,), np.float32),
    "camera": gym.spaces.Box(0, 255, (96, 96, 3), np.uint8),
}


class Sick(gym.Env[Any, Any]):
    """Draws numbers from its seed; episodes take 20 steps. `disease` names what is wrong with it."""

    instances = 0

    def __init__(self, disease: str = "none", step_s: float = 0.0) -> None:
        self.disease = disease
        self._step_s = step_s
        self.observation_space = SPACES.get(disease, NUMBERS)
        self.action_space = gym.spaces.Discrete(2)
        self.total = 0
        self._t = 0
        self._kept = list[Any]()
        if disease == "several":
            self._kept.append(threading.Lock())
        Sick.instances += 1
        if disease == "no licence":
            raise RuntimeError("no licence left")
        if disease == "one instance" and Sick.instances > 1:
            raise RuntimeError("the port is in use")
        if disease == "child":
            self._kept.append(subprocess.Popen(["sleep", str(FOREVER_S)], start_new_session=True))
        if disease == "hangs while it is made":
            time.sleep(FOREVER_S)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._t = 0
        if self.disease == "seeds":
            np.random.seed(0 if seed is None else seed % 2**32)
        if self.disease == "hangs in reset":
            time.sleep(FOREVER_S)
        if self.disease == "segfault":
            ctypes.string_at(0)
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        time.sleep(self._step_s)
        self._t = self._t + 1
        self.total = self.total + 1
        if self.disease == "flaky" and random.random() < 0.1:
            raise ConnectionError("lost")
        if self.total == AT:
            self._fall_ill()
        if self.disease == "several":
            memory = mmap.mmap(-1, MEGABYTE // 2)  # never memory that was freed before
            memory.write(bytes(MEGABYTE // 2))
            self._kept.append(memory)
        if self.disease == "prints":
            print("x" * 9_999)
        reward = float(self.disease != "several")
        is_over = self._t >= 20
        return self._observation(), reward, False, is_over, {}

    def close(self) -> None:
        if self.disease == "slow to close":
            time.sleep(4.5)

    def _fall_ill(self) -> None:
        if self.disease == "raises":
            raise ValueError("boom")
        if self.disease == "kills itself":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.disease == "exits":
            os._exit(3)
        if self.disease == "hangs in step":
            time.sleep(FOREVER_S)
        if self.disease == "several":
            os.chdir("/")

    def _observation(self) -> Any:
        if self.disease == "huge":
            return np.zeros((300, 300), np.float32)
        if self.disease == "several":
            return np.array([2**30 + self._t])
        if self.disease == "camera":  # this process keeps some
            return self.np_random.integers(0, 255, (96, 96, 3), np.uint8)
        if self.disease == "overshoots":  # a little, which a run goes on after
            number = self.np_random.random()
            if self._t == 18:
                number = 1.01
            return np.full(3, number, np.float32)
        number = self.np_random.normal()
        if self.disease == "own randomness":
            number = random.random()
        if self.disease == "hidden state":
            number = self.total // 10
        if self.disease == "not finite" and self._t == 5:
            number = np.nan
        return np.array([number, self._t], np.float32)


class Saved(Sick):
    """One whose state can be set; with `partial`, not all of it."""

    def __init__(self, disease: str = "none", partial: bool = False) -> None:
        super().__init__(disease)
        self._partial = partial

    def get_state(self) -> Any:
        state = {"t": self._t, "random": self.np_random.bit_generator.state}
        if not self._partial:
            state["total"] = self.total
        return state

    def set_state(self, state: Any) -> None:
        self._t = state["t"]
        self.total = state.get("total", self.total)
        self.np_random.bit_generator.state = state["random"]


class SavedInFile(Saved):
    """One whose state is a file."""

    def __init__(self, *, scratch_dir: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._folder = Path(scratch_dir)

    def get_state(self) -> Any:
        path = self._folder / f"restart-{self._t}"
        path.write_text(json.dumps(super().get_state()))
        return path

    def set_state(self, state: Any) -> None:
        super().set_state(json.loads(state.read_text()))
