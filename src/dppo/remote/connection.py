"""Connect with a solver: an address at which it is awaited, its opening, and messages with deadlines."""

import hmac
import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dppo.log import logger
from dppo.remote.protocol import (
    MAX_TEXT,
    OPENING,
    Opening,
    answer_message,
    byte_order_of,
    opening_of,
)
from dppo.slots.program import SolverError

MAX_UNIX_PATH = 100  # the kernel's limit is 108 bytes
OPENING_S = 10.0  # longest wait for the opening of a program that has connected
POLL_S = 0.2  # between two looks at the program, while it is awaited


class Listener:
    """An address at which one solver is awaited."""

    def __init__(self, address: str, secret: str) -> None:
        """Listen at `unix:PATH` or `tcp:HOST:PORT`; port 0 is any free port. Raise SolverError if that fails."""
        kind, _, place = address.partition(":")
        host, _, port = place.rpartition(":")
        if kind not in ("unix", "tcp") or (kind == "tcp" and not port.isdecimal()):
            raise SolverError(f"address={address}: is neither unix:PATH nor tcp:HOST:PORT")
        self.secret = secret
        self.address = address
        self._path = Path(place) if kind == "unix" else None
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)  # left by a killed process
                self._socket = socket.create_server(place, family=socket.AF_UNIX)
            else:
                self._socket = socket.create_server((host, int(port)))
                self.address = f"tcp:{host}:{self._socket.getsockname()[1]}"
        except OSError as error:
            raise SolverError(f"cannot listen at {address}: {error.strerror or error}") from None

    def accept(self, timeout_s: float, check: Callable[[], None]) -> "Connection":
        """Return the connection of the first solver with the secret.

        Programs without it are refused, and logged. `check` raises if the solver has ended; it is called five times
        a second. Raise SolverError after `timeout_s`, or if the opening is refused.
        """
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            check()
            ready, _, _ = select.select([self._socket], [], [], POLL_S)
            if not ready:
                continue
            accepted, _ = self._socket.accept()
            opening = self._opening(accepted)
            if opening is not None:
                accepted.settimeout(None)
                return Connection(accepted, opening)
        raise SolverError(
            f"no solver has connected to {self.address} within {timeout_s:g} s. Does it call dppo_open? Is it "
            f"started with this DPPO_ADDRESS and DPPO_SECRET?"
        )

    def refuse_others(self) -> None:
        """Refuse the programs that have connected since the solver did."""
        while select.select([self._socket], [], [], 0)[0]:
            accepted, _ = self._socket.accept()
            accepted.settimeout(OPENING_S)
            self._refuse(
                accepted,
                "<",
                f"another solver is connected to {self.address}; of several ranks, only rank 0 connects",
            )

    def _opening(self, accepted: socket.socket) -> Opening | None:
        """Return the opening, None if it has not the secret or does not arrive; raise SolverError if it is invalid."""
        accepted.settimeout(OPENING_S)
        byte_order = "<"
        try:
            header = _receive(accepted, struct.calcsize(f"={OPENING}"))
            byte_order = byte_order_of(header)
            length = struct.unpack(f"{byte_order}{OPENING}", header)[2]
            if length > MAX_TEXT:
                raise SolverError(f"sent an opening of {length:,} bytes")
            secret, opening = opening_of(byte_order, _receive(accepted, length))
        except OSError:
            self._refuse(accepted, byte_order, "its opening did not arrive")
            return None
        except SolverError as error:
            self._refuse(accepted, byte_order, f"it {error}")
            raise SolverError(f"the solver at {self.address} {error}") from None
        if not hmac.compare_digest(secret.encode(), self.secret.encode()):
            self._refuse(accepted, byte_order, "its DPPO_SECRET is another one")
            return None
        accepted.sendall(answer_message(byte_order))
        return opening

    def _refuse(self, accepted: socket.socket, byte_order: str, reason: str) -> None:
        logger.warning("a program that connected to %s was refused: %s", self.address, reason)
        with suppress(OSError):
            accepted.sendall(answer_message(byte_order, reason))
        accepted.close()

    def close(self) -> None:
        self._socket.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


class Connection:
    """The connection with a solver whose opening was accepted."""

    def __init__(self, connected: socket.socket, opening: Opening) -> None:
        self.opening = opening
        self._socket = connected
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def send(self, message: bytes | bytearray) -> None:
        self._socket.sendall(message)

    def receive_into(self, buffer: memoryview) -> None:
        _fill(self._socket, buffer)

    def receive(self, size: int) -> bytes:
        return _receive(self._socket, size)

    def close(self) -> None:
        self._socket.close()


def _receive(connected: socket.socket, size: int) -> bytes:
    content = bytearray(size)
    _fill(connected, memoryview(content))
    return bytes(content)


def _fill(connected: socket.socket, buffer: memoryview) -> None:
    """Receive exactly as many bytes; raise ConnectionResetError if the other side has closed, or TimeoutError."""
    received = 0
    while received < len(buffer):
        count = connected.recv_into(buffer[received:])
        if not count:
            raise ConnectionResetError("closed")
        received += count
