"""ClusterWatch: detect within seconds that the Ray behind a run has died."""

import errno
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from dppo.errors import ClusterError

PERIOD_S = 0.5  # between two checks
CONNECT_S = 2.0  # longest wait for one connection
SILENT_S = 15.0  # a machine that is unreachable for longer is lost
NOBODY_LISTENS = (errno.ECONNREFUSED, errno.ECONNRESET)
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def connect(address: str, timeout_s: float) -> None:
    """Connect to `host:port` once; raise `OSError` if that fails."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s).close()


@dataclass(slots=True)
class Endpoint:
    """A process of Ray that a run depends on."""

    name: str
    address: str
    """Host and port, as `host:port`."""
    patience_s: float
    """Seconds for which its port may refuse connections before the process counts as dead."""
    failing_since: float | None = None

    def look(self, now: Callable[[], float] = time.monotonic) -> str | None:
        """Connect once; return the reason if the process counts as lost, else None."""
        try:
            connect(self.address, CONNECT_S)
            self.failing_since = None
            return None
        except OSError as error:
            silent = isinstance(error, TimeoutError)
            if not silent and error.errno not in NOBODY_LISTENS + UNREACHABLE:
                return None  # a problem of this process, such as no free file descriptor
            patience = self.patience_s if error.errno in NOBODY_LISTENS else max(SILENT_S, self.patience_s)
            reason = "it does not answer" if silent else error.strerror or str(error)
        if self.failing_since is None:
            self.failing_since = now()
        return reason if now() - self.failing_since >= patience else None


class ClusterWatch:
    """Checks twice a second, in its own thread, that Ray's processes accept connections.

    Ray itself raises nothing: it ends this process a minute after the GCS died. After the local raylet died it waits
    without limit, or ends this process at the next access to the object store. A process that is stopped (SIGSTOP) but
    not dead is not detected: the kernel still accepts connections for it.
    """

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self._endpoints = endpoints
        self._lost: str | None = None
        self._stop = threading.Event()
        threading.Thread(target=self._look, name="dppo-cluster-watch", daemon=True).start()

    def check(self) -> None:
        """Raise `ClusterError` if a process of Ray is lost. Cheap enough for each tick of a wait."""
        if self._lost is not None:
            raise ClusterError(self._lost)

    def close(self) -> None:
        """Stop checking."""
        self._stop.set()

    def _look(self) -> None:
        while not self._stop.wait(PERIOD_S):
            for endpoint in self._endpoints:
                reason = endpoint.look()
                if reason is not None and not self._stop.is_set():
                    self._lost = (
                        f"{endpoint.name} at {endpoint.address} is lost ({reason}), and the run cannot continue "
                        f"without it. Resume from the last checkpoint (--resume)."
                    )
                    return
