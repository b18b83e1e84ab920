"""The TCP connections of this process to other hosts, which Ray's C++ code has opened.

A connection whose other end has given up during an outage is half open: this end waits for an answer that never comes.
Ray itself asks after five minutes whether the other end is still there (its keepalive of gRPC, which servers refuse to
answer more often). The kernel may ask at any time, and its question costs nothing.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

IDLE_S = 5  # time without traffic before the first probe
INTERVAL_S = 5  # between two probes
PROBES = 16  # lost ones that end a connection
OPTIONS = {"TCP_KEEPIDLE": IDLE_S, "TCP_KEEPINTVL": INTERVAL_S, "TCP_KEEPCNT": PROBES}


def probe_all(probed: set[str]) -> set[str]:
    """Let the kernel probe all connections but the `probed` ones; return the names of all.

    One whose other end is gone fails within `IDLE_S` after an outage. Connections within this host are left alone.
    """
    names = set()
    for name, connection in _connections(probed):
        names.add(name)
        if connection is None:
            continue
        with connection, suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in OPTIONS.items():
                if hasattr(socket, option):  # they have other names outside of Linux
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return names


def end_those_to(address: str) -> int:
    """End all connections to `host:port`; return how many there were. Ray opens new ones, and repeats its requests."""
    host, _, port = address.rpartition(":")
    number = 0
    for _, connection in _connections(set()):
        if connection is None:
            continue
        with connection, suppress(OSError):
            if _peer(connection) == (host.strip("[]"), int(port)):
                connection.shutdown(socket.SHUT_RDWR)
                number += 1
    return number


def _connections(probed: set[str]) -> Iterator[tuple[str, socket.socket | None]]:
    """Yield a name and a second handle for each connection of this process to another host; none for `probed` ones."""
    try:
        descriptors = os.listdir("/proc/self/fd")
    except OSError:  # not Linux
        return
    for descriptor in descriptors:
        with suppress(OSError):  # closed meanwhile
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if not name.startswith("socket:"):
                continue
            if name in probed:
                yield name, None
                continue
            connection = socket.socket(fileno=os.dup(int(descriptor)))
            if _is_to_another_host(connection):
                yield name, connection
            else:
                connection.close()
                yield name, None


def _is_to_another_host(connection: socket.socket) -> bool:
    is_ip = connection.family in (socket.AF_INET, socket.AF_INET6)
    if not is_ip or connection.type != socket.SOCK_STREAM:
        return False
    try:
        return _peer(connection)[0] != _plain(connection.getsockname()[0])
    except OSError:  # it is not connected
        return False


def _peer(connection: socket.socket) -> tuple[str, int]:
    host, port = connection.getpeername()[:2]
    return _plain(host), int(port)


def _plain(host: str) -> str:
    return host.removeprefix("::ffff:")
