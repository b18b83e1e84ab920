"""Watch the Ray behind a run: whether it is alive, and how many actors there is room for while nodes come and go."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice

from dppo.cluster.ray.capacity import Demand, in_words, room_for
from dppo.errors import ClusterError, counted

PERIOD_S, NODES_S = 0.5, 2.0  # between two checks, and between two looks at the nodes
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
    address: str  # host:port
    patience_s: float  # seconds for which its port may refuse connections before the process counts as dead
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
            self.failing_since = now() if self.failing_since is None else self.failing_since
            patience = self.patience_s if error.errno in NOBODY_LISTENS else max(SILENT_S, self.patience_s)
            reason = "it does not answer" if silent else error.strerror or str(error)
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
                if (reason := endpoint.look()) is not None and not self._stop.is_set():
                    self._lost = (
                        f"{endpoint.name} at {endpoint.address} is lost ({reason}), and the run cannot continue "
                        f"without it. Resume from the last checkpoint (--resume)."
                    )
                    return


Nodes = Mapping[str, Mapping[str, float]]
"""The resources of each node, by its id."""


def usable_nodes() -> Nodes:
    """Return the nodes that are alive, and not announced to leave: by a drain, a preemption notice or SIGTERM."""
    from ray._private.state import state  # ray.nodes() would start a Ray if this one has been shut down

    leaving = state.get_draining_nodes()
    nodes = [node for node in state.node_table() if node["Alive"]]
    return {node["NodeID"]: node["Resources"] for node in nodes if node["NodeID"] not in leaving}


class Room:
    """Decides which actors join and leave: as many as the nodes have room for, between two bounds."""

    def __init__(
        self, demand: Demand, find: Callable[[], Nodes], notify: Callable[[str], None], *, free: int, grows: bool
    ) -> None:
        """Begin with as many actors as fit the nodes that `find` returns; at once there is room for `free` of them.

        If the cluster `grows`, pending actors are requests for nodes, and there are as many as the run can use.
        """
        self._demand, self._find, self._notify, self._grows = demand, find, notify, grows
        self._latest = self._nodes = find()
        self._holds = room_for(self._nodes.values(), demand)
        self.at_first = max(demand.num_actors, min(self._number, free))  # actors at the start; the others join
        self._wanted = list(range(self.at_first))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dppo-node-watch", daemon=True)
        notify(self._in_words(free))

    def start(self) -> None:
        """Look every two seconds from now on, in a thread: a call to Ray's GCS may take long."""
        self._thread.start()

    def look(self) -> None:
        """Look at the nodes once."""
        self._latest = self._find()

    def _watch(self) -> None:
        while not self._stop.wait(NODES_S):
            with suppress(Exception):  # the GCS does not answer; if it is gone, the run ends elsewhere
                self.look()

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join(1)

    def changes(self, homes: Callable[[], Mapping[int, str]]) -> tuple[list[int], list[int]]:
        """Return the ids of the actors that join, and of those that leave, since the last call.

        An actor whose node leaves is returned again until its process has ended. `homes` returns the node of each actor
        with a process, by the id of the actor.
        """
        if self._latest is self._nodes and len(self._wanted) == self._number:
            return [], []
        before, self._nodes, at = self._holds, self._latest, homes()
        self._holds = room_for(self._nodes.values(), self._demand)
        if self._holds != before:
            self._notify(f"the cluster has room for {counted(self._holds, 'actor')} now, {before} before")
        stay = [actor for actor in self._wanted if actor not in at or at[actor] in self._nodes]
        stay.sort(key=lambda actor: actor not in at)  # pending ones leave first
        stay, spare = stay[: self._number], stay[self._number :]
        unused = (actor for actor in count() if actor not in at and actor not in stay)
        joined = list(islice(unused, self._number - len(stay)))
        self._wanted = stay + joined
        return joined, [*spare, *(actor for actor, node in at.items() if node not in self._nodes)]

    @property
    def _number(self) -> int:
        most = self._demand.most_actors
        return most if self._grows else min(most, max(self._demand.num_actors, self._holds))

    def _in_words(self, free: int) -> str:
        nodes, room = counted(len(self._nodes), "node"), counted(self._holds, "actor")
        line = f"the cluster has room for {room} of {in_words(*self._demand.groups)} on {nodes}"
        if free < min(self._holds, self._demand.most_actors):
            line += f", for {free} of them now"
        if self._holds < self._demand.num_actors:
            line += f"; training waits for the {self._demand.num_actors} that num_actors asks for"
        return line + ("; its autoscaler is asked for more nodes" if self._grows else "")
