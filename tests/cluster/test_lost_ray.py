"""Ray's own processes die during a run: it saves and ends with an error, before Ray would end it without one."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import Command

import dppo
from dppo.cluster.ray.watch import ClusterWatch, Endpoint
from dppo.errors import ClusterError

HELPERS_OF_RAY = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")  # try for a minute to report to the GCS
# Each iteration takes about a second, so that the kill happens during a collection.
RUN = (
    *("train", "dppo/SlowCartPole-v0", "--preset", "none", "--run-dir", "run", "--progress", "plain"),
    *("--num-actors", "2", "--num-samplers", "2", "--num-steps", "64", "--total-timesteps", "1000000"),
)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_process_is_lost_after_its_port_has_refused_connections_without_a_break(listener: socket.socket) -> None:
    host, port = listener.getsockname()
    watched = Endpoint("the raylet", f"{host}:{port}", patience_s=2.0)
    assert watched.look(now=lambda: 0.0) is None
    listener.close()
    assert watched.look(now=lambda: 10.0) is None
    with socket.create_server((host, port)):
        assert watched.look(now=lambda: 11.0) is None
    assert watched.look(now=lambda: 13.0) is None
    assert watched.look(now=lambda: 14.9) is None
    assert watched.look(now=lambda: 15.0) == "Connection refused"


@pytest.mark.parametrize(
    ("error", "said"), [(TimeoutError(), "it does not answer"), (OSError(24, "Too many open files"), None)]
)
def test_a_machine_that_does_not_answer_has_more_time_and_a_fault_of_this_process_is_ignored(
    error: OSError, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", fails)
    watched = Endpoint("the raylet", "10.0.0.1:1", patience_s=2.0)
    assert watched.look(now=lambda: 0.0) is None
    assert watched.look(now=lambda: 14.0) is None
    assert watched.look(now=lambda: 15.0) == said


def test_the_watch_names_the_lost_process_and_how_to_resume(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    watch = ClusterWatch([Endpoint("Ray's GCS", f"127.0.0.1:{port}", patience_s=0.0)])
    try:
        watch.check()
        listener.close()
        with pytest.raises(ClusterError, match=rf"Ray's GCS at 127.0.0.1:{port} is lost .*refused.*--resume"):
            check_until_it_raises(watch)
    finally:
        watch.close()


def check_until_it_raises(watch: ClusterWatch) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        watch.check()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "name", "more"),
    [
        ("gcs_server", "Ray's GCS", ()),
        ("raylet", "the raylet", ()),
        ("raylet", "the raylet", ("--hidden-sizes", "256", "256")),  # not inline
        ("gcs_server", "Ray's GCS", ("--num-learners", "2")),
        ("raylet", "the raylet", ("--num-learners", "2")),
    ],
)
def test_a_run_that_loses_ray_saves_and_ends(process: str, name: str, more: tuple[str, ...], tmp_path: Path) -> None:
    with Command([*RUN, *more], tmp_path) as command:
        metrics = tmp_path / "run" / "metrics.jsonl"
        command.wait_until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 1, 120)
        (pid,) = (pid for pid, line in command.processes().items() if f"/{process} " in line)
        os.kill(pid, signal.SIGKILL)
        assert command.wait(90) == 1
        assert f"{name} at " in command.err
        assert "is lost (Connection refused)" in command.err
        assert "--resume" in command.err
        assert "Traceback" not in command.err
        assert "state-dump" not in command.out + command.err, "pages of Ray"
        command.leaves_nothing_within(60, but=HELPERS_OF_RAY)
    assert dppo.load_policy(tmp_path / "run").weights.any()
    assert sorted((tmp_path / "run" / "checkpoints").glob("iter_*.safetensors"))[-1].name >= "iter_000001"
