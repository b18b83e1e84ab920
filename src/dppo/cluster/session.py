"""Connect to a Ray cluster, or start Ray here: the one place that knows Ray's settings."""

from __future__ import annotations

import atexit
import logging
import math
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dppo.errors import ClusterError, ConfigError, counted

MIB = 2**20
SMALLEST_STORE = 80 * MIB  # Ray refuses less than 75 MiB
FULL_DISK = 0.95  # Ray makes no objects once the disk that it spills to is this full


class RaySession:
    """A connection to Ray, which closes what it opened and leaves alone what it found."""

    def __init__(
        self,
        *,
        address: str | None,
        num_actors: int,
        cpus_per_actor: float,
        resources: dict[str, float],
        num_learners: int = 0,
        learner_needs: dict[str, float] | None = None,
        store_bytes: int,
        dashboard: bool,
        notify: Callable[[str], None],
    ) -> None:
        """
        Args:
            address: of a running cluster; None: $RAY_ADDRESS, else Ray is started here.
            resources: what an actor takes beside CPUs.
            store_bytes: what weights and segments in flight may come to, for a Ray that is started here.
        Raises:
            ClusterError: no connection, or Ray cannot start.
            ConfigError: the cluster that runs cannot hold the actors.
        """
        address = address or os.environ.get("RAY_ADDRESS") or None
        _set_environment(start_here=address is None)
        import ray

        self._ours = not ray.is_initialized()
        needs, learner_needs = {"CPU": cpus_per_actor, **resources}, learner_needs or {}
        if not self._ours or address is not None:
            if self._ours:
                _connect(ray, address)
            try:
                _check_capacity(ray, num_actors, needs, num_learners, learner_needs, notify)
            except BaseException:
                self.close()
                raise
            return
        cores = usable_cores()
        wanted = total_needs((num_actors, needs), (num_learners, learner_needs))
        cpus = max(1, math.ceil(wanted.pop("CPU")))
        if cpus > cores:
            learners = f" and {counted(num_learners, 'learner')}" if num_learners else ""
            notify(
                f"{counted(num_actors, 'actor')}{learners} on {counted(cores, 'core')}: "
                f"simulators that wait gain from it, simulators that compute share the cores."
            )
        _start(ray, cpus, wanted, store_bytes, dashboard, notify)

    def close(self) -> None:
        """Disconnect; stop a Ray that was started here."""
        if self._ours:
            import ray

            ray.shutdown()


def usable_cores() -> int:
    """Cores this process may use; Ray's own count ignores CPU affinity and newer cpusets."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# ------------------------------------------------------------------ starting and connecting


def _set_environment(*, start_here: bool) -> None:
    """What Ray reads from the environment when it is imported, wherever the user has not said otherwise."""
    for name, value in {
        "RAY_USAGE_STATS_ENABLED": "0",  # send nothing anywhere
        "RAY_USAGE_STATS_PROMPT_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # or each worker would build its own environment under `uv run`
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",  # an actor without a GPU sees none
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        # Ray prints a paragraph for each actor that dies, even without log_to_driver; we say it in a line.
        "RAY_IGNORE_UNHANDLED_ERRORS": "1",  # nor a traceback for each call to it that nobody waits for any more
        "RAY_DEDUP_LOGS_SKIP_REGEX": "A worker died or was killed",
        # How long to try to connect to a cluster that runs; where Ray starts here its head may need longer.
        **({} if start_here else {"RAY_NUM_REDIS_GET_RETRIES": "3"}),
    }.items():
        os.environ.setdefault(name, value)
    if start_here and "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        _use_private_token()  # for a Ray imported earlier it is too late: Ray then takes a token of the user's account


def _connect(ray: Any, address: str | None) -> None:
    _knock(address)
    try:
        with _signal_handlers_kept():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, TimeoutError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"address={address}: Ray could not connect ({_in_a_line(error)}). Check it with `ray status --address "
            f"{address}`. A cluster that wants a token needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH (or "
            f"RAY_AUTH_TOKEN) here as on its head; without --address Ray starts here."
        ) from None


def _knock(address: str | None) -> None:
    """See in seconds whether anything listens at host:port, for which Ray takes minutes."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto", say: Ray knows where to look
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise ClusterError(
            f"address={address}: no Ray cluster answers there ({error.strerror or error}). Check it with `ray status "
            f"--address {address}`, or leave --address out to start Ray here."
        ) from None


