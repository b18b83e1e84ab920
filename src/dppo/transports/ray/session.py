"""Connect to a Ray cluster, or start Ray here: the only module with settings of Ray."""

import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from dppo.config.parts import Actors, Learners
from dppo.errors import ClusterError, ConfigError, counted
from dppo.log import logger
from dppo.machine import file_size_limits, file_size_remedy
from dppo.signals import leave_at_exit
from dppo.transports.ray import capacity, environment
from dppo.transports.ray.calls import RayCalls, calls_ray
from dppo.transports.ray.capacity import PER_NODE, Demand
from dppo.transports.ray.clock import RunClock
from dppo.transports.ray.connecting import (
    check_answers,
    check_connected,
    connect,
    is_connected,
    wanted_cluster,
)
from dppo.transports.ray.elastic_pool import ElasticPool, usable_nodes
from dppo.transports.ray.folder import ray_folder, usable_folder
from dppo.transports.ray.freezing import FreezeGuard
from dppo.transports.ray.watch import START_AGAIN, ClusterWatch, Endpoint, silences_in
from dppo.user_code import in_a_line

T = TypeVar("T")

MIB = 2**20
SMALLEST_STORE = 80 * MIB  # Ray refuses less than 75 MiB
# bytes of the object store per env step of a batch: enough for two batches of images
STORE_PER_STEP = 64 * 1024
COPIES = 8  # copies of the weights in the object store at a time: sent to actors, and twice with the optimizer's state
STORE_LIMITS = 256 * MIB, 4096 * MIB  # bytes for the batch
FULL_DISK = 0.95  # Ray creates no objects if the disk to which it spills is fuller
CLOSE_S = 10.0  # longest wait until Ray has disconnected or stopped
GCS_RESTART_S = 15.0  # a cluster may be configured to restart its GCS; a Ray started here is not


@dataclass(frozen=True, slots=True)
class RayLink:
    """The access of one part of a run to Ray."""

    calls: RayCalls
    """Makes its calls, in a thread of its own."""
    node_id: str
    """Id of the node of this process."""
    clock: RunClock
    """The time by which actors and learners are late."""
    watch: ClusterWatch
    options: Mapping[str, Any] = field(default_factory=dict)
    """Ray's options of its processes."""


def link_of_its_own(name: str) -> RayLink:
    """Return access to the connected Ray without a session, and without a watch over Ray's processes.

    Its clock beats until this process ends.
    """
    clock = RunClock()
    clock.start()  # else it would stand still, and no silent process would be late
    return RayLink(RayCalls(name), "", clock, ClusterWatch(logger.warning, clock))


