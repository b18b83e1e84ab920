"""Session: the exchange of messages with one start of a solver."""

import json
import struct
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from dppo.remote.client import ACT, LOAD, RESET, SAVE, STOP, TERMINATED, TRUNCATED
from dppo.remote.connection import Connection
from dppo.remote.protocol import INFO, REPLY, STATE
from dppo.slots.program import Ending, Program, SolverError

MAX_INFOS = 1000  # entries of `info` in a step
STOP_S = 10.0  # longest wait for a program that writes its files after the reply to stop


class SolverEnded(Exception):
    """The program has ended, or its connection was closed; the message is how, and its last lines."""

    def __init__(self, ending: Ending | None = None) -> None:
        """`ending`: how the program ended; None for a program that was started elsewhere."""
        self.outcome = "(its connection was closed)"
        self.reason = ""
        text = f"{self.outcome}."
        if ending is not None:
            self.outcome = ending.outcome
            self.reason = ending.reason
            text = str(ending)
        super().__init__(text)


class SolverStep(NamedTuple):
    """Data of a step from a solver."""

    obs: np.ndarray
    """The numbers of all parts of the observation, one part after the other."""
    reward: float
    end: int
    info: dict[str, Any]


class Session:
    """A connected solver, which sends the state after a step, waits for a reply, and so on."""

    def __init__(self, connection: Connection, program: Program | None) -> None:
        self.opening = connection.opening
        self._connection = connection
        self._program = program
        byte_order = self.opening.byte_order
        self._reply = struct.Struct(byte_order + REPLY)
        self._state = struct.Struct(byte_order + STATE)
        self._info = struct.Struct(byte_order + INFO)
        self._native = self.opening.dtype.newbyteorder("=")
        count = sum(part.size for part in self.opening.observation)
        buffer = bytearray(self._state.size + count * self.opening.dtype.itemsize)
        self._buffer = memoryview(buffer)
        self._obs = np.frombuffer(buffer, self.opening.dtype, count, self._state.size)
        self._has_begun = False
        self._is_awaited = False  # True while the solver computes

    def reset(self, seed: int, options: dict[str, Any]) -> SolverStep:
        """Begin an episode; raise SolverEnded."""
        self._begin()
        return self._exchange(RESET, json.dumps(options).encode(), seed)

    def _begin(self) -> None:
        if not self._has_begun:
            self._receive()  # the first state, before any episode, has no use
            self._has_begun = True

    def save(self, path: str) -> SolverStep:
        """Let the solver write a restart file or folder; raise SolverEnded."""
        return self._exchange(SAVE, path.encode())

    def load(self, path: str) -> SolverStep:
        """Let the solver go on from a restart file or folder; raise SolverEnded."""
        self._begin()
        return self._exchange(LOAD, path.encode())

    def act(self, action: np.ndarray) -> SolverStep:
        """Make a step with an action of the solver's dtype; raise SolverEnded."""
        return self._exchange(ACT, action.tobytes())

    def _exchange(self, kind: int, data: bytes, seed: int = 0) -> SolverStep:
        """Send a reply of this kind, and receive the next state."""
        with suppress(ConnectionError):  # then nothing can be received either
            self._connection.send(self._reply.pack(kind, len(data), seed) + data)
        return self._receive()

    def _receive(self) -> SolverStep:
        connection = self._connection
        self._is_awaited = True
        try:
            connection.receive_into(self._buffer)
            end, infos, reward = self._state.unpack_from(self._buffer)
            if end > TERMINATED | TRUNCATED or infos > MAX_INFOS:
                raise SolverError(f"the solver handed over end={end} and {infos} infos")
            info = {}
            for _ in range(infos):
                name, number = self._info.unpack(connection.receive(self._info.size))
                info[name.rstrip(b"\0").decode("utf-8", "replace")] = number
        except OSError:
            ending = None if self._program is None else self._program.ending()
            raise SolverEnded(ending) from None
        self._is_awaited = False
        return SolverStep(self._obs.astype(self._native), reward, end, info)

    def close(self, wait_s: float = STOP_S) -> None:
        """Send the reply to stop, wait for the program, and end all processes of its session.

        After an interruption, a solver that still computes would not read the reply in time: it is ended at once.
        """
        if self._has_begun:
            with suppress(OSError):
                self._connection.send(self._reply.pack(STOP, 0, 0))
        self._connection.close()
        if self._program is not None:
            self._program.terminate(0.0 if self._is_awaited else wait_s)
