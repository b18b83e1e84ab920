"""Environments of the benchmarks, the same for every library: this file imports none of them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym


class Sleeping(gym.Wrapper):
    """Make each step take `step_s` seconds, dynamics included, as in dppo/SlowCartPole-v0."""

    def __init__(self, env: gym.Env, step_s: float) -> None:
        super().__init__(env)
        self._step_s = step_s

    def step(self, action: Any) -> Any:
        started = time.perf_counter()
        result = self.env.step(action)
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - started)))
        return result


class Stamping(gym.Wrapper):
    """Write the time of day into the file `stamp` at the first step of all processes."""

    def __init__(self, env: gym.Env, stamp: str) -> None:
        super().__init__(env)
        self._stamp: str | None = stamp

    def step(self, action: Any) -> Any:
        if self._stamp is not None:
            with contextlib.suppress(FileExistsError):
                file = os.open(self._stamp, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
                os.write(file, repr(time.time()).encode())
                os.close(file)
            self._stamp = None
        return self.env.step(action)


def make_atari(env_id: str) -> gym.Env:
    """Make a game that returns stacks of four frames of 84 x 84 grey pixels: [4, 84, 84] bytes.

    Source: Machado et al., "Revisiting the Arcade Learning Environment" (arXiv:1709.06009), with no-ops at the start.
    """
    import ale_py
    import cv2
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    cv2.setNumThreads(1)
    gym.register_envs(ale_py)
    return FrameStackObservation(AtariPreprocessing(gym.make(env_id, frameskip=1)), 4)


def make(env_id: str = "CartPole-v1", step_s: float = 0.0, stamp: str | None = None, atari: bool = False) -> gym.Env:
    """Make `env_id`, with `step_s` seconds per step, and with `stamp` if given; with `atari`, as `make_atari` does."""
    env = make_atari(env_id) if atari else gym.make(env_id)
    if step_s > 0:
        env = Sleeping(env, step_s)
    return env if stamp is None else Stamping(env, stamp)


def read_stamp(path: Path) -> float | None:
    """Return the time of the first step, in seconds since the epoch; None before it."""
    text = path.read_text() if path.exists() else ""
    return float(text) if text else None
