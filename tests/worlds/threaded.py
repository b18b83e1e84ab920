"""Environments that need threads: they wait for each other, or insist on being called by one thread alone."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np

from worlds.episodic import Hashed

meeting = threading.Barrier(1)  # in the step of one environment of each sampler; tests set how many
resetting = threading.Event()
stepped = threading.Event()


class Threaded(Hashed):
    """Episodes of 7 steps that only the thread of the constructor may play.

    With `wait`, "step" or "reset", environments of two samplers meet in each step; or each reset but the first of one
    ends only when another one has made a step, and the first step of an episode waits for such a reset to begin. With
    `hang`, each reset but the first of an environment hangs.
    """

    made = 0
    """Steps of all environments since a test set it to zero."""

    def __init__(self, wait: str = "", hang: bool = False) -> None:
        self._wait = wait
        self._hang = hang
        self._thread = threading.get_ident()
        self._ready = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._check()
        if self._hang and self._ready:
            time.sleep(3600)
        if self._wait == "reset" and self._ready:
            resetting.set()
            assert stepped.wait(20), "no other environment makes steps meanwhile"
            stepped.clear()
        self._ready = True
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        self._check()
        if self._wait == "step":
            meeting.wait(20)
        if self._wait == "reset" and self.steps == 0 and Threaded.made > 0:
            assert resetting.wait(20), "no other environment is reset meanwhile"
            resetting.clear()
            stepped.set()
        Threaded.made += 1
        return super().step(action)

    def new_length(self) -> int:
        return 7

    def action_masks(self) -> np.ndarray:
        self._check()
        return np.array([True, self.state % 3 > 0])

    def close(self) -> None:
        self._check()

    def _check(self) -> None:
        assert threading.get_ident() == self._thread, (
            "called by another thread than the constructor"
        )
