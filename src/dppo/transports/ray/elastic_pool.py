"""ElasticPool: how many actors there is room for while nodes come and go."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import count, islice
from threading import Event

from dppo.errors import counted
from dppo.transports.ray.calls import RayThread, calls_ray
from dppo.transports.ray.capacity import Demand, actor_in_words, has_place, room_for

NODES_S = 2.0  # between two looks at the nodes

Nodes = Mapping[str, Mapping[str, float]]
"""The resources of each node, by its id."""


@calls_ray
def usable_nodes() -> Nodes:
    """Return the nodes that are alive, and not announced to leave: by a drain, a preemption notice or SIGTERM."""
    # ray.nodes() would start a Ray if this one has been shut down
    from ray._private.state import state

    leaving = state.get_draining_nodes()
    nodes = [node for node in state.node_table() if node["Alive"]]
    return {node["NodeID"]: node["Resources"] for node in nodes if node["NodeID"] not in leaving}


class ElasticPool:
    """Decides which actors join and leave: as many as the nodes have room for, between two bounds."""

    def __init__(
        self,
        demand: Demand,
        find_nodes: Callable[[], Nodes],
        notify: Callable[[str], None],
        *,
        num_free: int,
        grows: bool,
    ) -> None:
        """Begin with as many actors as fit the nodes of `find_nodes`; at once there is room for `num_free` of them.

        If the cluster `grows`, pending actors are requests for nodes, and there are as many as the run can use.
        """
        self._demand = demand
        self._find_nodes = find_nodes
        self._notify = notify
        self._grows = grows
        self._nodes = find_nodes()
        self._latest = self._nodes
        self._room = room_for(self._nodes.values(), demand)
        self.num_at_start = max(demand.num_actors, min(self._num_wanted, num_free))
        """Actors at the start; the others join."""
        self._wanted = list(range(self.num_at_start))
        self._stop = Event()
        self._thread = RayThread(self._watch, "dppo-node-watch")
        notify(self._describe(num_free))

    def start(self) -> None:
        """Look every two seconds from now on, in a thread: a call to Ray's GCS may take long."""
        self._thread.start()

    def look(self) -> None:
        """Look at the nodes once."""
        self._latest = self._find_nodes()

    def _watch(self) -> None:
        while not self._stop.wait(NODES_S):
            # the GCS does not answer; if it is gone, the run ends elsewhere
            with suppress(Exception):
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
        if self._latest is self._nodes and len(self._wanted) == self._num_wanted:
            return [], []
        room_before = self._room
        self._nodes = self._latest
        node_of = homes()
        self._room = room_for(self._nodes.values(), self._demand)
        if self._room != room_before:
            self._notify(
                f"the cluster has room for {counted(self._room, 'actor')} now, {room_before} before"
            )
        able = [
            actor for actor in self._wanted if actor not in node_of or node_of[actor] in self._nodes
        ]
        able.sort(key=lambda actor: actor not in node_of)  # pending ones leave first
        stay = able[: self._num_wanted]
        spare = able[self._num_wanted :]
        unused = (actor for actor in count() if actor not in node_of and actor not in stay)
        joined = list(islice(unused, self._num_wanted - len(stay)))
        self._wanted = stay + joined
        on_leaving_nodes = [actor for actor, node in node_of.items() if node not in self._nodes]
        return joined, [*spare, *on_leaving_nodes]

    @property
    def _num_wanted(self) -> int:
        most = self._demand.most_actors
        if self._grows:
            return most
        return min(most, max(self._demand.num_actors, self._room))

    def _describe(self, num_free: int) -> str:
        # a head without CPUs, and a node without a licence, take no actor
        hosts = [node for node in self._nodes.values() if has_place(node, self._demand)]
        nodes = counted(len(hosts or self._nodes), "node")
        room = counted(self._room, "actor")
        line = f"the cluster has room for {room} of {actor_in_words(self._demand)} on {nodes}"
        if num_free < min(self._room, self._demand.most_actors):
            line += f", for {num_free} of them now"
        if self._room < self._demand.num_actors:
            line += f"; training waits for the {self._demand.num_actors} that num_actors asks for"
        if self._grows:
            line += "; its autoscaler is asked for more nodes"
        return line
