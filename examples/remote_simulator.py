"""Train with simulators on other machines, over TCP: python remote_simulator.py HOST:PORT[,HOST:PORT...] [STEPS].

On each of those machines, `python remote_server.py PORT` answers; actors run on this side. Environment i of sampler n
uses the address with number n * E + i. If its server goes away, it connects again for a while, then raises; dppo makes
it anew with its next episode. Without an address, two servers are started here.
"""

import json
import socket
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

import gymnasium as gym
import numpy as np

import dppo


class RemoteSimulator(gym.Env[np.ndarray, np.ndarray]):
    """Keep a tank at level 1. Observation [2]: level and outflow. Action [1]: inflow.

    Args:
        addresses: of the servers, "host:port"; as many as there are environments, or each of them is shared.
        envs_per_sampler: E, to number the environments.
        timeout_s: the longest wait for one answer, which also ends if the other machine disappears.
        reconnect_s: how long to try to connect, at the start and in each reset.
    """

    def __init__(
        self,
        addresses: list[str],
        envs_per_sampler: int = 1,
        timeout_s: float = 60.0,
        reconnect_s: float = 30.0,
        *,
        sampler_id: int = 0,  # these two are passed by dppo
        env_index: int = 0,
    ) -> None:
        self.observation_space = gym.spaces.Box(0.0, 10.0, (2,), np.float32)
        self.action_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)
        self.number = sampler_id * envs_per_sampler + env_index
        host, _, port = addresses[self.number % len(addresses)].rpartition(":")
        self._address, self._timeout_s, self._reconnect_s = (
            (host, int(port)),
            timeout_s,
            reconnect_s,
        )
        self._connection = ExitStack()
        self._connect()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict]:
        """Begin an episode whose randomness follows from `seed`; nothing is lost if the connection is made anew."""
        super().reset(seed=seed)
        question = {"reset": int(self.np_random.integers(2**31))}
        try:
            return self._ask(question)[0], {}
        except OSError:
            self._connect()
            return self._ask(question)[0], {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Simulate one step. A lost connection raises: the server has forgotten the episode; dppo begins another."""
        obs, answer = self._ask({"step": float(action[0])})
        return obs, answer["reward"], answer["terminated"], answer["truncated"], {}

    def close(self) -> None:
        """Close the connection, on which the server frees the simulator. Safe to call twice."""
        self._connection.close()

    def _connect(self) -> None:
        self._connection.close()
        deadline = time.monotonic() + self._reconnect_s
        while True:
            try:
                connected = socket.create_connection(self._address, timeout=self._timeout_s)
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
        # small messages: do not wait for more
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = connected.makefile("rw", encoding="utf8")
        self._connection.callback(connected.close)
        self._connection.callback(lambda stream=self._stream: suppress_os_error(stream.close))

    def _ask(self, question: dict[str, Any]) -> tuple[np.ndarray, dict[str, Any]]:
        self._stream.write(json.dumps(question) + "\n")
        self._stream.flush()
        line = self._stream.readline()
        if not line.endswith("\n"):
            raise ConnectionError(
                f"{self._address} closed the connection instead of answering {question}"
            )
        answer = json.loads(line)
        return np.array(answer["obs"], np.float32), answer


def suppress_os_error(close: Any) -> None:
    """Close a stream whose other end may be gone."""
    with suppress(OSError):
        close()


if __name__ == "__main__":
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 20_000
    with ExitStack() as stack:
        if len(sys.argv) > 1:
            addresses = sys.argv[1].split(",")
        else:
            from remote_server import serving

            addresses = [stack.enter_context(serving()) for _ in range(2)]
        config = dppo.Config(
            env_id="remote_simulator:RemoteSimulator",  # actors import it from this folder
            env_kwargs={"addresses": addresses},
            num_samplers=len(addresses),
            num_actors=len(addresses),
            on_env_fault="rebuild",  # from the first step on: connections are lost at any time
            total_timesteps=steps,
        )
        result = dppo.train(config)
    print(f"Mean return after {result.global_step:,} steps: {result.episodic_return:.1f}")
