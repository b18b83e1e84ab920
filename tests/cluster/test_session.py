"""Decisions before Ray starts: which cluster, how many actors fit, the size of the object store."""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import namedtuple
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from builders import tiny_run
from commandline import fresh_environment, run
from processes import in_ray_thread
from remedies import executes

import dppo
from dppo import machine
from dppo.config import Actors, Learners
from dppo.errors import ClusterError, ConfigError
from dppo.files import remove_abandoned
from dppo.transports.ray import capacity, connecting, core_use, session
from dppo.transports.ray import environment as surroundings
from dppo.transports.ray.progress_file import make_progress_file
from dppo.transports.ray.session import MIB, SMALLEST_STORE, RaySession, demand_of

Usage = namedtuple("Usage", "total used free")
HALF_FULL = Usage(1000, 500, 500)


Store = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return the chosen size and the logged lines for some shared memory and disk usage."""

    def size(
        requested: int, *, shm_free: int | None, disk: Usage = HALF_FULL
    ) -> tuple[int, list[str]]:
        isdir = os.path.isdir
        logged = list[str]()

        def disk_usage(path: str) -> Usage:
            return Usage(shm_free, 0, shm_free) if str(path) == "/dev/shm" else disk

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        monkeypatch.setattr(
            os.path, "isdir", lambda p: shm_free is not None if p == "/dev/shm" else isdir(p)
        )
        return session.store_size(requested, logged.append), logged

    return size


def test_the_store_has_the_wanted_size_or_the_minimum_of_ray(store: Store) -> None:
    assert store(500 * MIB, shm_free=8000 * MIB) == (500 * MIB, [])
    assert store(1, shm_free=8000 * MIB) == (SMALLEST_STORE, [])
    assert store(900 * MIB, shm_free=1000 * MIB) == (900 * MIB, [])
    assert SMALLEST_STORE > 75 * MIB
    assert store(500 * MIB, shm_free=None) == (500 * MIB, []), "without shared memory"


def test_a_store_larger_than_shared_memory_is_reduced_and_too_little_memory_logged(
    store: Store,
) -> None:
    size, logged = store(5000 * MIB, shm_free=1000 * MIB)
    assert size == 900 * MIB
    [line] = logged
    assert re.match(
        "/dev/shm has 1000 MiB free; .* gets 900 MiB instead of 5000.* --shm-size", line
    )
    size, [line] = store(5000 * MIB, shm_free=64 * MIB)
    assert size == SMALLEST_STORE
    assert re.search(
        r"64 MiB free, too little for Ray's object store \(80 MiB\).*--shm-size=1g", line
    )


def test_a_disk_that_is_too_full_for_ray_is_logged(
    monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    _, [line] = store(100 * MIB, shm_free=8000 * MIB, disk=Usage(1000, 960, 40))
    assert (
        f"the disk of {tempfile.gettempdir()} is 96% full: Ray stops creating objects at 95%"
        in line
    )
    assert "RAY_TMPDIR" in line
    assert store(100 * MIB, shm_free=8000 * MIB, disk=Usage(1000, 940, 60))[1] == []
    monkeypatch.setenv("RAY_TMPDIR", "/somewhere/else")
    _, [line] = store(100 * MIB, shm_free=8000 * MIB, disk=Usage(1000, 990, 10))
    assert line.startswith("the disk of /somewhere/else is 99% full")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Give the process no environment variables, no Ray and no token; return its variables."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(atexit, "register", lambda *_, **__: None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    # a new one
    monkeypatch.setattr(
        surroundings, "private_token", functools.cache(surroundings.private_token.__wrapped__)
    )
    variables: dict[str, str] = os.environ  # type: ignore[assignment]
    return variables


@pytest.mark.parametrize("start_here", [False, True])
def test_a_running_cluster_and_a_ray_that_was_imported_earlier_get_no_private_token(
    start_here: bool, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if start_here:
        monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    surroundings.set_environment(start_here=start_here)
    assert "RAY_AUTH_MODE" not in environment


def test_the_private_token_is_its_owners_only_and_can_be_forgotten_and_reused(
    environment: dict[str, str],
) -> None:
    surroundings.set_environment(start_here=True)
    assert environment["RAY_AUTH_MODE"] == "token"
    path = environment["RAY_AUTH_TOKEN_PATH"]
    assert len(Path(path).read_text(encoding="utf8")) >= 32
    assert Path(path).stat().st_mode & 0o077 == Path(path).parent.stat().st_mode & 0o077 == 0

    surroundings.forget_private_token()
    assert not {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"} & set(environment)
    surroundings.set_environment(start_here=True)  # Ray remembers the first token that it reads
    assert environment["RAY_AUTH_TOKEN_PATH"] == path

    environment["RAY_AUTH_TOKEN_PATH"] = "/the/users/own"
    surroundings.forget_private_token()
    assert environment["RAY_AUTH_MODE"] == "token"


def test_only_actors_with_threads_run_at_the_priority_of_other_processes(
    environment: dict[str, str],
) -> None:
    surroundings.set_environment(start_here=True)
    surroundings.set_environment(start_here=False, env_threads=True)
    assert "RAY_worker_niceness" not in environment, "a running cluster has its own"
    surroundings.set_environment(start_here=True, env_threads=True)
    assert environment["RAY_worker_niceness"] == "0"


def test_variables_set_by_the_user_keep_their_values(environment: dict[str, str]) -> None:
    theirs = {"RAY_USAGE_STATS_ENABLED": "1", "RAY_AUTH_MODE": "disabled"}
    environment |= theirs
    surroundings.set_environment(start_here=True)
    assert theirs.items() <= environment.items()
    assert environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"
    assert "RAY_AUTH_TOKEN_PATH" not in environment


def test_only_token_folders_and_progress_files_of_dead_runs_are_removed(
    environment: dict[str, str], tmp_path: Path
) -> None:
    dead = tmp_path / "dppo-token-dead"
    young = tmp_path / "dppo-token-young"
    for folder in (dead, young):
        folder.mkdir()
        (folder / "ray_token").touch()
    script = (
        "import os, sys, tempfile, time; from dppo.transports.ray import environment; tempfile.tempdir = os.getcwd()\n"
        "token = environment.private_token()\n"
        "if not os.fork():\n"
        "    sys.exit()  # of a simulator: the token is not its own\n"
        "os.wait()\n"
        "print(token, flush=True); time.sleep(60)"
    )
    run = [sys.executable, "-c", script]  # another one, whose folder is old and locked
    alive = subprocess.Popen(run, cwd=tmp_path, stdout=subprocess.PIPE, env=fresh_environment())
    try:
        assert alive.stdout is not None
        locked = Path(alive.stdout.readline().decode().strip()).parent
        left = tmp_path / "dppo-progress-left"
        ours = Path(make_progress_file()[0])
        left.touch()
        for path in (dead, locked, left, ours):
            os.utime(path, (0, 0))
        remove_abandoned(
            surroundings.PREFIX, surroundings.PROGRESS, older_than_s=surroundings.YOUNG_S
        )
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
            [young.name, locked.name, ours.name]
        )
    finally:
        alive.kill()
        alive.communicate()


def test_only_this_process_outlives_the_gcs_for_long() -> None:
    """Ray's own processes inherit `os.environ`, and must keep the default of a minute."""
    name = b"RAY_gcs_rpc_server_reconnect_timeout_s"
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    with surroundings.long_reconnect():
        assert getenv(name) == b"3600"
        assert name.decode() not in os.environ
    assert getenv(name) is None


