"""Simulators that change state of the whole process: at their import, in a constructor, a reset or a step.

Their own arithmetic is exact, so that it is the same however the CPU rounds.
"""

from __future__ import annotations

import ctypes
import gc
import io
import locale
import logging
import logging.config
import os
import random
import signal
import socket
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


def _round_up() -> None:
    ctypes.CDLL(None).fesetround(0x800)  # FE_UPWARD on x86


def _torch(change: Callable[[Any], Any]) -> Callable[[], None]:
    def disturb() -> None:
        import torch

        change(torch)

    return disturb


def _reseed() -> None:
    np.random.seed(1)
    random.seed(1)


def _replace_streams() -> None:
    sys.stdout = sys.stderr = io.StringIO()


def _forget_temporary_folder() -> None:
    tempfile.tempdir = None
    folder = tempfile.mkdtemp()
    os.rmdir(folder)
    tempfile.tempdir = folder


def _configure_logging() -> None:
    # which disables all others
    logging.config.dictConfig({"version": 1, "root": {"level": "WARNING"}})
    logging.disable(logging.CRITICAL)


DISTURB: dict[str, Callable[[], Any]] = {
    "seterr": lambda: np.seterr(all="raise"),
    "bufsize": lambda: np.setbufsize(16),
    "round": _round_up,
    "flush": _torch(lambda torch: torch.set_flush_denormal(True)),
    "grad": _torch(lambda torch: torch.set_grad_enabled(False)),
    "one_dnn": _torch(lambda torch: setattr(torch.backends.mkldnn, "enabled", False)),
    "dtype": _torch(lambda torch: torch.set_default_dtype(torch.float64)),
    "deterministic": _torch(lambda torch: torch.use_deterministic_algorithms(True)),
    "threads": _torch(lambda torch: torch.set_num_threads(3)),
    "precision": _torch(lambda torch: torch.set_float32_matmul_precision("medium")),
    "torch_seed": _torch(lambda torch: torch.manual_seed(1)),
    "logging": _configure_logging,
    "streams": _replace_streams,
    "warnings": lambda: warnings.filterwarnings("error"),
    "umask": lambda: os.umask(0o777),
    "recursion": lambda: sys.setrecursionlimit(len(__import__("inspect").stack()) + 60),
    "folder": lambda: os.chdir("/"),
    "argv": lambda: sys.argv.__setitem__(slice(1, None), []),
    "handlers": lambda: [
        signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)
    ],
    "environ": os.environ.clear,
    "locale": lambda: locale.setlocale(locale.LC_ALL, ""),
    "gc": gc.disable,
    "tempfile": _forget_temporary_folder,
    "sockets": lambda: socket.setdefaulttimeout(0.01),
    "seeds": _reseed,
}


def disturb(names: str) -> None:
    """Change these states, several with commas."""
    for name in filter(None, names.split(",")):
        DISTURB[name]()


class Disturbing(gym.Env[Any, Any]):
    """Counts, and changes the states `names`; `when` is make, reset or step; in every 5th step."""

    action_space = Discrete(2)

    def __init__(
        self, names: str = "", when: str = "make", *, image: bool = False, unit: float = 1.0
    ) -> None:
        self.observation_space = (
            Box(0, 255, (36, 36, 1), np.uint8) if image else Box(-8, 8, (3,), np.float32)
        )
        self._names = names
        self._when = when
        self._image = image
        self._unit = unit
        self._disturb_in("make")

    def _disturb_in(self, place: str) -> None:
        if self._when == place:
            disturb(self._names)

    def _seen(self) -> np.ndarray:
        if self._image:
            return np.full((36, 36, 1), (self._state >> 8) % 256, np.uint8)
        return np.array([(self._state >> shift) % 64 / 8 - 4 for shift in (0, 6, 12)], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self._state = (seed or 0) % 65521
        self._steps = 0
        self._disturb_in("reset")
        return self._seen(), {}

    def step(self, action: Any) -> Any:
        self._state = (self._state * 75 + 74 + int(action)) % 65537
        self._steps += 1
        if self._steps % 5 == 0:
            self._disturb_in("step")
        return self._seen(), (self._state % 16 / 8 - 1) * self._unit, self._steps >= 12, False, {}


disturb(os.environ.get("DISTURB_AT_IMPORT", ""))
