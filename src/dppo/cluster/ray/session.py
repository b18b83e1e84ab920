"""Connect to a Ray cluster, or start Ray here: the only module with settings of Ray."""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dppo.cluster.ray.capacity import Demand, check_cluster, check_gpus, gpus_here, usable_cores
from dppo.cluster.ray.environment import long_reconnect, one_hash_seed, set_environment, signal_handlers_kept
from dppo.cluster.ray.token import forget_private_token
from dppo.cluster.ray.watch import ClusterWatch, Endpoint, endpoint
from dppo.config.parts import Actors, Learners
from dppo.errors import ClusterError, ConfigError, counted

MIB = 2**20
SMALLEST_STORE = 80 * MIB  # Ray refuses less than 75 MiB
STORE_PER_STEP = 64 * 1024  # bytes of the object store per env step of a batch: enough for two batches of images
COPIES = 8  # of the weights in the object store at a time: sent to actors, and twice with the optimiser's state
STORE_LIMITS = 256 * MIB, 4096 * MIB  # for the batch
FULL_DISK = 0.95  # Ray creates no objects if the disk to which it spills is fuller
GCS_RESTART_S = 15.0  # a cluster may be configured to restart its GCS; a Ray started here is not


class RaySession:
    """A connection to Ray. `close` ends only a connection, or a Ray, that this session has opened."""

    def __init__(self, actors: Actors, learners: Learners, *, store_bytes: int, notify: Callable[[str], None]) -> None:
        """Connect to Ray or start it, and check that there is room.

        Args:
            store_bytes: size of the object store for weights and segments, if Ray is started here.

        Raises:
            ClusterError: Ray cannot be reached or started.
            ConfigError: the cluster or this machine has no room for the processes, or another Ray is in use already.
        """
        demand, address, dashboard = demand_of(actors, learners), actors.address, actors.dashboard
        self._ours = not ("ray" in sys.modules and sys.modules["ray"].is_initialized())
        source, cluster = wanted_cluster(address) if self._ours else ("address", address)
        started_here = self._ours and cluster is None
        if self._ours:
            set_environment(start_here=started_here, dashboard=dashboard)
        import ray

        if not self._ours:
            check_connected(ray, address, dashboard)
        elif cluster is None:
            _start(ray, demand, store_bytes, dashboard, notify)
        else:
            _connect(ray, source, cluster, dashboard)
        self._watch = ClusterWatch(_endpoints(ray, started_here=started_here))
        if not started_here:
            try:
                check_cluster(ray, demand, notify)
            except BaseException:
                self.close()
                raise

    def check(self) -> None:
        """Raise `ClusterError` if the connected Ray has died; cheap enough for each tick of a wait.

        A death is detected within seconds. Ray itself would end this process later, without an error.
        """
        self._watch.check()

    def close(self) -> None:
        """Disconnect; stop Ray if it was started here."""
        self._watch.close()
        if self._ours:
            import ray

            ray.shutdown()
            forget_private_token()


def demand_of(actors: Actors, learners: Learners) -> Demand:
    """Return the processes of these settings, and the resources that each takes from Ray."""
    of_actor = {"CPU": actors.cpus_per_actor, **actors.actor_resources}
    if actors.actor_gpus:
        of_actor["GPU"] = actors.actor_gpus
    of_learner = {"CPU": learners.learner_cpus, "GPU": learners.learner_gpus}
    return Demand(actors.num_actors, of_actor, learners.num_learners, of_learner)


def store_bytes_for(batch_size: int, num_parameters: int) -> int:
    """Return the bytes that weights and segments in flight take in the object store."""
    low, high = STORE_LIMITS
    return min(high, max(low, batch_size * STORE_PER_STEP) + COPIES * 4 * num_parameters)


def _endpoints(ray: Any, *, started_here: bool) -> list[Endpoint]:
    """Return the processes that Ray depends on: the GCS of the head, and the raylet of this node."""
    context = ray.get_runtime_context()
    gcs = endpoint("Ray's GCS", context.gcs_address, 0.0 if started_here else GCS_RESTART_S)
    here = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    return [gcs, *(Endpoint("the raylet", n["NodeManagerAddress"], n["NodeManagerPort"], 0.0) for n in here)]


# ------------------------------------------------------------------ which cluster


def wanted_cluster(address: str | None) -> tuple[str, str | None]:
    """Return the setting that names the cluster, and its address; None to start Ray here.

    Raises:
        ConfigError: it is the address of another kind of service.
    """
    source = "address" if address else "RAY_ADDRESS"
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":
        return source, None
    scheme = address.partition("://")[0] if "://" in address else None
    if scheme is None:
        return source, address
    kind = {
        "http": "the address of Ray's dashboard, which takes `ray job submit`",
        "https": "the address of Ray's dashboard, which takes `ray job submit`",
        "ray": "the address of a Ray Client server, which is not supported",
    }.get(scheme, "not an address of a Ray cluster")
    unset = "" if source == "address" else ", or unset RAY_ADDRESS to start Ray here"
    raise ConfigError(
        f"{source}={address}: this is {kind}. Set address to the head's host:port (6379 by default), or to auto on a "
        f"node of the cluster{unset}."
    )


