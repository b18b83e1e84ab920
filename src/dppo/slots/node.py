"""Cores, folders and launchers' daemons on a further node of an environment, for as long as a connection lasts.

An actor of Ray starts the server there (`transports/ray/nodes.py`), and is its owner. Its clients are `NodeLease`, and
the agents of launchers (`guard.py agent`). When a connection is closed, the other node is silent, or the owner has
ended, everything with the mark of the connection is ended.
"""

import hmac
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from typing import Any

from dppo.slots.cores import WAIT_S, Lease, NoCores
from dppo.slots.guard import (
    HELLO_S,
    POLL_S,
    SAVE_S,
    connected,
    end_marked,
    marked_processes,
    send,
    watched,
)
from dppo.slots.layout import Node
from dppo.slots.program import SolverError

MARK = "DPPO_SLOTS"  # variable of all processes of a connection
ENDING_S = 2.0  # longest wait for a process that ends because a node is lost, which is no fault of its environment


class NodeLease:
    """Cores of another node, and a folder there, until it is closed, this process ends, or the node is lost."""

    def __init__(self, node: Node, number: int, mark: str, folder: str = "") -> None:
        """Lease `number` cores; make the folder if it is missing. Raise SolverError if that fails."""
        request = {"secret": node.secret, "cores": number, "mark": mark, "folder": folder}
        with ExitStack() as stack:
            try:
                connection = stack.enter_context(connected(node.address, node.port))
                send(connection, request)
                connection.settimeout(WAIT_S + HELLO_S)
                answer = json.loads(connection.makefile().readline())
            except (OSError, ValueError) as error:
                time.sleep(ENDING_S)
                raise SolverError(f"node {node.host} does not answer: {error}") from None
            if "refused" in answer:
                raise SolverError(f"node {node.host}: {answer['refused']}")
            stack.pop_all()
        self._connection = connection
        self.cores: list[int] = answer["cores"]
        """The ids of the cores."""

    def wait(self) -> None:
        """Wait until the node is lost."""
        self._connection.settimeout(None)
        with suppress(OSError):
            self._connection.recv(1)

    def close(self) -> None:
        self._connection.close()


# ------------------------------------------------------------------ the server


def serve(address: str, secret: str, owner_pid: int) -> None:
    """Serve connections at an address of this node until the owner ends; print the port."""
    server = socket.create_server((address, 0))
    print(server.getsockname()[1], flush=True)
    if os.fork():
        os._exit(0)
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # nothing is left to read for the owner
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    owner = os.pidfd_open(owner_pid)
    while owner not in select.select([server.fileno(), owner], [], [])[0]:
        connection, _ = server.accept()
        if not os.fork():
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            server.close()
            with suppress(OSError, ValueError):  # the other side is gone, or a stranger
                _attend(connection, secret, owner)
            os._exit(0)
        connection.close()


def _attend(connection: socket.socket, secret: str, owner: int) -> None:
    """Serve a connection until its end: lease the cores that its first line asks for, or run the command."""
    watched(connection).settimeout(HELLO_S)
    request = json.loads(connection.makefile().readline())
    if not hmac.compare_digest(request["secret"], secret):
        return
    connection.settimeout(None)
    folder = request["folder"]
    is_made = False
    try:
        lease = Lease(request["cores"])
        if folder and not os.path.isdir(folder):
            os.makedirs(folder)
            is_made = True
    except (NoCores, OSError) as error:
        send(connection, {"refused": str(error)})
        return
    try:
        if "command" in request:
            _run(request, connection, owner)
        else:
            send(connection, {"cores": lease.cores})
            _wait(connection, owner, request["mark"])
    finally:  # the other side may be gone when it is written to
        end_marked(request["mark"])
        if is_made:
            shutil.rmtree(folder, ignore_errors=True)


def _run(request: dict[str, Any], connection: socket.socket, owner: int) -> None:
    """Run a command until it or the connection ends; send its output and, after a zero byte, its exit code."""
    command = subprocess.Popen(
        ["sh", "-c", request["command"]],
        cwd=request["folder"],
        env=request["variables"] | {"DPPO_COMMAND": request["mark"]},
        stdin=subprocess.DEVNULL,
        stdout=connection.fileno(),
        stderr=connection.fileno(),
    )
    select.select([connection.fileno(), owner, os.pidfd_open(command.pid)], [], [])
    code = command.poll()
    if code is not None:
        connection.sendall(b"\0%d" % (code % 256))


def _wait(connection: socket.socket, owner: int, mark: str) -> None:
    """Wait for the end of a connection; if it was closed, also for ranks, which may save their state."""
    ready, _, _ = select.select([connection.fileno(), owner], [], [])
    if owner in ready:
        return
    try:
        connection.recv(1)
    except OSError:  # the other side is silent
        return
    until = time.monotonic() + SAVE_S
    while marked_processes(mark) and time.monotonic() < until:
        time.sleep(POLL_S)


if __name__ == "__main__":
    arguments = json.loads(sys.stdin.readline())
    serve(arguments["address"], arguments["secret"], arguments["owner"])
