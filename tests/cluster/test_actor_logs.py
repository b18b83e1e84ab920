"""The log of an actor holds what it and its simulators print; processes that outlive an actor are ended."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import psutil
import pytest
from builders import tiny_run
from children import with_children
from commandline import SOURCE, TESTS
from processes import actors_of_this_process, alive, wait_until
from recorder import Notes, Recorder

import dppo
from dppo.errors import CheckpointError, ClusterError
from dppo.hosts import keeper
from dppo.records.files.run_files import check_run_files
from dppo.transports import in_process

Patch = pytest.MonkeyPatch


def settings(run_dir: Path, env_id: Any, **changes: Any) -> dppo.Config:
    hosted: dict[str, Any] = {"env_id": env_id, "num_actors": 1}
    return tiny_run(run_dir, steps=40, iterations=4, **hosted | changes)


class Noisy(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole with children, which prints."""

    def __init__(self, pids: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        with_children(pids)
        print("printed by the simulator")

    def close(self) -> None:
        print("closed by the simulator")


class Dying(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that ends its process in the third step."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.steps = 0

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            print("printed before its death")
            os._exit(13)
        return self.env.step(action)


def ended(script: str, *arguments: Path | str) -> int:
    """Run a script to its end, and return its process id."""
    path = os.pathsep.join((str(SOURCE), str(TESTS), str(Path(__file__).parent)))
    words = [sys.executable, "-c", script, *map(str, arguments)]
    process = subprocess.Popen(words, env=os.environ | {"PYTHONPATH": path})
    process.wait()
    return process.pid


@pytest.mark.proves("starts processes that outlive it, also detached ones")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_simulator_has_started_ends_with_its_actor(
    number: signal.Signals, tmp_path: Path, ray_session: None
) -> None:
    pids = tmp_path / "pids"

    def children() -> list[int]:
        return [int(pid) for pid in pids.read_text().split()]

    def wait_for_end(processes: list[int]) -> None:
        wait_until(lambda: not any(map(alive, processes)), 5.0)

    def kill(iteration: int) -> None:
        if iteration == 2:
            for pid in actors_of_this_process():
                os.kill(pid, number)
            assert len(children()) == 3
            wait_for_end(children())

    wait_until(lambda: not actors_of_this_process())
    config = settings(tmp_path / "run", Noisy, env_kwargs={"pids": str(pids)})
    with Notes() as notes:
        dppo.train(config, observers=[Recorder(after_iteration=kill)])
    wait_for_end(children())

    log = (tmp_path / "run" / "logs" / "actor-0.log").read_text()
    # of both processes
    assert log.count("printed by a child") == 2
    assert log.count("printed by the simulator") == 2

    times_closed = 1 if number == signal.SIGKILL else 2
    assert log.count("closed by the simulator") == times_closed
    assert any("actor 0" in text and "printed by the simulator" in text for text in notes.texts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overlap", [False, True], ids=["without a queue", "with a question in the queue"]
)
def test_environments_of_a_recycled_actor_are_closed(
    overlap: bool, tmp_path: Path, ray_session: None
) -> None:
    changes: dict[str, Any] = {
        "env_kwargs": {"pids": str(tmp_path / "pids")},
        "recycle_after": "1segments",
    }
    config = settings(tmp_path / "run", Noisy, overlap=overlap, **changes)
    assert dppo.train(config).incidents["actor_recycled"] > 1
    log = tmp_path / "run" / "logs" / "actor-0.log"
    wait_until(lambda: log.read_text().count(" began\n") == log.read_text().count(" ended "), 10.0)
    text = log.read_text()
    assert text.count("closed by the simulator") == text.count("printed by the simulator") > 2
    assert text.count(f" ended {keeper.CLOSED}\n") == text.count(" began\n")


@pytest.mark.proves("ends its process with an exit code or a signal")
@pytest.mark.slow
def test_a_death_names_its_cause_its_place_and_its_log(tmp_path: Path, ray_session: None) -> None:
    config = settings(tmp_path / "run", Dying, max_actor_restarts=0)
    with pytest.raises(ClusterError) as caught:
        dppo.train(config)

    report = str(caught.value)
    run = tmp_path / "run"
    assert re.search(
        r"died.*, stepping env 0 of sampler 0, episode 0, step 3 \(seed \d+\); its log: .*actor-0.log\n",
        report,
    )
    assert "printed before its death" in report
    assert report in (run / "incidents" / "001" / "report.txt").read_text()
    assert "printed before its death" in (run / "logs" / "actor-0.log").read_text()


EXIT = """
import os, sys
from dppo.transports.ray import progress_file
from dppo.hosts import keeper
marker, record = progress_file.make_progress_file()
keeper.begin_log(sys.argv[1], marker)
if sys.argv[2] == "closed":
    os.remove(marker)
os._exit(1)
"""


@pytest.mark.parametrize(
    ("state", "ends"),
    # "": the kernel does not show exit codes
    [("closed", [keeper.CLOSED]), ("open", ["with exit code 1", ""])],
)
def test_only_a_fault_leaves_an_exit_code_in_the_log(
    state: str, ends: list[str], tmp_path: Path
) -> None:
    """Ray ends an actor at the end of a run with exit code 1."""
    log = tmp_path / "log"
    pid = ended(EXIT, log, state)
    status, _ = keeper.end_of_log(str(log), pid)
    assert status in ends
    with log.open("a") as file:
        file.write("of a solver that ended later\n")
    assert keeper.end_of_log(str(log), pid) == (status, [])
    with log.open("a") as file:
        file.write(f"a copy: dppo: process {pid} ended {status}\n")
    assert keeper.end_of_log(str(log), pid)[0] == status


ORPHAN = """
import os, sys, subprocess, time
from dppo.transports.ray import progress_file
from dppo.hosts import keeper
if sys.argv[2] == "raylet":
    subprocess.Popen([sys.argv[3], __file__, sys.argv[1], "actor"])
    time.sleep(1000)
marker, record = progress_file.make_progress_file()
keeper.begin_log(sys.argv[1], marker)
subprocess.Popen(["sleep", "1000"], start_new_session=True)
print("ready", flush=True)
time.sleep(1000)
"""


@pytest.mark.proves("loses the raylet of its node, in a container that reaps no processes")
def test_an_actor_ends_with_its_raylet_even_if_nobody_reaps_that(tmp_path: Path) -> None:
    """As in a container whose first process reaps no others: Ray takes the zombie for a raylet that works."""
    raylet = tmp_path / "raylet"
    raylet.symlink_to(sys.executable)
    program = tmp_path / "program.py"
    program.write_text(ORPHAN)
    log = tmp_path / "log"
    parent = subprocess.Popen(
        [raylet, program, log, "raylet", sys.executable],
        env=dict(os.environ, PYTHONPATH=str(SOURCE)),
    )
    try:
        wait_until(lambda: log.exists() and "ready" in log.read_text())
        [actor] = psutil.Process(parent.pid).children()
        [simulator] = actor.children()
        assert alive(actor.pid)
        parent.kill()  # it is not waited for
        wait_until(lambda: not alive(actor.pid) and not alive(simulator.pid))
    finally:
        parent.kill()
        parent.wait()


CRASH = """
import ctypes, faulthandler, sys
from dppo.transports.ray import progress_file
from dppo.hosts import keeper
marker, record = progress_file.make_progress_file()
keeper.begin_log(sys.argv[1], marker)
faulthandler.enable()
def crash_here(depth):
    return crash_here(depth - 1) if depth else ctypes.string_at(0)
crash_here(30)
"""


def test_the_end_of_a_log_begins_with_the_innermost_line_of_a_crash(tmp_path: Path) -> None:
    log = tmp_path / "log"
    pid = ended(CRASH, log)
    with log.open("a") as file:
        file.write("Extension modules: " + "numpy.random, " * 300 + "\n")
    _, lines = keeper.end_of_log(str(log), pid)
    assert lines[0].startswith("Fatal Python error: Segmentation fault")
    assert any(line.endswith("in crash_here") for line in lines)


PROGRAM = """
import os, sys, time
from dppo.transports.ray import progress_file
from dppo.hosts import keeper
from children import with_children
marker, record = progress_file.make_progress_file()
keeper.begin_log(sys.argv[1], marker)
print("first words", flush=True)
with_children(sys.argv[2])
for _ in range(60):
    os.write(1, b"x" * 2**16 + b"\\n")
    time.sleep(0.01)
while not os.path.exists(sys.argv[1] + ".1"):  # the keeper has looked, also on a busy machine
    time.sleep(0.01)
print("last \\x1b words", flush=True)
os.remove(marker)
os.kill(os.getpid(), 9)
"""


@pytest.mark.proves("prints megabytes")
def test_a_keeper_ends_all_children_and_keeps_a_short_log(tmp_path: Path) -> None:
    """As an actor does, without Ray."""
    log = tmp_path / "log"
    pids = tmp_path / "pids"
    ending, lines = keeper.end_of_log(str(log), ended(PROGRAM, log, pids))
    assert ending in ("by SIGKILL", "")  # Linux tells since 6.15
    assert lines[-2:] == ["last ", " words"]
    assert (tmp_path / "log.1").stat().st_size == keeper.MAX_LOG_BYTES
    assert log.stat().st_size < 60 * 2**16
    wait_for_ends(pids)


def wait_for_ends(pids: Path) -> None:
    children = [int(pid) for pid in pids.read_text().split()]
    assert len(children) == 3
    wait_until(lambda: not any(map(alive, children)), 5.0)


BLOCKED = """
os.remove(sys.argv[1])
os.mkfifo(sys.argv[1])  # blocks all that write to it
os.kill(os.getpid(), 9)
"""


def test_a_keeper_ends_all_children_also_while_its_disk_blocks(tmp_path: Path) -> None:
    ended(PROGRAM.partition("for _")[0] + BLOCKED, tmp_path / "log", tmp_path / "pids")
    wait_for_ends(tmp_path / "pids")


def test_a_keeper_counts_the_head_as_lost_once_it_cannot_be_reached_for_long(
    monkeypatch: Patch,
) -> None:
    """An actor that is cut off has been replaced; `test_solvers_on_hosts.py` cuts a real cable."""
    monkeypatch.setattr(keeper, "HEAD_PERIOD_S", 0.0)
    head = keeper._Head("127.0.0.1:1")  # where nobody listens, but which can be reached
    assert not head.is_lost()
    monkeypatch.setattr(keeper, "_is_reachable", lambda _: False)
    assert not head.is_lost()
    monkeypatch.setattr(keeper, "HEAD_LOST_S", 0.0)
    assert head.is_lost()
    assert not keeper._Head("").is_lost()


@pytest.mark.proves("is killed by the kernel for lack of memory")
def test_a_kill_for_lack_of_memory_is_named_as_such(monkeypatch: Patch) -> None:
    for code, lacks_memory, ending in (
        (-9, True, keeper.LACK),
        (None, True, keeper.LACK),
        (3, True, "with exit code 3"),
        (-9, False, "by SIGKILL"),
        (None, False, ""),
    ):
        monkeypatch.setattr(keeper, "_exit_code", lambda _, code=code: code)
        assert keeper._status([], for_memory=lacks_memory) == ending
    for code, ending in ((1, keeper.CLOSED), (None, keeper.CLOSED), (7, "with exit code 7")):
        monkeypatch.setattr(keeper, "_exit_code", lambda _, code=code: code)
        assert keeper._status([], for_memory=False, was_closed=True) == ending
    assert keeper._kills_for_memory() >= 0
    assert len(keeper._last_line(2**22, keeper.LACK)) < keeper.END_CHARACTERS


@pytest.mark.proves("dies again and again on a node without the run's folder")
def test_only_some_logs_of_processes_that_have_ended_stay_where_there_is_no_run_folder(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(keeper, "KEPT_LOGS", 2)
    marker = str(tmp_path / "dppo-progress-00000000")
    for name in (
        "dppo-log-0000000a",
        "dppo-log-0000000b.1",
        "dppo-log-0000000c",
        "dppo-log-00000000",
        "dppo-log-lives",
    ):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (tmp_path.stat().st_ctime, len(list(tmp_path.iterdir()))))
    for name in ("dppo-progress-00000000", "dppo-progress-00000000.stacks", "dppo-progress-lives"):
        (tmp_path / name).touch()
    keeper._tidy(marker, str(tmp_path / "run" / "logs" / "actor-0.log"))
    assert len(list(tmp_path.iterdir())) == 6  # of a log elsewhere, only the progress file

    keeper._tidy(marker, str(tmp_path / "dppo-log-00000000"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [
        "dppo-log-00000000",
        "dppo-log-0000000c",
        "dppo-log-lives",
        "dppo-progress-lives",
    ]


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_log_that_leads_elsewhere_is_not_written_to(
    link: Any, tmp_path: Path, monkeypatch: Patch
) -> None:
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "logs").mkdir()
    link(tmp_path / "precious", tmp_path / "logs" / "actor-0.log")
    monkeypatch.setenv(keeper.MARKER, "")  # restored afterwards
    assert keeper.begin_log(str(tmp_path / "logs" / "actor-0.log"), "") == ""
    assert (tmp_path / "precious").read_text() == "precious"
    if link is os.symlink:
        with pytest.raises(CheckpointError, match=r"actor-0.log: is a symbolic link"):
            check_run_files(tmp_path)


class Clinging(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that does not close."""

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def close(self) -> None:
        time.sleep(3600)


@pytest.mark.proves("hangs when it is closed, in process")
def test_environments_that_do_not_close_are_left_alone_in_process(
    tmp_path: Path, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(in_process, "CLOSING_S", 0.1)
    # of pytest-timeout
    alarm = signal.getsignal(signal.SIGALRM)
    before, _ = signal.getitimer(signal.ITIMER_REAL)
    result = dppo.train(settings(tmp_path / "run", Clinging, num_actors=0, num_samplers=2))
    assert result.iterations == 2
    shown = capfd.readouterr().err
    assert shown.count("TimeoutError: not done within 0.1 s") == 1
    assert f"1 other environment raised the same in close(): TimeoutError ({__file__}, " in shown
    assert signal.getsignal(signal.SIGALRM) is alarm
    after, _ = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < after < before