def check_connected(ray: Any, address: str | None, dashboard: bool) -> None:
    """Reject settings that would have no effect, because this process is connected to Ray already.

    Raises:
        ConfigError: `address` names another cluster, or a dashboard is requested.
    """
    connected = ray.get_runtime_context().gcs_address
    if address not in (None, "auto") and not _same_place(str(address), connected):
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
    if host == other:
        return True
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
        known = {info[4][0] for info in socket.getaddrinfo(other, None)}
        here = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:  # an unknown name
        return False
    loopback = all(str(ip).startswith("127.") or ip == "::1" for ip in found)
    return bool(found & known) or (loopback and bool(known & here))


# ------------------------------------------------------------------ starting and connecting


def _connect(ray: Any, source: str, address: str, dashboard: bool) -> None:
    if dashboard:
        raise ConfigError(
            f"dashboard=True has no effect: {source}={address} is a running cluster with its own settings. Omit it."
        )
    _knock(source, address)
    try:
        with signal_handlers_kept(), long_reconnect():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, TimeoutError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"{source}={address}: Ray could not connect ({_in_a_line(error)}). Check it with `ray status --address "
            f"{address}`. If the cluster uses tokens, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or "
            f"RAY_AUTH_TOKEN) here as on its head. Without address, Ray starts here."
        ) from None


def _knock(source: str, address: str) -> None:
    """Raise `ClusterError` within seconds if nothing listens at host:port; Ray takes minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return  # such as "auto", which Ray resolves
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        remedy = "omit address" if source == "address" else "unset RAY_ADDRESS"
        raise ClusterError(
            f"{source}={address}: no Ray cluster answers there ({error.strerror or error}). Check it with `ray status "
            f"--address {address}`, or {remedy} to start Ray here."
        ) from None


def _start(ray: Any, demand: Demand, store_bytes: int, dashboard: bool, notify: Callable[[str], None]) -> None:
    wanted = demand.total()
    gpus = gpus_here() if wanted.pop("GPU", 0) else 0
    check_gpus(demand, gpus)
    cores, cpus = usable_cores(), max(1, math.ceil(wanted.pop("CPU")))
    if cpus > cores:
        learners = f" and {counted(demand.num_learners, 'learner')}" if demand.num_learners else ""
        notify(
            f"{counted(demand.num_actors, 'actor')}{learners} on {counted(cores, 'core')}: "
            f"simulators that wait gain from this, simulators that compute share the cores."
        )
    try:
        with signal_handlers_kept(), long_reconnect(), one_hash_seed():
            ray.init(
                address="local",  # never join a cluster of others
                num_cpus=cpus,
                num_gpus=gpus,
                resources=wanted or None,
                object_store_memory=store_size(store_bytes, notify),
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, TimeoutError, ValueError, RuntimeError, OSError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"Ray could not be started here: {_in_a_line(error)}. Its logs are under {session_logs()}. "
            f"num_actors=0 trains without Ray."
        ) from None


def store_size(wanted: int, notify: Callable[[str], None]) -> int:
    """Return the size of Ray's object store in bytes: `wanted`, limited by the free shared memory."""
    spill = shutil.disk_usage(_ray_folder())
    if spill.used / (spill.used + spill.free) > FULL_DISK:
        notify(
            f"the disk of {_ray_folder()} is {spill.used / (spill.used + spill.free):.0%} full: Ray stops creating "
            f"objects at {FULL_DISK:.0%}. Free disk space, or set RAY_TMPDIR."
        )
    wanted = max(wanted, SMALLEST_STORE)
    if not os.path.isdir("/dev/shm"):
        return wanted
    free = shutil.disk_usage("/dev/shm").free
    if wanted <= 0.9 * free:
        return wanted
    if 0.9 * free < SMALLEST_STORE:
        notify(
            f"/dev/shm has {free / MIB:.0f} MiB free, too little for Ray's object store "
            f"({SMALLEST_STORE / MIB:.0f} MiB): it moves to disk and is slower. In Docker, use --shm-size=1g."
        )
        return SMALLEST_STORE
    notify(
        f"/dev/shm has {free / MIB:.0f} MiB free; Ray's object store gets {0.9 * free / MIB:.0f} MiB instead of "
        f"{wanted / MIB:.0f}. In Docker, use a larger --shm-size."
    )
    return int(0.9 * free)


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__


def session_logs() -> str:
    """Return the folder of the logs of the newest Ray that was started here."""
    return str(Path(_ray_folder()) / "ray" / "session_latest" / "logs")


def _ray_folder() -> str:
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
