"""The cores that a process may use, by the quota of its cgroup, too, and the largest file that it may write."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from remedies import executes

from dppo import machine
from dppo.config import Config
from dppo.errors import ConfigError
from dppo.files import TooLarge, read_file
from dppo.records.files.disk import remedy
from dppo.records.observer import Result
from dppo.tools import compare
from dppo.tools.pictures import learning_curve as pictures
from dppo.transports.ray import capacity, core_use, session
from dppo.transports.ray.capacity import Demand

LIMIT = 2**20


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder in place of /sys/fs/cgroup, on a machine with four cores."""
    monkeypatch.setattr(machine, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "CGROUPS_OF_THIS_PROCESS", tmp_path / "of_this_process")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    return tmp_path / "cgroup"


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def limited(limits: str, program: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program in Python after these commands of a shell."""
    command = f'{limits}; {sys.executable} -B -S -c "$0" 2>&1'
    words = ["bash", "-c", command, program]
    path = os.pathsep.join(sys.path)
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        words, cwd=cwd, env=env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("quota", "cores", "words"),
    [
        ("50000 100000", 1, "4 cores, of which a quota (cgroup) allows 0.5"),
        ("150000 100000", 2, "4 cores, of which a quota (cgroup) allows 1.5"),
        ("800000 100000", 4, "4 cores"),
        ("max 100000", 4, "4 cores"),
        ("nonsense", 4, "4 cores"),
    ],
)
def test_a_quota_of_a_container_limits_the_cores(
    cgroups: Path, quota: str, cores: int, words: str
) -> None:
    put(cgroups / "cpu.max", quota)
    assert machine.usable_cores() == cores
    assert machine.cores_in_words() == words


def test_the_smallest_quota_of_the_groups_above_counts(cgroups: Path) -> None:
    put(machine.CGROUPS_OF_THIS_PROCESS, "0::/user.slice/job.scope")
    put(cgroups / "user.slice/job.scope/cpu.max", "max 100000")
    assert machine.usable_cores() == 4
    put(cgroups / "user.slice/cpu.max", "200000 100000")
    assert machine.usable_cores() == 2


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct", "cpu/docker/a", "cpu,cpuacct/docker"])
def test_a_quota_of_the_first_version_limits_the_cores(cgroups: Path, folder: str) -> None:
    put(
        machine.CGROUPS_OF_THIS_PROCESS,
        "11:memory:/docker/a\n4:cpu,cpuacct:/docker/a\n1:name=systemd:/",
    )
    put(cgroups / folder / "cpu.cfs_period_us", "100000")
    put(cgroups / folder / "cpu.cfs_quota_us", "-1")
    assert machine.usable_cores() == 4
    put(cgroups / folder / "cpu.cfs_quota_us", "120000")
    assert machine.usable_cores() == 2


def test_actors_that_join_and_leave_follow_a_quota(cgroups: Path) -> None:
    put(cgroups / "cpu.max", "50000 100000")
    notes: list[str] = []
    demand = Demand(num_actors=1, actor={"CPU": 1.0}, num_learners=0, learner={}, most_actors=8)
    assert capacity.fitted_here(demand, 0, notes.append).num_actors == 1
    assert notes == [
        "using 1 actor: this machine has 4 cores, of which a quota (cgroup) allows 0.5"
    ]


@pytest.mark.parametrize(
    ("version", "unit", "stat"),
    [("cpu.max", 10**6, "cpu.stat"), ("cpu.cfs_quota_us", 10**9, "cpuacct.usage")],
)
@pytest.mark.parametrize(("used_s", "notes"), [(9.5, 1), (5.0, 0)])
def test_what_a_run_used_is_compared_with_its_quota(
    version: str,
    unit: int,
    stat: str,
    used_s: float,
    notes: int,
    cgroups: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a quota of two cores, in 5 s; the machine's other cores may be idle."""
    folder = cgroups if version == "cpu.max" else cgroups / "cpu"
    put(folder / version, "200000 100000" if version == "cpu.max" else "200000")
    put(folder / "cpu.cfs_period_us", "100000")
    name = "usage_usec " if stat == "cpu.stat" else ""
    put(folder / stat, f"{name}{7 * unit}")
    monkeypatch.setattr("time.monotonic", lambda: 100.0)
    use = core_use.CoreUse(8)
    put(folder / stat, f"{name}{int((7 + used_s) * unit)}")
    monkeypatch.setattr("time.monotonic", lambda: 105.0)
    notes_of_run = use.notes()
    assert len(notes_of_run) == notes

    fact = "8 actors on 4 cores, of which a quota (cgroup) allows 2, busy for 95% of the time"
    assert all(fact in line for line in notes_of_run)


@executes("machine.py: {} Run `ulimit -f unlimited` first.")
def test_a_limit_of_the_size_of_files_is_named_and_removed_as_told(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from dppo.records.files.disk import write_file, writing\n"
        "path = pathlib.Path('file')\n"
        "with writing(path): write_file(path, bytes(5000))\n"
        "print(path.stat().st_size)"
    )
    printed = limited("ulimit -S -f 1", program, tmp_path).stdout
    fact = "file: cannot be written: File too large. This process may not write files larger than 1,024 bytes"
    assert f"{fact} (RLIMIT_FSIZE). Run `ulimit -f unlimited` first." in printed

    command = re.search("Run `(ulimit .*)` first", printed)
    assert command is not None
    assert limited(f"ulimit -S -f 1; {command[1]}", program, tmp_path).stdout == "5000\n"


def test_a_limit_that_the_user_cannot_remove_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1000, 2000))
    assert (
        "larger than 1,000 bytes (RLIMIT_FSIZE). Its hard limit is 2,000: start it in"
        in machine.file_size_remedy()
    )

    monkeypatch.setattr(
        resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    )
    assert machine.file_size_remedy() == ""

    text = remedy(OSError(errno.EFBIG, "File too large"))
    assert (
        text == "Its file system does not support files of this size. Use a folder on another disk."
    )