def test_a_name_server_that_does_not_answer_ends_the_wait_for_a_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blocked = threading.Event()
    monkeypatch.setattr(connecting, "ping", lambda address, timeout_s: blocked.wait())
    monkeypatch.setattr(connecting, "RESOLVE_S", 0.05)
    monkeypatch.setattr(connecting, "CONNECT_S", 0.0)
    try:
        with pytest.raises(ClusterError, match=r"answers there \(no answer from the name server"):
            connecting.check_answers("address", "head.example:6379", dashboard=False)
    finally:
        blocked.set()


def test_ray_cannot_set_signal_handlers_while_it_starts() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with surroundings.signal_handlers_kept():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))
        assert signal.getsignal(signal.SIGTERM) is before
    assert signal.signal(signal.SIGTERM, before) is before


HANDLERS = """
import ctypes, os, signal, sys
import ray
from dppo.transports.ray import environment

signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
raylet = ctypes.CDLL(sys.modules["ray._raylet"].__file__)
with environment.signal_handlers_kept():
    raylet._ZN3ray6RayLog27InstallFailureSignalHandlerEPKcb(None, False)  # as Ray connects
    os.kill(os.getpid(), signal.SIGTERM)
raylet._ZN3ray6RayLog21UninstallSignalActionEv()  # as Ray shuts down
environment.reinstall_handlers()
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sigterm_reaches_python_while_ray_connects_and_after_it_has_ended() -> None:
    """Ray's C++ code would end the process while it connects, and later leave the system's default action."""
    done = subprocess.run(
        [sys.executable, "-c", HANDLERS], capture_output=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.split()) == (0, [b"heard", b"heard"]), done.stderr


class ConnectedRay:
    """An initialized Ray, with the address of its GCS."""

    def __init__(self, gcs_address: str = "10.0.0.7:6379") -> None:
        self.gcs_address = gcs_address

    def get_runtime_context(self) -> ConnectedRay:
        return self


def test_only_the_address_of_the_connected_cluster_is_accepted_by_any_name() -> None:
    here = ConnectedRay(f"{socket.gethostbyname(socket.gethostname())}:6379")
    connecting.check_connected(here, "localhost:6379", dashboard=False)
    there = ConnectedRay()
    for address in (None, "auto", "10.0.0.7:6379"):
        connecting.check_connected(there, address, dashboard=False)
    for other in (
        "big-cluster.invalid:6379",
        "10.0.0.8:6379",
        "10.0.0.7:6380",
        "local",
        "localhost:6379",
    ):
        with pytest.raises(ConfigError, match=rf"address={other}: .* at 10.0.0.7:6379 already"):
            connecting.check_connected(there, other, dashboard=False)


def test_a_name_server_that_does_not_answer_stops_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr(connecting, "RESOLVE_S", 0.1)

    def wait(*_: Any) -> list[Any]:
        answered.wait()
        return []

    monkeypatch.setattr(socket, "getaddrinfo", wait)
    with pytest.raises(ConfigError, match=r"address=head:6379: .* at 10.0.0.7:6379 already"):
        connecting.check_connected(ConnectedRay(), "head:6379", dashboard=False)
    answered.set()


@pytest.mark.parametrize(
    ("address", "kind"),
    [
        ("http://127.0.0.1:8265", "the address of Ray's dashboard, which takes `ray job submit`"),
        ("https://ray.example", "the address of Ray's dashboard"),
        ("ray://head:10001", "the address of a Ray Client server, which is not supported"),
        ("redis://head:6379", "not an address of a Ray cluster"),
        ("10.77.0.1", "not an address of a Ray cluster"),
        ("head:port", "not an address of a Ray cluster"),
    ],
)
def test_addresses_of_other_services_are_refused(
    address: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ConfigError) as refused:
        connecting.wanted_cluster(None)
    assert str(refused.value).startswith(f"RAY_ADDRESS={address}: this is {kind}")
    assert "host:port" in str(refused.value)
    assert "unset RAY_ADDRESS" in str(refused.value)
    with pytest.raises(ConfigError, match=r"^address="):
        connecting.wanted_cluster(address)


def test_the_address_setting_precedes_the_environment_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert connecting.wanted_cluster(None) == ("RAY_ADDRESS", "head:6379")
    assert connecting.wanted_cluster("other:6379") == ("address", "other:6379")
    assert connecting.wanted_cluster("local") == ("address", None)
    monkeypatch.delenv("RAY_ADDRESS")
    assert connecting.wanted_cluster(None) == ("RAY_ADDRESS", None)


def test_a_session_joins_the_ray_of_its_process_and_leaves_it(ray_session: None) -> None:
    import ray

    address = ray.get_runtime_context().gcs_address

    def session_of(**changes: Any) -> RaySession:
        actors = Actors(num_actors=1, **changes)
        demand = demand_of(actors, Learners())
        return RaySession(actors, demand, store_bytes=1, notify=lambda text: None)

    joined = session_of(address=address)
    joined.check()
    joined.close()
    assert ray.is_initialized()
    with pytest.raises(ConfigError, match=rf"address=somewhere.invalid:1: .* at {address} already"):
        session_of(address="somewhere.invalid:1")
    with pytest.raises(ConfigError, match="dashboard=True has no effect"):
        session_of(dashboard=True)


def test_the_folder_of_ray_may_not_exist_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "job" / "ray"))
    assert session.store_size(1, print) >= SMALLEST_STORE


def test_parts_of_a_licence_add_up_to_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray starts with whole numbers of resources only."""
    ray_options: dict[str, Any] = {}
    monkeypatch.setattr(
        session, "_start_processes", lambda ray, options, notify: ray_options.update(options)
    )
    actors = Actors(num_actors=3, actor_resources={"licence": 0.5})
    demand = demand_of(actors, Learners())
    in_ray_thread(
        lambda: session._start(SimpleNamespace(), demand, 1, dashboard=False, notify=print)
    )
    assert ray_options["resources"] == {"licence": 2}


