"""Connect to a Ray cluster, or start Ray here: the only module with settings of Ray."""

import logging
import math
import os
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dppo.cluster.ray import capacity, environment
from dppo.cluster.ray.capacity import PER_NODE, Demand
from dppo.cluster.ray.folder import ray_folder, usable_folder
from dppo.cluster.ray.versions import versions_remedy
from dppo.cluster.ray.watch import ClusterWatch, Endpoint, Room, connect, usable_nodes
from dppo.config.checks import check_address
from dppo.config.parts import Actors, Learners
from dppo.errors import ClusterError, ConfigError, counted
from dppo.user_code import in_a_line

MIB = 2**20
SMALLEST_STORE = 80 * MIB  # Ray refuses less than 75 MiB
STORE_PER_STEP = 64 * 1024  # bytes of the object store per env step of a batch: enough for two batches of images
COPIES = 8  # of the weights in the object store at a time: sent to actors, and twice with the optimizer's state
STORE_LIMITS = 256 * MIB, 4096 * MIB  # for the batch
FULL_DISK = 0.95  # Ray creates no objects if the disk to which it spills is fuller
CONNECT_S = 5.0  # longest wait for the first connection to a cluster
GCS_RESTART_S = 15.0  # a cluster may be configured to restart its GCS; a Ray started here is not


class RaySession:
    """A connection to Ray. `close` ends only a connection, or a Ray, that this session has opened."""

    def __init__(
        self, actors: Actors, learners: Learners, evaluators: int = 0, *, store_bytes: int,
        notify: Callable[[str], None], **more: bool,
    ) -> None:  # fmt: skip
        """Connect to Ray, or start it with an object store of `store_bytes` and `more` variables; check the room.

        Raise ClusterError if Ray cannot be reached or started, and ConfigError if the cluster or this machine has no
        room for the processes, or another Ray is in use already.
        """
        demand, address, dashboard = demand_of(actors, learners, evaluators), actors.address, actors.dashboard
        self._ours = not ("ray" in sys.modules and sys.modules["ray"].is_initialized())
        source, cluster = wanted_cluster(address) if self._ours else ("address", address)
        self.started_here = started_here = self._ours and cluster is None
        if self._ours:
            environment.set_environment(start_here=started_here, dashboard=dashboard, **more)
        import ray

        if not self._ours:
            check_connected(ray, address, dashboard)
        elif cluster is None:
            demand = _start(ray, demand, store_bytes, dashboard, notify)
        else:
            _connect(ray, source, cluster, dashboard)
        self._watch = ClusterWatch(_endpoints(ray, started_here=started_here))
        self.check = self._watch.check
        self.room: Room | None = None  # for actors that join and leave
        try:
            if not started_here and demand.most_actors:
                free, grows = capacity.free_room(demand), capacity.has_autoscaler(ray)
                self.room = Room(demand, usable_nodes, notify, free=free, grows=grows)
                self.room.start()
            elif not started_here:
                capacity.check_cluster(ray, demand, notify)
        except BaseException:
            self.close()
            raise
        self.options: dict[str, Any] = {}  # Ray's options of its processes
        self.demand = demand if self.room is None else replace(demand, num_actors=self.room.at_first)
        """The processes at the start."""

    def close(self) -> None:
        """Disconnect; stop Ray if it was started here."""
        self._watch.close()
        if self.room is not None:
            self.room.close()
        if self._ours:
            import ray

            ray.shutdown()
            environment.forget_private_token()


def demand_of(actors: Actors, learners: Learners, evaluators: int = 0) -> Demand:
    """Return the processes of these settings, and the resources that each takes from Ray."""
    fewest, most = actors.actor_bounds
    of_actor = {"CPU": actors.cpus_per_actor}
    if actors.actor_gpus:
        of_actor["GPU"] = actors.actor_gpus
    if actors.actors_per_node:  # Ray counts in units of 0.0001
        of_actor[PER_NODE] = 10_000 // actors.actors_per_node / 10_000
    first, *others = [of_actor | group for group in actors.resource_groups]
    of_learner = {"CPU": learners.learner_cpus, "GPU": learners.learner_gpus}
    elastic = most if actors.elastic else 0
    return Demand(fewest, first, learners.num_learners, of_learner, elastic, tuple(others), evaluators)


def store_bytes_for(batch_size: int, num_parameters: int) -> int:
    """Return the bytes that weights and segments in flight take in the object store."""
    low, high = STORE_LIMITS
    return min(high, max(low, batch_size * STORE_PER_STEP) + COPIES * 4 * num_parameters)


