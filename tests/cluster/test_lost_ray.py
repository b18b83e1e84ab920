"""Ray's own processes die during a run: it saves and ends with an error, before Ray would end it without one."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from commandline import Command
from processes import in_ray_thread, wait_until

import dppo
from dppo.errors import ClusterError
from dppo.transports.ray import watch as watching
from dppo.transports.ray.calls import RayCalls, calls_ray
from dppo.transports.ray.clock import MOST_S, RunClock
from dppo.transports.ray.watch import CALL_LOST_S, LOST_S, ClusterWatch, Endpoint

# try for a minute to report to the GCS
HELPERS_OF_RAY = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
# Each iteration takes about a second, so that the kill happens during a collection.
RUN = """train dppo/SlowCartPole-v0 --preset none --run-dir run --progress plain
    --num-actors 2 --num-samplers 2 --num-steps 64 --total-timesteps 1000000"""


class Listener:
    """A server that answers to everybody, as one of gRPC does."""

    def __init__(self, port: int = 0) -> None:
        self._server = socket.create_server(("127.0.0.1", port))
        self.port: int = self._server.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        threading.Thread(target=self._serve, daemon=True).start()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection:
                    connection.sendall(bytes(9))


@pytest.fixture
def listener() -> Iterator[Listener]:
    with Listener() as server:
        yield server


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_process_is_lost_after_its_port_has_refused_connections_without_a_break(
    listener: Listener,
) -> None:
    watched = Endpoint("the raylet", listener.address, patience_s=2.0)
    assert watched.look(now=lambda: 0.0) is None
    listener.close()
    assert watched.look(now=lambda: 10.0) is None
    with Listener(listener.port):
        assert watched.look(now=lambda: 11.0) is None
    assert watched.look(now=lambda: 13.0) is None
    assert watched.look(now=lambda: 14.9) is None
    assert watched.look(now=lambda: 15.0) == "Connection refused"


def test_a_process_that_accepts_connections_and_says_nothing_is_silent(
    silent: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is stopped, for which the kernel accepts."""
    monkeypatch.setattr(watching, "CONNECT_S", 0.1)
    watched = Endpoint("Ray's GCS", f"127.0.0.1:{silent.getsockname()[1]}", patience_s=0.0)
    assert watched.look(now=lambda: 0.0) is None
    assert watched.look(now=lambda: LOST_S - 1) is None
    assert watched.look(now=lambda: LOST_S) == f"it has not answered for {LOST_S:.0f} s"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError(), f"it has not answered for {LOST_S:.0f} s"),
        (OSError(24, "Too many open files"), None),
    ],
)
def test_a_machine_that_does_not_answer_has_more_time_and_a_fault_of_this_process_is_ignored(
    error: OSError, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> socket.socket:
        raise error

    monkeypatch.setattr(socket, "create_connection", fails)
    watched = Endpoint("the raylet", "10.0.0.1:1", patience_s=2.0)
    assert watched.look(now=lambda: 0.0) is None
    assert watched.look(now=lambda: LOST_S - 1) is None
    assert watched.look(now=lambda: LOST_S) == reason


def test_the_watch_names_the_lost_process_and_how_to_resume(listener: Listener) -> None:
    watch = ClusterWatch(print, RunClock())
    watch.add_endpoints([Endpoint("Ray's GCS", listener.address, patience_s=0.0)])
    try:
        watch.check()
        listener.close()
        with pytest.raises(
            ClusterError, match=rf"Ray's GCS at {listener.address} is lost .*refused.*--resume"
        ):
            check_until_it_raises(watch)
    finally:
        watch.close()


class Watched:
    """A watch with a clock that a test moves, and the lines that it has logged."""

    def __init__(self) -> None:
        self.now = 0.0
        self.clock = RunClock(lambda: self.now)
        self.lines = list[str]()
        self.watch = ClusterWatch(self.lines.append, self.clock)
        self.gcs = Endpoint("Ray's GCS", "10.0.0.1:6379", patience_s=0.0)
        self.watch._endpoints = [self.gcs]

    def let_pass(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.clock.beat()
            self.watch._note_silence()
            self.watch.check()


def test_a_silence_is_told_once_and_so_is_its_end_and_actors_are_not_late_meanwhile() -> None:
    watched = Watched()
    watched.let_pass(20)
    assert (watched.clock.patience(), watched.lines) == (20.0, [])

    watched.gcs.failing_since = 20.0
    watched.let_pass(25)
    [line] = watched.lines
    waits = r"Ray's GCS at 10.0.0.1:6379 has not answered for 1\d s\. The run waits.*same result"
    assert re.search(waits, line)
    assert watched.clock.awake() == 45.0
    # it stops when nobody has answered for a moment
    assert watched.clock.patience() == pytest.approx(25.0)

    watched.gcs.failing_since = None
    watched.let_pass(5)
    [_, line] = watched.lines
    assert line.startswith("Ray answers again, after 26 s")
    assert watched.clock.patience() == pytest.approx(30.0, abs=1.0)
    assert watched.watch.silences == 1


def test_a_short_silence_of_a_busy_machine_is_no_doubt_about_actors_that_start() -> None:
    watched = Watched()
    watched.gcs.failing_since = 0.0
    watched.let_pass(8)
    watched.gcs.failing_since = None
    watched.let_pass(4)
    assert watched.clock.patience() == pytest.approx(8.0)  # it stands still from 5 to 9 s
    assert watched.watch.silences == 0
    assert watched.lines == []


def test_a_call_that_does_not_end_is_told_and_ends_the_run() -> None:
    """While the processes of Ray answer: packets are lost now and then, or the GCS is stuck."""
    watched = Watched()
    with waiting_for(watched, "starting an actor"):
        watched.let_pass(int(CALL_LOST_S))
        [line] = watched.lines
        assert line.startswith("Ray (starting an actor) has not answered for 11 s. ")
        assert f"{CALL_LOST_S:.0f} s at most" in line
        assert "Look at the network" in line
        with pytest.raises(
            ClusterError, match=r"Ray .* has not answered for 91 s \(starting an actor\).*--resume"
        ):
            watched.let_pass(1)


@contextmanager
def waiting_for(watched: Watched, action: str) -> Iterator[None]:
    """Wait in another thread for a call that does not end."""
    over = threading.Event()
    calls = RayCalls("test", watched.clock.awake)
    watched.watch.add_calls(calls)
    calls.post(lambda: over.wait(60), action)
    wait_until(lambda: calls.waiting()[1])
    try:
        yield
    finally:
        over.set()
        assert calls.close(60)


def test_a_ray_that_does_not_start_here_is_no_matter_of_the_network_and_leaves_nothing_to_resume() -> (
    None
):
    watched = Watched()
    watched.watch = ClusterWatch(watched.lines.append, watched.clock, started_here=True)
    watched.watch.is_starting = True
    with waiting_for(watched, "starting Ray"):
        watched.let_pass(int(CALL_LOST_S))
        [line] = watched.lines
        assert f"{CALL_LOST_S:.0f} s at most" in line
        assert "Ray runs on this machine alone, which may be too busy" in line
        assert "network" not in line
        nothing = (
            r"cannot start without it\. Nothing was trained, .* Start again, or use `num_actors=0`"
        )
        with pytest.raises(ClusterError, match=nothing) as lost:
            watched.let_pass(1)
        assert "--resume" not in str(lost.value)


def test_a_process_that_was_stopped_counts_no_time_meanwhile() -> None:
    now = [100.0]
    clock = RunClock(lambda: now[0])
    now[0] += 120.0  # without a beat: SIGSTOP, a suspended laptop
    assert clock.awake() == clock.patience() == 100.0 + MOST_S
    clock.beat()
    now[0] += 1.0
    assert clock.awake() == clock.patience() == 101.0 + MOST_S


def test_calls_are_made_in_order_and_whoever_waits_can_be_interrupted() -> None:
    class Stop(BaseException):
        pass

    def stop() -> None:
        raise Stop

    calls = RayCalls("test")
    calls_made = list[str]()
    entered = threading.Event()

    def endless() -> None:
        entered.set()
        while True:
            calls.heard()
            time.sleep(0.01)

    def fails() -> None:
        raise OSError("no answer")

    calls.post(lambda: calls_made.append("first"), "first")
    assert calls.call(lambda: calls_made.append("second"), "second") is None
    assert calls_made == ["first", "second"]
    with pytest.raises(ClusterError, match=r"Ray has not answered for 0.1 s \(endless\)"):
        calls.call(endless, "endless", timeout_s=0.1)
    assert calls.call(lambda: 7, "after it") == 7, "the endless call has ended"
    with pytest.raises(Stop):
        calls.call(endless, "endless", stop)
    with pytest.raises(OSError, match="no answer"):
        calls.call(fails, "failing")

    calls.check()
    calls.post(fails, "failing")
    assert calls.close(60)
    with pytest.raises(ClusterError, match="Ray has failed: OSError: no answer"):
        calls.check()


def test_functions_that_call_ray_refuse_other_threads() -> None:
    marked = calls_ray(lambda: 3)
    assert in_ray_thread(marked) == 3
    with pytest.raises(AssertionError, match="outside of a RayThread"):
        marked()


def check_until_it_raises(watch: ClusterWatch) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        watch.check()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("process", "name", "flags"),
    [
        ("gcs_server", "Ray's GCS", ""),
        ("raylet", "the raylet", ""),
        ("raylet", "the raylet", "--hidden-sizes 256 256"),  # not inline
        ("gcs_server", "Ray's GCS", "--num-learners 2"),
        ("raylet", "the raylet", "--num-learners 2"),
    ],
)
def test_a_run_that_loses_ray_saves_and_ends(
    process: str, name: str, flags: str, tmp_path: Path
) -> None:
    with Command(f"{RUN} {flags}".split(), tmp_path) as command:
        metrics = tmp_path / "run" / "metrics.jsonl"
        command.wait_until(
            lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 1, 120
        )
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
    assert (
        sorted((tmp_path / "run" / "checkpoints").glob("iter_*.safetensors"))[-1].name
        >= "iter_000001"
    )
