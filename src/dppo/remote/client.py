"""A solver's side of the protocol in Python: one file that needs nothing but Python 3.8, to be copied anywhere.

    from client import ACT, RESET, STOP, Solver

    solver = Solver("temperature[64]", "heaters[3](0:1)")
    temperature, reward, end = None, 0.0, 0
    while True:
        reply, heaters = solver.step(temperature, reward, end)
        if reply == STOP:
            break
        if reply == RESET:
            temperature, reward, end = initialize(solver.seed), 0.0, 0
        else:
            temperature, reward, end = advance(heaters)

See dppo.h, whose functions do the same.
"""

from __future__ import annotations

import array
import json
import os
import re
import socket
import struct
import time
from typing import Any, Iterable  # noqa: UP035, for Python 3.8

STOP = 0
ACT = 1
RESET = 2
SAVE = 3
LOAD = 4
RUNNING = 0
TERMINATED = 1
TRUNCATED = 2
VERSION = 1
WAIT_S = 60.0  # longest wait until dppo listens, and until it answers


class Solver:
    """The connection with dppo, whose address and secret are in DPPO_ADDRESS and DPPO_SECRET."""

    def __init__(
        self,
        observation: str,
        action: str,
        address: str = "",
        secret: str = "",
        restarts: bool = False,
    ) -> None:
        """Connect. `observation`, `action`: the parts, such as `temperature[64] jets[2](-1:1)`.

        `restarts`: the solver handles SAVE, by writing a file or folder at `path` and calling `step` again with the
        same numbers, and LOAD, by going on from there with the observation that it had then.

        Raise ConnectionError if nothing listens at the address within a minute, or the solver is refused.
        """
        self.seed = 0
        self.options: Any = {}
        """The options of the episode."""
        self.path = ""
        """Path of the last SAVE or LOAD."""
        self._count = _count(observation)
        self._infos: Any = []
        self._socket = _connected(address or os.environ["DPPO_ADDRESS"])
        secret = secret or os.environ["DPPO_SECRET"]
        lines = f"secret={secret}\nbytes=8\nobservation={observation}\naction={action}\n"
        text = (lines + "restart=1\n" * restarts).encode()
        self._socket.settimeout(WAIT_S)
        try:
            self._open(text)
        except OSError:
            self._socket.close()
            raise
        self._socket.settimeout(None)

    def _open(self, text: bytes) -> None:
        self._socket.sendall(struct.pack("<4sII", b"DPPO", VERSION, len(text)) + text)
        magic, _, length = struct.unpack("<4sII", self._receive(12))
        if magic != b"DPPO":
            raise ConnectionError("it is not dppo that listens there")
        if length:
            raise ConnectionError(f"refused: {self._receive(length).decode()}")

    def step(
        self, observation: Iterable[float] | None, reward: float = 0.0, end: int = RUNNING
    ) -> tuple[int, Any]:
        """Hand over observation (numbers in a row, None at first), reward and end; return reply and action.

        The action is an array of floats with ACT, otherwise None. If dppo has ended, the reply is STOP.
        """
        numbers = array.array("d", [0.0] * self._count if observation is None else observation)
        if len(numbers) != self._count:
            raise ValueError(f"the observation holds {len(numbers)} numbers, not {self._count}")
        infos = [struct.pack("<32sd", name.encode(), value) for name, value in self._infos]
        self._infos.clear()
        state = struct.pack("<IId", end, len(infos), reward)
        try:
            self._socket.sendall(b"".join([state, _little(numbers).tobytes(), *infos]))
            reply, size, seed = struct.unpack("<IIQ", self._receive(16))
            content = self._receive(size)
        except ConnectionError:
            return STOP, None
        if reply == ACT:
            action = array.array("d")
            action.frombytes(content)
            return ACT, _little(action)
        if reply == RESET:
            self.seed = seed
            self.options = json.loads(content)
        if reply in (SAVE, LOAD):
            self.path = content.decode()
        return reply, None

    def info(self, name: str, value: float) -> None:
        """Add a number to the `info` of the next step."""
        self._infos.append((name, value))

    def close(self) -> None:
        self._socket.close()

    def _receive(self, size: int) -> bytes:
        content = b""
        while len(content) < size:
            piece = self._socket.recv(size - len(content))
            if not piece:
                raise ConnectionError("dppo has closed the connection")
            content += piece
        return content


def _count(parts: str) -> int:
    total = 0
    for part in parts.split():
        size = 1
        for length in re.findall(r"[0-9]+", re.sub(r"^[^\[(]*(\[([0-9,]+)\])?.*", r"\2", part)):
            size *= int(length)
        total += size
    return total


def _little(numbers: Any) -> Any:
    """Swap the bytes where the machine's order is another one; messages of this file are little-endian."""
    if struct.pack("=I", 1) != struct.pack("<I", 1):
        numbers.byteswap()
    return numbers


def _connected(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    until = time.monotonic() + WAIT_S
    while True:
        try:
            if kind == "unix":
                connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                connected.connect(place)
            else:
                host, _, port = place.rpartition(":")
                connected = socket.create_connection((host, int(port)), WAIT_S)
                connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return connected
        except OSError as error:
            if time.monotonic() > until:
                raise ConnectionError(f"nothing listens at {address} ({error})") from None
            time.sleep(0.1)
