"""Wrap a simulator that is a program of its own and serves a socket: python socket_simulator.py [STEPS].

`fake_simulator.py` stands in for it. Each environment starts its own, on a port that the simulator chooses.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import dppo

COMMAND = (sys.executable, str(Path(__file__).with_name("fake_simulator.py")))


class SocketSimulator(gym.Env[np.ndarray, np.ndarray]):
    """Keep a tank at level 1. Observation [2]: level and outflow. Action [1]: inflow.

    Args:
        command: starts the simulator, which prints its port as its first line.
        timeout_s: the longest wait for one answer.
    """

    def __init__(self, command: Sequence[str] = COMMAND, timeout_s: float = 60.0) -> None:
        self.observation_space = gym.spaces.Box(0.0, 10.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.timeout_s = timeout_s
        self._command = list(command)
        self._process: subprocess.Popen[str] | None = None
        self._connected: list[Any] = []
        self._start()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Begin an episode whose randomness follows from `seed`."""
        super().reset(seed=seed)
        return self._ask({"reset": int(self.np_random.integers(2**31))})[0], {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Simulate one step."""
        obs, answer = self._ask({"step": float(action[0])})
        return obs, answer["reward"], answer["terminated"], answer["truncated"], {}

    def close(self) -> None:
        """End the simulator: its connection closes, on which it exits; if it does not, kill it. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        for end in self._connected:
            with suppress(OSError):
                end.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def _start(self) -> None:
        # An ordinary child, not start_new_session=True: it has to end with the actor that started it.
        # Nobody reads its standard output after the port: let it log to a file.
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        port = self._process.stdout.readline()
        if not port.strip().isdigit():
            self.close()
            raise RuntimeError(f"{self._command} printed {port!r} instead of its port")
        self._socket = socket.create_connection(("127.0.0.1", int(port)), timeout=self.timeout_s)
        self._stream = self._socket.makefile("rw", encoding="utf8")
        self._connected = [self._stream, self._socket]

    def _ask(self, question: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        self._socket.settimeout(self.timeout_s)
        try:
            self._stream.write(json.dumps(question) + "\n")
            self._stream.flush()
            line = self._stream.readline()
        except TimeoutError:
            raise TimeoutError(
                f"the simulator did not answer {question} within {self.timeout_s:g} s"
            ) from None
        if not line:
            raise ConnectionError(
                f"the simulator closed the connection instead of answering {question}"
            )
        answer = json.loads(line)
        return np.array(answer["obs"], np.float32), answer


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 50_000
    result = dppo.train(dppo.Config(env_id=SocketSimulator, total_timesteps=steps, num_steps=64))
    print(f"Mean return after {result.global_step:,} steps: {result.episodic_return:.1f}")
