"""Simulators that fork in Python, as scripts do; the child comes back from their code, or works and is terminated."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium.spaces import Box, Discrete

from worlds.episodic import Episodic

FORKED: set[Path] = set()  # with the name of their logs: once in a process, and not in the fork


class Forking(Episodic):
    """Forks `at` make, reset, step or close, once in a process; the child ends as `way` says."""

    observation_space = Box(-1, 1, (2,), np.float32)
    action_space = Discrete(2)

    def __init__(self, at: str, way: str, log: str) -> None:
        self._at = at
        self._way = way
        self._log = Path(log)
        self._fork_at("make")

    def _fork_at(self, place: str) -> None:
        if place != self._at or self._log in FORKED:
            return
        FORKED.add(self._log)
        log = self._log.with_name(f"{self._log.name}-{os.getpid()}")
        receiver, ready = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads
            child = ctypes.PyDLL(None).fork() if self._way == "in C" else os.fork()
        if not child:
            if self._way == "exit":
                sys.exit(7)
            if self._way == "raise":
                raise RuntimeError("bug in the child")
            if self._way == "wait":
                os.write(ready, b"x")
                time.sleep(60)
            return
        if self._way == "wait":
            os.read(receiver, 1)  # before that, Python would forget the signal
            os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        os.close(receiver)
        os.close(ready)
        log.write_text(str(status), encoding="utf8")

    def begin(self) -> None:
        self._fork_at("reset")

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            self._fork_at("step")
        return self.observation(), float(action), False, self.steps >= 9, {}

    def observation(self) -> np.ndarray:
        return self.np_random.uniform(-1, 1, 2).astype(np.float32)

    def close(self) -> None:
        self._fork_at("close")
