"""Environments that need one of few licences, which a child process gives back late; they note when they are made."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.wrappers import TimeLimit


class Licensed(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that locks one of the files 0, 1, ... in `folder`, and raises if all are locked.

    With `child`, a child holds the lock, too, and so keeps the licence when the process of the environment dies.
    """

    def __init__(
        self, folder: str, licences: int = 1000, child: bool = False, sleep_s: float = 0.0
    ) -> None:
        with (Path(folder) / "made").open("a") as log:
            log.write(f"{time.time()}\n")
        self._file = next(
            (file for number in range(licences) if (file := locked(Path(folder) / str(number)))), -1
        )
        if self._file == -1:
            raise ConnectionError("all licences are in use")
        self._child = subprocess.Popen(["sleep", "100"], pass_fds=[self._file]) if child else None
        self._sleep_s = sleep_s
        super().__init__(TimeLimit(CartPoleEnv(), 50))

    def step(self, action: Any) -> Any:
        time.sleep(self._sleep_s)
        return self.env.step(action)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        os.close(self._file)


def locked(path: Path) -> int:
    """Return the descriptor of a file that this process has locked, 0 if another one has."""
    file = os.open(path, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return 0
    return file