class RaySession:
    """A connection to Ray. `close` ends only a connection, or a Ray, that this session has opened.

    All of its calls into Ray are made in a thread of their own, so that none can keep this process from ending.
    """

    def __init__(
        self,
        actors: Actors,
        demand: Demand,
        *,
        store_bytes: int,
        notify: Callable[[str], None],
        check: Callable[[], None] = lambda: None,
        env_threads: bool = False,
    ) -> None:
        """Connect to Ray, or start it with an object store of `store_bytes`; check the room for `demand`.

        `check` is called twice a second meanwhile, and may raise.

        Raise ClusterError if Ray cannot be reached or started, and ConfigError if the cluster or this machine has no
        room for the processes, or another Ray is in use already.
        """
        self._ours = not is_connected()
        source = "address"
        cluster = actors.address
        if self._ours:
            environment.check_encoding()
            source, cluster = wanted_cluster(actors.address)
        self.started_here = self._ours and cluster is None
        self.clock = RunClock()
        self._watch = ClusterWatch(notify, self.clock, started_here=self.started_here)
        self._watch.is_starting = True
        self._check_waiting = check
        self._all_calls: list[RayCalls] = []
        self.pool: ElasticPool | None = None  # nodes of actors that join and leave
        self.options: dict[str, Any] = {}  # Ray's options of its processes
        if self._ours:
            environment.set_environment(
                start_here=self.started_here, dashboard=actors.dashboard, env_threads=env_threads
            )
        import ray

        self._ray: Any = ray
        self.clock.start()
        self._calls = self._new_calls("session")
        try:
            if self.started_here:

                def noted(text: str) -> None:
                    notify(text)
                    self._calls.heard()  # a second try has its own time

                start = partial(_start, ray, demand, store_bytes, actors.dashboard, noted)
                with environment.signal_handlers_kept():
                    demand = self._call(start, "starting Ray")
            else:
                self._connect(source, cluster, actors.dashboard)
            self.demand = self._look_at_nodes(demand, notify)
            """The processes at the start."""
            self._watch.is_starting = False
        except BaseException:
            self.close()
            raise

    def _connect(self, source: str, cluster: str | None, dashboard: bool) -> None:
        """Connect to a cluster; if this process is connected already, check that it is the same cluster."""
        if not self._ours:
            check_connected(self._ray, cluster, dashboard)
            return
        assert cluster is not None
        check_answers(source, cluster, dashboard)
        action = "connecting to the cluster"
        with environment.signal_handlers_kept(), FreezeGuard(*silences_in(action)) as guard:

            def check() -> None:
                guard.beat()
                self._check()

            self._calls.call(partial(connect, self._ray, source, cluster), action, check)

    def _look_at_nodes(self, demand: Demand, notify: Callable[[str], None]) -> Demand:
        """Watch Ray's processes from now on; check that there is room, or follow how much there is.

        Return the processes to start with.
        """
        action = "looking at the nodes"
        endpoints = partial(_endpoints, self._ray, started_here=self.started_here)
        self._watch.add_endpoints(self._call(endpoints, action))
        self.node_id: str = self._call(partial(_node_id, self._ray), action)
        if self.started_here:
            return demand
        if demand.node_counts != (1,):
            nodes = self._call(usable_nodes, action).values()
            demand = capacity.across_nodes(demand, nodes)
        if not demand.most_actors:
            self._call(partial(capacity.check_cluster, self._ray, demand, notify), action)
            return demand
        self.pool = self._call(partial(_pool, self._ray, demand, notify), action)
        self.pool.start()
        return replace(demand, num_actors=self.pool.num_at_start)

    def _call(self, function: Callable[[], T], action: str) -> T:
        return self._calls.call(function, action, self._check)

    def _check(self) -> None:
        self._watch.check()
        self._check_waiting()

    def check(self) -> None:
        """Raise `ClusterError` if Ray is lost, or has not answered for too long; log a long wait."""
        self._watch.check()

    def link(self, name: str) -> RayLink:
        return RayLink(self._new_calls(name), self.node_id, self.clock, self._watch, self.options)

    def _new_calls(self, name: str) -> RayCalls:
        calls = RayCalls(name, self.clock.awake)
        self._all_calls.append(calls)
        self._watch.add_calls(calls)
        return calls

    def close(self) -> None:
        """Disconnect; stop Ray if it was started here. If Ray does not answer, leave it: see `leave_at_exit`."""
        self._watch.close()
        if self.pool is not None:
            self.pool.close()
        if self._ours:
            self._calls.post(self._ray.shutdown, "disconnecting")
        deadline = time.monotonic() + CLOSE_S
        for calls in reversed(self._all_calls):
            if not calls.close(max(0.0, deadline - time.monotonic())):
                leave_at_exit("Ray")
        environment.reinstall_handlers()
        self.clock.close()
        if self._ours:
            environment.forget_private_token()


@calls_ray
def _node_id(ray: Any) -> str:
    return str(ray.get_runtime_context().get_node_id())


@calls_ray
def _pool(ray: Any, demand: Demand, notify: Callable[[str], None]) -> ElasticPool:
    num_free = capacity.free_room(demand)
    grows = capacity.has_autoscaler(ray)
    return ElasticPool(demand, usable_nodes, notify, num_free=num_free, grows=grows)


def demand_of(actors: Actors, learners: Learners, evaluators: int = 0) -> Demand:
    """Return the processes of these settings, and the resources that each takes from Ray."""
    fewest, most = actors.actor_bounds
    actor_resources = {"CPU": actors.cpus_per_actor}
    if actors.actor_gpus:
        actor_resources["GPU"] = actors.actor_gpus
    if actors.actors_per_node:  # Ray counts in units of 0.0001
        actor_resources[PER_NODE] = 10_000 // actors.actors_per_node / 10_000
    first, *alternatives = [actor_resources | group for group in actors.resource_groups]
    learner_resources = {"CPU": learners.learner_cpus, "GPU": learners.learner_gpus}
    elastic = most if actors.elastic else 0
    demand = Demand(
        fewest,
        first,
        learners.num_learners,
        learner_resources,
        elastic,
        tuple(alternatives),
        evaluators,
    )
    if not actors.layout.cores:
        return demand
    samplers = actors.samplers_per_actor or 0
    return replace(demand, samplers_with_cores=samplers, node_counts=actors.node_counts)


def store_bytes_for(batch_size: int, num_parameters: int) -> int:
    """Return the bytes that weights and segments in flight take in the object store."""
    low, high = STORE_LIMITS
    return min(high, max(low, batch_size * STORE_PER_STEP) + COPIES * 4 * num_parameters)


