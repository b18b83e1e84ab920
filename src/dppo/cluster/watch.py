"""ClusterWatch: notice within seconds that the Ray behind a run has died."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dppo.errors import ClusterError

PERIOD_S = 0.5  # between two looks
CONNECT_S = 2.0  # longest wait for one connection
SILENT_S = 15.0  # a machine that cannot be reached for so long is lost
NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ECONNRESET)
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ETIMEDOUT)


@dataclass(slots=True)
class Endpoint:
    """A process of Ray that a run cannot go on without."""

    name: str
    host: str
    port: int
    patience_s: float
    """How long its port may refuse connections before the process counts as dead."""
    failing_since: float | None = None

    def look(self, now: Callable[[], float] = time.monotonic) -> str | None:
        """Connect once; return why the process counts as lost, None while it does not."""
        try:
            socket.create_connection((self.host, self.port), timeout=CONNECT_S).close()
        except TimeoutError:
            patience, reason = max(SILENT_S, self.patience_s), "it does not answer"
        except OSError as error:
            if error.errno not in NOBODY_LISTENS + UNREACHABLE:
                return None  # this process has no file descriptor left, say: that proves nothing
            patience = self.patience_s if error.errno in NOBODY_LISTENS else max(SILENT_S, self.patience_s)
            reason = error.strerror or str(error)
        else:
            self.failing_since = None
            return None
        if self.failing_since is None:
            self.failing_since = now()
        return reason if now() - self.failing_since >= patience else None


class ClusterWatch:
    """Looks twice a second, in a thread of its own, whether Ray's processes accept connections.

    Ray itself reports nothing: it ends the process a minute after its GCS has gone, and waits without limit after
    the local raylet has; or at once, when this process next touches the raylet's object store. So look before that. A
    process that is stopped but not dead is not noticed.
    """

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints
        self._lost: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="dppo-cluster-watch", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise `ClusterError` if a process of Ray is lost. Costs next to nothing; call it at each tick of a wait."""
        if self._lost is not None:
            raise ClusterError(self._lost)

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()

    def _look(self) -> None:
        while not self._stop.wait(PERIOD_S):
            for endpoint in self._endpoints:
                reason = endpoint.look()
                if reason is not None and not self._stop.is_set():
                    self._lost = (
                        f"{endpoint.name} at {endpoint.host}:{endpoint.port} is lost ({reason}), and the run cannot go "
                        f"on without it. Go on from the last checkpoint with --resume."
                    )
                    return


def endpoint(name: str, address: str, patience_s: float) -> Endpoint:
    """Make the endpoint at `host:port`."""
    host, _, port = address.rpartition(":")
    return Endpoint(name, host.strip("[]"), int(port), patience_s)