@pytest.mark.slow
def test_a_run_that_needs_missing_gpus_ends_before_ray_starts(tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", "--num-actors", "2", "--actor-gpus", "1", "--run-dir", "run"]
    code, _, err = run(words, tmp_path, timeout_s=60, CUDA_VISIBLE_DEVICES="")
    assert code == 2
    assert "actor_gpus=1: 2 actors of 1 GPU each need 2 GPUs, this machine has 0" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("actors", "idle_s", "notes"),
    [
        (
            8,
            1.0,
            [
                "8 actors on 2 cores, busy for 95% of the time: more actors would gain nothing on this machine."
            ],
        ),
        (8, 5.0, []),  # simulators that wait
        (2, 0.0, []),
    ],
)
def test_a_run_with_more_actors_than_cores_says_at_its_end_whether_the_cores_were_busy(
    actors: int, idle_s: float, notes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four cores, this process may use two; each has the same 10 s in the run."""
    times = namedtuple("times", "user system idle iowait guest")
    now = [times(50.0, 5.0, 100.0, 1.0, 2.0)] * 4
    then = [
        times(150.0, 5.0, 100.0, 1.0, 2.0),
        *[times(60.0 - idle_s / 2, 5.0, 100.0 + idle_s / 2, 1.0, 2.0)] * 3,
    ]
    monkeypatch.setattr(machine, "_smallest_quota", lambda: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {1, 3}, raising=False)
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: now)
    use = core_use.CoreUse(actors)
    monkeypatch.setattr("psutil.cpu_times", lambda percpu: then)
    assert use.notes() == notes


@pytest.mark.parametrize("failures", [1, 2])
def test_ray_is_started_once_more_if_it_fails(
    failures: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine, its start is given up with a bare Exception."""
    import ray

    calls = list[dict[str, Any]]()
    notes = list[str]()

    def init(**options: Any) -> None:
        calls.append(options)
        if len(calls) <= failures:
            ray._private.services.logger.error("Failed to start the dashboard\n, return code 1")
            ray._private.services.logger.error("Please report an issue to Ray github")
            raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    demand = capacity.Demand(1, {"CPU": 1.0}, 0, {}, 0, ())
    with (
        pytest.raises(
            ClusterError,
            match=r"could not be started here: Exception: .* timed out .* Start again, or use `num_actors=0`, which",
        )
        if failures == 2
        else nullcontext()
    ):
        in_ray_thread(lambda: session._start(ray, demand, 1, True, notes.append))
    assert len(calls) == 2
    assert "timed out during startup" in notes[-1]
    first = "Ray logged 2 lines, the first: Failed to start the dashboard , return code 1"
    assert first in notes[-1]
    assert "github" not in capfd.readouterr().err
    assert logging.getLogger("ray._private").propagate
    assert notes[-1].endswith("trying once more")


@executes("transports/ray/watch.py: Start again, or use `num_actors=0`, which needs no Ray")
def test_a_run_whose_ray_does_not_start_has_trained_nothing_and_needs_none_without_actors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def init(**_: Any) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    folder = tmp_path / "run"
    with pytest.raises(ClusterError, match="Nothing was trained, and no checkpoint was written"):
        dppo.train(tiny_run(folder, num_actors=1))
    assert not list(folder.rglob("*.safetensors"))
    assert dppo.train(tiny_run(folder, num_actors=0)).metrics