@calls_ray
def _endpoints(ray: Any, *, started_here: bool) -> list[Endpoint]:
    """Return the processes that Ray depends on: the GCS of the head, and the raylet of this node."""
    context = ray.get_runtime_context()
    restart_s = 0.0
    if not started_here:
        restart_s = GCS_RESTART_S
    endpoints = [Endpoint("Ray's GCS", context.gcs_address, restart_s)]
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            address = f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"
            endpoints.append(Endpoint("the raylet", address, 0.0))
    return endpoints


def _start(
    ray: Any, demand: Demand, store_bytes: int, dashboard: bool, notify: Callable[[str], None]
) -> Demand:
    gpus = 0
    if demand.total().get("GPU"):
        gpus = capacity.gpus_here()
    if demand.most_actors:
        demand = capacity.fitted_here(demand, gpus, notify)
    capacity.check_here(demand, gpus)
    resources = demand.total()
    resources.pop("GPU", None)
    store_bytes = store_size(store_bytes, notify)
    _check_file_size(store_bytes)
    options = {
        "num_cpus": max(1, math.ceil(resources.pop("CPU"))),
        "num_gpus": gpus,
        # Ray takes whole numbers of other resources
        "resources": {name: math.ceil(amount) for name, amount in resources.items()} or None,
        "object_store_memory": store_bytes,
        "include_dashboard": dashboard,
    }
    with usable_folder(notify):
        _start_processes(ray, options, notify)
    if not dashboard:
        # autoscaler and forwarder of logs: 45 MB each, and nothing to do here
        with suppress(AttributeError):
            ray._private.worker._global_node.kill_monitor(check_alive=False)
            ray._private.worker._global_node.kill_log_monitor(check_alive=False)
    return demand


def _check_file_size(store_bytes: int) -> None:
    """Raise ConfigError if Ray may not write the file of its object store: the system would end it in silence."""
    limits = file_size_limits()
    if limits is not None and limits[0] < store_bytes + MIB:
        raise ConfigError(
            f"num_actors: Ray cannot start, as its object store is a file of {store_bytes:,} bytes. "
            f"{file_size_remedy()} `num_actors=0` trains without Ray."
        )


@calls_ray
def _start_processes(ray: Any, options: dict[str, Any], notify: Callable[[str], None]) -> None:
    """Start Ray here, with one more try: on a busy machine, its processes may be too late."""
    # "local": never join a cluster of others
    options |= {"address": "local", "log_to_driver": False, "logging_level": logging.ERROR}
    for retry in (True, False):
        lines = list[str]()
        try:
            with (
                environment.long_reconnect(),
                environment.one_hash_seed(),
                environment.log_lines(lines),
            ):
                ray.init(**options)
            return
        except Exception as error:  # Ray raises a bare one, too
            reason = in_a_line(error, 300)
            if lines:
                reason += f"; Ray logged {counted(len(lines), 'line')}, the first: {lines[0][:200]}"
            ray.shutdown()
            if not retry:
                raise ClusterError(
                    f"Ray could not be started here: {reason}. Its logs are under "
                    f"{ray_folder()}/ray/session_latest/logs. {START_AGAIN}"
                ) from None
            notify(f"Ray did not start ({reason}); trying once more")


def store_size(requested: int, notify: Callable[[str], None]) -> int:
    """Return the size of Ray's object store in bytes: `requested`, limited by the free shared memory."""
    folder = Path(ray_folder()).absolute()  # which Ray makes
    disk = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    full = disk.used / (disk.used + disk.free)
    if full > FULL_DISK:
        notify(
            f"the disk of {ray_folder()} is {full:.0%} full: Ray stops creating objects at {FULL_DISK:.0%}. Free disk "
            f"space, or set RAY_TMPDIR."
        )
    requested = max(requested, SMALLEST_STORE)
    free_bytes = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else math.inf
    if requested <= 0.9 * free_bytes:
        return requested
    room = int(0.9 * free_bytes)
    text = f"/dev/shm has {free_bytes / MIB:.0f}"
    if room < SMALLEST_STORE:
        notify(
            f"{text} MiB free, too little for Ray's object store ({SMALLEST_STORE / MIB:.0f} MiB): it moves to disk "
            f"and is slower. In Docker, use --shm-size=1g."
        )
        return SMALLEST_STORE
    size = f"Ray's object store gets {room / MIB:.0f} MiB instead of {requested / MIB:.0f}"
    notify(f"{text} MiB free; {size}. In Docker, use a larger --shm-size.")
    return room
