"""A process that a simulator forks, and that comes back from its code, leaves at once: it is no twin of the run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_run
from worlds.forking import Forking

import dppo
from dppo.records.metrics.reading import read_metrics

# of waitpid: code, or signal
STATUS = {"exit": 7 << 8, "raise": 1 << 8, "return": 0, "in C": 0, "wait": 15}


def trained(at: str, way: str, tmp_path: Path, **changes: Any) -> dppo.Result:
    kwargs = {"at": at, "way": way, "log": str(tmp_path / "status")}
    world: dict[str, Any] = {"env_id": Forking, "env_kwargs": kwargs}
    return dppo.train(tiny_run(tmp_path / "run", samplers=2, **world | changes))


def check(result: dppo.Result, way: str, tmp_path: Path, undisturbed: dppo.Result) -> None:
    assert result.weights_sha256 == undisturbed.weights_sha256
    rows = read_metrics(result.run_dir)
    assert len(rows) == 3
    [file] = tmp_path.glob("status-*")
    status = int(file.read_text())
    assert status == STATUS[way]
    assert not result.incidents


@pytest.fixture(scope="module")
def undisturbed(module_path: Path) -> dppo.Result:
    return trained("never", "return", module_path)


@pytest.mark.proves("forks, and the child comes back from its code, exits or raises")
@pytest.mark.parametrize(
    ("at", "way"),
    [
        ("step", "raise"),
        ("step", "wait"),
        *(
            pytest.param(*processes, marks=pytest.mark.slow)
            for processes in (("make", "raise"), ("reset", "return"))
        ),
        *(pytest.param("step", way, marks=pytest.mark.slow) for way in ("exit", "in C")),
    ],
)
def test_a_fork_leaves_and_the_run_goes_on(
    at: str, way: str, tmp_path: Path, undisturbed: dppo.Result, capfd: pytest.CaptureFixture[str]
) -> None:
    pid = os.getpid()
    result = trained(at, way, tmp_path)
    assert os.getpid() == pid
    check(result, way, tmp_path, undisturbed)
    errors = capfd.readouterr().err
    is_printed = "RuntimeError: bug in the child" in errors
    assert is_printed == (way == "raise")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"env_threads": True}, {"standby_envs": 1}])
def test_a_fork_of_a_thread_leaves(
    changes: dict[str, Any], tmp_path: Path, undisturbed: dppo.Result
) -> None:
    result = trained("step", "exit", tmp_path, **changes)
    check(result, "exit", tmp_path, undisturbed)


@pytest.mark.slow
def test_a_fork_of_a_closing_environment_leaves(tmp_path: Path, undisturbed: dppo.Result) -> None:
    check(trained("close", "return", tmp_path), "return", tmp_path, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["exit", "raise"])
def test_a_fork_of_an_actor_leaves(
    way: str, tmp_path: Path, undisturbed: dppo.Result, ray_session: None
) -> None:
    result = trained("step", way, tmp_path, num_actors=1, env_id="worlds.forking:Forking")
    check(result, way, tmp_path, undisturbed)
