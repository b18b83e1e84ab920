"""What is decided before Ray starts: how many actors fit, how large the object store is. Nothing here starts Ray."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from dppo.cluster import session
from dppo.cluster.session import MIB, SMALLEST_STORE, actors_that_fit, usable_cores

Usage = namedtuple("Usage", "total used free")
HALF_FULL = Usage(1000, 500, 500)


# ------------------------------------------------------------------------------------------ actors


@pytest.mark.parametrize(
    ("node", "needs", "fit"),
    [
        ({"CPU": 8.0, "memory": 1e9}, {"CPU": 1.0}, 8),
        ({"CPU": 8.0}, {"CPU": 3.0}, 2),
        ({"CPU": 2.0}, {"CPU": 0.5}, 4),
        ({"CPU": 1.0}, {"CPU": 0.1}, 10),  # 1 / 0.1 must not come to 9.99
        ({"CPU": 0.3}, {"CPU": 0.1}, 3),
        ({"CPU": 0.5}, {"CPU": 1.0}, 0),
        ({"CPU": 8.0, "licence": 3.0}, {"CPU": 1.0, "licence": 1.0}, 3),
        ({"CPU": 8.0}, {"CPU": 1.0, "licence": 1.0}, 0),
        ({}, {"CPU": 1.0}, 0),
        ({"CPU": 8.0}, {"CPU": 1.0, "licence": 0.0}, 8),
    ],
)
def test_actors_that_fit_a_node(node: dict[str, float], needs: dict[str, float], fit: int) -> None:
    assert actors_that_fit(node, needs) == fit


def test_cores_are_those_of_the_affinity_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5, 6}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert usable_cores() == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


# ------------------------------------------------------------------------------------------- store


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """The size chosen and what the user is told, for a machine of so much shared memory and so full a disk."""

    def size(wanted: int, *, shm_free: int | None, disk: Usage = HALF_FULL) -> tuple[int, list[str]]:
        isdir, told = os.path.isdir, []

        def disk_usage(path: str) -> Usage:
            return Usage(shm_free, 0, shm_free) if str(path) == "/dev/shm" else disk

        monkeypatch.setattr(shutil, "disk_usage", disk_usage)
        monkeypatch.setattr(os.path, "isdir", lambda p: shm_free is not None if p == "/dev/shm" else isdir(p))
        return session._store_size(wanted, told.append), told

    return size


def test_the_store_gets_what_the_job_needs_and_no_less_than_ray_takes(
    store: Callable[..., tuple[int, list[str]]],
) -> None:
    assert store(500 * MIB, shm_free=8000 * MIB) == (500 * MIB, [])
    assert store(1, shm_free=8000 * MIB) == (SMALLEST_STORE, [])
    assert store(900 * MIB, shm_free=1000 * MIB) == (900 * MIB, [])
    assert SMALLEST_STORE > 75 * MIB


def test_without_shared_memory_the_store_is_as_large_as_asked_for(
    store: Callable[..., tuple[int, list[str]]],
) -> None:
    assert store(500 * MIB, shm_free=None) == (500 * MIB, [])


def test_a_store_larger_than_shared_memory_is_cut_and_told(store: Callable[..., tuple[int, list[str]]]) -> None:
    size, told = store(5000 * MIB, shm_free=1000 * MIB)
    assert size == 900 * MIB
    assert told == [
        "/dev/shm has 1000 MiB free; Ray's object store gets 900 MiB instead of 5000. "
        "In Docker give a larger --shm-size."
    ]


def test_the_64_mib_of_docker_are_too_few_and_told(store: Callable[..., tuple[int, list[str]]]) -> None:
    size, told = store(5000 * MIB, shm_free=64 * MIB)
    assert size == SMALLEST_STORE
    assert len(told) == 1
    assert "64 MiB free, too little for Ray's object store (80 MiB)" in told[0]
    assert "--shm-size=1g" in told[0]


def test_a_disk_that_ray_finds_full_is_told(store: Callable[..., tuple[int, list[str]]]) -> None:
    _, told = store(100 * MIB, shm_free=8000 * MIB, disk=Usage(1000, 960, 40))
    assert len(told) == 1
    assert f"the disk of {tempfile.gettempdir()} is 96% full: Ray stops making objects at 95%" in told[0]
    assert "RAY_TMPDIR" in told[0]
    assert store(100 * MIB, shm_free=8000 * MIB, disk=Usage(1000, 940, 60))[1] == []


def test_the_disk_looked_at_is_the_one_that_ray_uses(
    monkeypatch: pytest.MonkeyPatch, store: Callable[..., tuple[int, list[str]]]
) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/somewhere/else")
    _, told = store(100 * MIB, shm_free=8000 * MIB, disk=Usage(1000, 990, 10))
    assert told[0].startswith("the disk of /somewhere/else is 99% full")
    assert session._session_logs() == "/somewhere/else/ray/session_latest/logs"


# ------------------------------------------------------------------------------------- environment


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The environment variables of a process that has none, and has not imported Ray."""
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(atexit, "register", lambda *_, **__: None)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    variables: dict[str, str] = os.environ  # type: ignore[assignment]
    return variables


def test_what_the_user_has_set_for_ray_stays(environment: dict[str, str]) -> None:
    environment |= {"RAY_USAGE_STATS_ENABLED": "1", "RAY_AUTH_MODE": "disabled"}
    session._set_environment(start_here=True)
    assert environment["RAY_USAGE_STATS_ENABLED"] == "1"
    assert environment["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] == "0"
    assert environment["RAY_AUTH_MODE"] == "disabled"
    assert "RAY_AUTH_TOKEN_PATH" not in environment


def test_a_ray_of_ours_has_a_token_that_nobody_else_can_read(environment: dict[str, str]) -> None:
    session._set_environment(start_here=True)
    assert environment["RAY_AUTH_MODE"] == "token"
    token = Path(environment["RAY_AUTH_TOKEN_PATH"])
    assert len(token.read_text(encoding="utf8")) >= 32
    assert token.stat().st_mode & 0o077 == 0
    assert token.parent.stat().st_mode & 0o077 == 0


def test_a_cluster_that_runs_is_met_with_the_users_own_token(environment: dict[str, str]) -> None:
    session._set_environment(start_here=False)
    assert "RAY_AUTH_MODE" not in environment


def test_a_ray_that_was_imported_before_is_left_as_it_is(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    session._set_environment(start_here=True)
    assert "RAY_AUTH_MODE" not in environment
