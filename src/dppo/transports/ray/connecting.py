"""Connect to a Ray cluster that is running, and explain versions that differ from those of this process.

Of several trainings in a process, the one that has opened Ray would end it for the others: see `claimed`.
"""

import logging
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from dppo.config.checks import check_address
from dppo.errors import ClusterError, ConfigError
from dppo.transports.ray import environment
from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.failures import result_within
from dppo.transports.ray.watch import ping
from dppo.user_code import in_a_line

CONNECT_S = 10.0  # longest wait for the first answer of a cluster
RESOLVE_S = 10.0  # longest wait for the addresses of host names: a name server may not answer
MISMATCH = re.compile(r"Version mismatch.*?Ray: (\S+) Python: (\S+).*?Ray: (\S+) Python: (\S+)")
_UNRESOLVED: OSError | None = TimeoutError("no answer from the name server that knows its host")
_lock = threading.Lock()
_owners: list[int] = []  # the thread of the training that has opened Ray


def is_connected() -> bool:
    return "ray" in sys.modules and bool(sys.modules["ray"].is_initialized())


@contextmanager
def claimed() -> Iterator[None]:
    """Context of a training with actors; raise ConfigError if one in another thread of this process has opened Ray.

    A Ray that the user has opened is shared, because none of them ends it.
    """
    me = threading.get_ident()
    with _lock:
        if _owners and me not in _owners:
            raise ConfigError(
                "num_actors: another training in this process has started Ray, and stops it when it ends. Train one "
                "after the other or in processes of their own, or call ray.init() first, which all of them then share."
            )
        opens = not _owners and not is_connected()
        if opens:
            _owners.append(me)
    try:
        yield
    finally:
        if opens:
            _owners.remove(me)


def wanted_cluster(address: str | None) -> tuple[str, str | None]:
    """Return the setting that names the cluster, and its address, None to start Ray here; refuse other services."""
    source = "address"
    if not address:
        source = "RAY_ADDRESS"
        address = os.environ.get("RAY_ADDRESS") or "local"
    check_address(address, source)
    if address == "local":
        return source, None
    return source, address


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
    """Return whether two host:port name the same place; False if their host names are not resolved in time."""
    return result_within(RESOLVE_S, partial(_resolve_to_same, address, connected), False)


def _resolve_to_same(address: str, connected: str) -> bool:
    host, _, port = address.rpartition(":")
    connected_host, _, connected_port = connected.rpartition(":")
    if port != connected_port:
        return False
    try:
        addresses = _addresses(host)
        connected_addresses = _addresses(connected_host)
        own_addresses = _addresses(socket.gethostname())
    except OSError:  # an unknown name
        return False
    if addresses & connected_addresses:
        return True
    is_loopback = all(ip.startswith("127.") or ip == "::1" for ip in addresses)
    return is_loopback and bool(connected_addresses & own_addresses)


def _addresses(host: str) -> set[str]:
    return {str(info[4][0]) for info in socket.getaddrinfo(host, None)}


def check_answers(source: str, address: str, dashboard: bool) -> None:
    """Raise `ConfigError` or `ClusterError` if no cluster answers there: Ray takes minutes to notice that."""
    if dashboard:
        raise ConfigError(
            f"dashboard=True has no effect: {source}={address} is a running cluster with its own settings. Omit it."
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdigit()):  # "auto", which Ray resolves
        return
    error = result_within(RESOLVE_S + CONNECT_S, partial(_error_of_ping, address), _UNRESOLVED)
    if error is not None:
        remedies = {"address": "omit address", "RAY_ADDRESS": "unset RAY_ADDRESS"}
        reason = error.strerror or str(error)
        raise ClusterError(
            f"{source}={address}: no Ray cluster answers there ({reason}). Check it with `ray status --address "
            f"{address}`, or {remedies[source]} to start Ray here."
        )


def _error_of_ping(address: str) -> OSError | None:
    try:
        ping(address, CONNECT_S)
    except OSError as error:
        return error
    return None


@calls_ray
def connect(ray: Any, source: str, address: str) -> None:
    """Connect to the cluster at `address`, which `source` names; raise ClusterError if that fails."""
    try:
        with environment.long_reconnect(), environment.quiet_init():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        fact = f"{source}={address}: Ray could not connect"
        versions = versions_remedy(str(error))
        if versions:
            raise ClusterError(f"{fact}. {versions}") from None
        raise ClusterError(
            f"{fact} ({in_a_line(error, 300)}). Check it with `ray status --address {address}`. If the cluster uses "
            f"tokens, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or RAY_AUTH_TOKEN) here as on its head. Without "
            f"address, Ray starts here."
        ) from None


def versions_remedy(reason: str) -> str:
    """Return what to install if `reason`, an error of Ray in a line, is about versions that differ; else ""."""
    mismatch = MISMATCH.search(" ".join(reason.split()))
    if mismatch is None:
        return ""
    cluster_ray, cluster_python, ray_here, python_here = mismatch.groups()
    steps = []
    if cluster_ray != ray_here:
        steps.append(
            f"install the cluster's Ray here, `pip install ray=={cluster_ray}`, or {ray_here} on its nodes"
        )
    if cluster_python != python_here:
        steps.append(_python_step(cluster_python, python_here))
    return "The versions differ: " + "; and ".join(steps) + "."


def _python_step(cluster_version: str, version: str) -> str:
    if cluster_version.split(".")[:2] != version.split(".")[:2]:
        return f"run this process with Python {cluster_version} as the cluster, or the cluster with {version}"
    alike = "these two work together, if RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor is set here and on the nodes"
    return f"Python is {version} here and {cluster_version} in the cluster: {alike}"