def test_ray_is_not_started_where_it_may_not_write_its_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the system ends it, and it says after a minute that it timed out."""
    monkeypatch.setattr(session, "file_size_limits", lambda: (LIMIT, 0))
    with pytest.raises(
        ConfigError, match=r"is a file of 83,886,080 bytes\..* `num_actors=0` trains without Ray"
    ):
        session._check_file_size(session.SMALLEST_STORE)
    monkeypatch.setattr(session, "file_size_limits", lambda: None)  # after `ulimit -f unlimited`
    session._check_file_size(session.SMALLEST_STORE)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "Free some disk space."),
        (errno.EDQUOT, "Delete files of yours on this disk"),
        (errno.EROFS, "mounted read-only"),
        (errno.EACCES, "Give yourself read and write permission"),
        (errno.EPERM, "Give yourself read and write permission"),
        (errno.EMFILE, "Run `ulimit -n 4096` first"),
        (errno.EIO, "Check the disk."),
    ],
)
def test_each_error_of_a_disk_has_its_remedy(number: int, words: str) -> None:
    assert words in remedy(OSError(number, os.strerror(number)))


def test_a_file_that_is_too_large_to_read_is_no_limit_of_writing(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    with pytest.raises(TooLarge, match="has 100 bytes, more than 10") as raised:
        read_file(tmp_path / "file", 10)
    assert remedy(raised.value) == "Restore it from a backup."


@executes(
    "records/files/disk.py: Use a shorter name.",
    "records/files/disk.py: Run `ulimit -n 4096` first, which allows more open files.",
)
def test_names_and_numbers_of_open_files_are_changed_as_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="name") as raised:
        (tmp_path / ("a" * 300)).write_text("")
    assert remedy(raised.value) == "Use a shorter name."
    (tmp_path / ("a" * 20)).write_text("")
    program = "files = [open('/dev/null') for _ in range(50)]; print(len(files))"
    assert limited("ulimit -S -n 20", program, tmp_path).returncode == 1
    assert limited("ulimit -S -n 20; ulimit -S -n 4096", program, tmp_path).returncode == 0


def test_a_picture_and_a_comparison_that_cannot_be_written_say_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def too_large(*arguments: object, **options: object) -> None:
        raise OSError(errno.EFBIG, "File too large")

    result = SimpleNamespace(
        run_dir=tmp_path, picture=tmp_path / "learning_curve.png", config=None, iterations=0
    )
    monkeypatch.setattr(pictures, "read_metrics", lambda _: [])
    monkeypatch.setattr(pictures, "learning_curve", too_large)
    pictures.LearningCurve("title").on_end(cast(Result, result), None)
    assert not caplog.messages, "a run without an iteration has no picture"
    result.iterations = 1
    pictures.LearningCurve("title").on_end(cast(Result, result), None)
    assert "learning_curve.png: cannot be written: File too large. " in caplog.messages[0]
    assert "Errno" not in caplog.messages[0]

    (tmp_path / "file").write_text("")
    options = compare.Options()
    plan = [Config(env_id="CartPole-v1")]
    with pytest.raises(ConfigError, match=r"compare\.json: cannot be written: "):
        compare._write_json(options, plan, [], tmp_path / "file" / "compare.json")