def _endpoints(ray: Any, *, started_here: bool) -> list[Endpoint]:
    """Return the processes that Ray depends on: the GCS of the head, and the raylet of this node."""
    context = ray.get_runtime_context()
    found = [Endpoint("Ray's GCS", context.gcs_address, 0.0 if started_here else GCS_RESTART_S)]
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            found.append(Endpoint("the raylet", f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}", 0.0))
    return found


def wanted_cluster(address: str | None) -> tuple[str, str | None]:
    """Return the setting that names the cluster, and its address, None to start Ray here; refuse other services."""
    source = "address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    check_address(address, source)
    return source, None if address == "local" else address


def check_connected(ray: Any, address: str | None, dashboard: bool) -> None:
    """Raise `ConfigError` if `address` is not the connected cluster, or for a dashboard: they would have no effect."""
    connected = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", connected) and not _same_place(str(address), connected):
        raise ConfigError(
            f"address={address}: this process is connected to the Ray cluster at {connected} already. Omit address "
            f"to use that one, or call ray.shutdown() first."
        )
    if dashboard:
        raise ConfigError(
            f"dashboard=True has no effect: this process is connected to the Ray cluster at {connected} already. Start "
            f"that one with a dashboard, or omit the setting."
        )


def _same_place(address: str, connected: str) -> bool:
    """Return whether two host:port name the same place; host names are resolved."""
    (host, _, port), (other, _, other_port) = address.rpartition(":"), connected.rpartition(":")
    if port != other_port:
        return False
    names = host, other, socket.gethostname()
    try:
        found, known, here = ({str(info[4][0]) for info in socket.getaddrinfo(name, None)} for name in names)
    except OSError:  # an unknown name
        return False
    loopback = all(ip.startswith("127.") or ip == "::1" for ip in found)
    return bool(found & known) or (loopback and bool(known & here))


def _connect(ray: Any, source: str, address: str, dashboard: bool) -> None:
    if dashboard:
        raise ConfigError(
            f"dashboard=True has no effect: {source}={address} is a running cluster with its own settings. Omit it."
        )
    host, _, port = address.rpartition(":")
    if host and port.isdigit():  # not "auto", which Ray resolves
        try:
            connect(address, CONNECT_S)  # Ray takes minutes to notice that nothing listens there
        except OSError as error:
            remedy = "omit address" if source == "address" else "unset RAY_ADDRESS"
            raise ClusterError(
                f"{source}={address}: no Ray cluster answers there ({error.strerror or error}). Check it with `ray "
                f"status --address {address}`, or {remedy} to start Ray here."
            ) from None
    try:
        with environment.signal_handlers_kept(), environment.long_reconnect():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, TimeoutError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        versions = versions_remedy(str(error))
        if versions:
            raise ClusterError(f"{source}={address}: Ray could not connect. {versions}") from None
        raise ClusterError(
            f"{source}={address}: Ray could not connect ({in_a_line(error)[:300]}). Check it with `ray status "
            f"--address {address}`. If the cluster uses tokens, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or "
            f"RAY_AUTH_TOKEN) here as on its head. Without address, Ray starts here."
        ) from None


def _start(ray: Any, demand: Demand, store_bytes: int, dashboard: bool, notify: Callable[[str], None]) -> Demand:
    cores, gpus = capacity.usable_cores(), capacity.gpus_here() if demand.total().get("GPU") else 0
    if demand.most_actors:
        demand = capacity.fitted_here(demand, gpus, notify)
    capacity.check_here(demand, gpus)
    wanted = demand.total()
    wanted.pop("GPU", None)
    cpus = max(1, math.ceil(wanted.pop("CPU")))
    if cpus > cores:
        learners = f" and {counted(demand.num_learners, 'learner')}" if demand.num_learners else ""
        notify(
            f"{counted(demand.num_actors, 'actor')}{learners} on {counted(cores, 'core')}: "
            f"simulators that wait gain from this, simulators that compute share the cores."
        )
    with usable_folder(notify):
        _start_processes(
            ray,
            notify,
            num_cpus=cpus,
            num_gpus=gpus,
            resources={name: math.ceil(amount) for name, amount in wanted.items()} or None,  # it takes whole numbers
            object_store_memory=store_size(store_bytes, notify),
            include_dashboard=dashboard,
        )
    if not dashboard:
        with suppress(AttributeError):  # autoscaler and forwarder of logs: 45 MB each, and nothing to do here
            ray._private.worker._global_node.kill_monitor(check_alive=False)
            ray._private.worker._global_node.kill_log_monitor(check_alive=False)
    return demand


def _start_processes(ray: Any, notify: Callable[[str], None], **options: Any) -> None:
    """Start Ray here, with one more try: on a busy machine, its processes may be too late."""
    for retry in (True, False):
        try:
            with environment.signal_handlers_kept(), environment.long_reconnect(), environment.one_hash_seed():
                # "local": never join a cluster of others
                ray.init(address="local", log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception as error:  # Ray raises a bare one, too
            reason = in_a_line(error)[:300]
            ray.shutdown()
            if not retry:
                logs = f"{ray_folder()}/ray/session_latest/logs. `num_actors=0` trains without Ray."
                raise ClusterError(f"Ray could not be started here: {reason}. Its logs are under {logs}") from None
            notify(f"Ray did not start ({reason}); trying once more")


def store_size(wanted: int, notify: Callable[[str], None]) -> int:
    """Return the size of Ray's object store in bytes: `wanted`, limited by the free shared memory."""
    folder = Path(ray_folder()).absolute()  # which Ray makes
    disk = shutil.disk_usage(next(one for one in (folder, *folder.parents) if one.exists()))
    full = disk.used / (disk.used + disk.free)
    if full > FULL_DISK:
        notify(
            f"the disk of {ray_folder()} is {full:.0%} full: Ray stops creating objects at {FULL_DISK:.0%}. Free disk "
            f"space, or set RAY_TMPDIR."
        )
    wanted = max(wanted, SMALLEST_STORE)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else math.inf
    if wanted <= 0.9 * free:
        return wanted
    room, has = int(0.9 * free), f"/dev/shm has {free / MIB:.0f}"
    if room < SMALLEST_STORE:
        notify(
            f"{has} MiB free, too little for Ray's object store ({SMALLEST_STORE / MIB:.0f} MiB): it moves to disk "
            f"and is slower. In Docker, use --shm-size=1g."
        )
        return SMALLEST_STORE
    given = f"Ray's object store gets {room / MIB:.0f} MiB instead of {wanted / MIB:.0f}"
    notify(f"{has} MiB free; {given}. In Docker, use a larger --shm-size.")
    return room