def _start(
    ray: Any, cpus: int, resources: dict[str, float], store_bytes: int, dashboard: bool, notify: Callable[[str], None]
) -> None:
    gpus = resources.pop("GPU", 0)
    try:
        with _signal_handlers_kept():
            ray.init(
                address="local",  # never join a stranger's cluster
                num_cpus=cpus,
                num_gpus=None if gpus else 0,  # None: as many as there are
                resources=resources or None,
                object_store_memory=_store_size(store_bytes, notify),
                include_dashboard=dashboard,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (ConnectionError, TimeoutError, ValueError, RuntimeError, OSError, ray.exceptions.RayError) as error:
        raise ClusterError(
            f"Ray could not be started here: {_in_a_line(error)}. Its logs are under {_session_logs()}. "
            f"`--num-actors 0` trains without Ray."
        ) from None


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Undo what ray.init does to them: its own handler of SIGTERM ends the process on the spot."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _use_private_token() -> None:
    """Let only this process, and what it starts, talk to the Ray that it starts."""
    folder = Path(tempfile.mkdtemp(prefix="dppo-"))
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token)


def _store_size(wanted: int, notify: Callable[[str], None]) -> int:
    """Bytes for Ray's object store: what the job needs, as far as shared memory goes."""
    spill = shutil.disk_usage(_ray_folder())
    if spill.used / (spill.used + spill.free) > FULL_DISK:
        notify(
            f"the disk of {_ray_folder()} is {spill.used / (spill.used + spill.free):.0%} full: Ray stops making "
            f"objects at {FULL_DISK:.0%}. Free some, or set RAY_TMPDIR."
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
            f"({SMALLEST_STORE / MIB:.0f} MiB): it goes to disk and is slower. In Docker give --shm-size=1g."
        )
        return SMALLEST_STORE
    notify(
        f"/dev/shm has {free / MIB:.0f} MiB free; Ray's object store gets {0.9 * free / MIB:.0f} MiB instead of "
        f"{wanted / MIB:.0f}. In Docker give a larger --shm-size."
    )
    return int(0.9 * free)


# ------------------------------------------------------------------ what a cluster holds


def _check_capacity(
    ray: Any,
    num_actors: int,
    needs: dict[str, float],
    num_learners: int,
    learner_needs: dict[str, float],
    notify: Callable[[str], None],
) -> None:
    """Refuse at once what Ray would wait for in silence."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    wanted = total_needs((num_actors, needs), (num_learners, learner_needs))
    have = {name: sum(node.get(name, 0.0) for node in nodes) for name in wanted}
    if num_learners and any(have[name] < amount for name, amount in wanted.items()):
        raise ConfigError(
            f"num_learners={num_learners}: {num_actors} actors and {num_learners} learners need {_in_words(wanted)}, "
            f"the cluster's {len(nodes)} nodes have {_in_words(have)}. Use fewer, or lower --learner-cpus or "
            f"--cpus-per-actor."
        )
    holds = sum(actors_that_fit(node, needs) for node in nodes)
    if holds < num_actors:
        raise ConfigError(
            f"num_actors={num_actors} actors of {_in_words(needs)} each do not fit the cluster: its {len(nodes)} nodes "
            f"have {_in_words({name: sum(node.get(name, 0) for node in nodes) for name in needs})} and hold {holds}. "
            f"Use at most {holds}, lower --cpus-per-actor (0.5 lets two share a CPU), or add nodes."
        )
    free = actors_that_fit(ray.available_resources(), needs)
    if free < num_actors:
        notify(
            f"the cluster has room for {free} of {num_actors} actors at present ({_in_words(needs)} each); the others "
            f"start when someone else's job ends."
        )


def total_needs(*groups: tuple[int, dict[str, float]]) -> dict[str, float]:
    """What all processes of some groups take together."""
    total: dict[str, float] = {}
    for count, needs in groups:
        for name, amount in needs.items():
            if count * amount > 0:
                total[name] = total.get(name, 0.0) + count * amount
    return total


def actors_that_fit(node: dict[str, float], needs: dict[str, float]) -> int:
    """How many actors with these `needs` the resources of one node hold."""
    return min(int(node.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items() if amount > 0)


def _in_words(resources: dict[str, float]) -> str:
    return " + ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text[:300] or type(error).__name__


def _session_logs() -> str:
    return str(Path(_ray_folder()) / "ray" / "session_latest" / "logs")


def _ray_folder() -> str:
    return os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
