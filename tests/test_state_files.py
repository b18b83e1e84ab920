"""States by reference: files and folders that `get_state` returns as paths are kept in the run folder, not copied."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import tiny_run
from commandline import Command
from commandline import run as run_command
from processes import Disturbance, send
from recorder import Recorder
from remedies import executes

import dppo
from dppo.envs.linked import are_equal, link, listing
from dppo.envs.state_files import NotKept, StateFiles, StateLost, StatePlace
from dppo.errors import ConfigError, EnvironmentFault
from dppo.files import SCRATCH
from dppo.plain_data import packed, unpacked

SIZES: dict[str, Any] = {
    "num_samplers": 2,
    "envs_per_sampler": 2,
    "num_steps": 16,
    "total_timesteps": 6 * 64,
    "update_epochs": 2,
}
HUGE = 10 * 2**30  # bytes, of which 16 are written


def settings(run_dir: Path, kwargs: dict[str, Any] | None = None, **changes: Any) -> dppo.Config:
    base = {"env_id": "worlds.restarts:Restarting", "env_kwargs": kwargs or {}}
    return tiny_run(run_dir, **SIZES | base | changes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], str]:
    """Return a function: the weights of a run that was not stopped, with hidden state or without."""

    @cache
    def weights(hidden: bool) -> str:
        run_dir = tmp_path_factory.mktemp("uninterrupted") / "run"
        return dppo.train(settings(run_dir, {"hidden": hidden})).weights_sha256

    return weights


def entries(run_dir: Path) -> list[Path]:
    """Return the kept states of a run."""
    return sorted((run_dir / "states").glob("[0-9]*/*"))


def stopped_and_resumed(
    run_dir: Path, kwargs: dict[str, Any], disturb: Any = None, **changes: Any
) -> tuple[Any, Recorder]:
    """Stop a run after iteration 3, let `disturb` change its kept files, and resume it."""
    config = settings(run_dir, kwargs, **changes)
    dppo.train(config, observers=[Recorder(interrupt_at=3)])
    if disturb is not None:
        for entry in entries(run_dir):
            disturb(entry / "content")
    recorder = Recorder()
    result = dppo.train(config, resume=run_dir, observers=[recorder])
    return result, recorder


@pytest.mark.parametrize(
    ("kwargs", "changes"),
    [
        ({"hidden": True}, {}),
        ({"files": 3}, {"env_state": "own"}),
        pytest.param({"size": HUGE, "hidden": True}, {}, marks=pytest.mark.slow),
        pytest.param({"size": HUGE, "hidden": True}, {"env_state": "own"}, marks=pytest.mark.slow),
        pytest.param({"hidden": True}, {"policy_lag": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_state_by_reference_survives_a_stop(
    kwargs: dict[str, Any],
    changes: dict[str, Any],
    uninterrupted: Callable[[bool], str],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    resumed, _ = stopped_and_resumed(run_dir, kwargs, **changes)
    assert resumed.incidents == {}
    if "policy_lag" not in changes:
        assert resumed.weights_sha256 == uninterrupted("hidden" in kwargs)
    if "env_state" in changes:
        assert sum(row["replay/steps"] for row in resumed.metrics) == 0

    # the last checkpoints need one moment each, or two with proofs, of four environments
    checkpoints = list((run_dir / "checkpoints").glob("iter_*"))
    assert 0 < len(entries(run_dir)) <= 8 * len(checkpoints)
    files = [path for path in (run_dir / "states").glob("**/*") if path.is_file()]
    written = sum(file.stat().st_blocks * 512 for file in files)
    assert written < 1e6


@pytest.mark.parametrize(
    ("change", "env_state"),
    [
        ("changed", "auto"),
        ("deleted", "own"),
        pytest.param("changed", "own", marks=pytest.mark.slow),
        pytest.param("deleted", "auto", marks=pytest.mark.slow),
        pytest.param("gone", "auto", marks=pytest.mark.slow),
        pytest.param("gone", "own", marks=pytest.mark.slow),
    ],
)
def test_files_that_were_changed_behind_our_back_are_named_and_the_episode_is_replayed(
    change: str, env_state: str, uninterrupted: Callable[[bool], str], tmp_path: Path
) -> None:
    def disturb(content: Path) -> None:
        (path,) = content.iterdir()
        if change == "changed":
            path.write_bytes(bytes(16))
        elif change == "deleted":
            path.unlink()
        else:
            shutil.rmtree(content.parent)

    resumed, recorder = stopped_and_resumed(tmp_path / "run", {}, disturb, env_state=env_state)
    assert resumed.weights_sha256 == uninterrupted(False)
    assert resumed.incidents == {"own_state": 2}

    message = recorder.incidents[0].message
    words = {"gone": "does not exist on", "changed": "was changed", "deleted": "was deleted"}
    assert str(tmp_path / "run" / "states" / "0") in message
    assert words[change] in message
    assert "The episode is replayed." in message


@pytest.mark.slow
@pytest.mark.parametrize("num_actors", [1, 2])
def test_a_state_by_reference_moves_with_its_sampler(
    num_actors: int, ray_session: None, uninterrupted: Callable[[bool], str], tmp_path: Path
) -> None:
    kwargs: dict[str, Any] = {"hidden": True, "size": HUGE, "sleep_s": 0.01}
    config = settings(tmp_path / "there", kwargs, num_actors=num_actors)
    with Disturbance("PPOActor.make_segment", send(signal.SIGKILL), times=2):
        there = dppo.train(config)
    assert there.incidents["actor_lost"] >= 2
    assert there.weights_sha256 == uninterrupted(True)
    assert "replay_mismatch" not in there.incidents


KILLED = (
    *("train", "worlds.restarts:Restarting", "--preset", "none", "--num-samplers", "2"),
    *("--envs-per-sampler", "2", "--num-steps", "16", "--total-timesteps", "1280"),
    *("--update-epochs", "1", "--checkpoint-interval-s", "0", "--progress", "plain"),
    *("--run-dir", "run", "--resume", "auto"),
)


def needed_by_checkpoints(run_dir: Path) -> set[str]:
    """Return the names of the states that the checkpoints of a run need, after checking that all are complete."""
    names = set[str]()
    for checkpoint in (run_dir / "checkpoints").glob("iter_*"):
        if "iter_000000" not in checkpoint.name:  # its episodes have not begun
            needed = run_dir / "states" / "needed" / checkpoint.name
            names.update(needed.read_text().split())
    place = StatePlace(run_dir / "run.lock", b"", 4)
    for name in names:
        sampler, _, entry = name.partition("/")
        StateFiles(place, int(sampler)).kept(entry)
    return names


def weights_of_command(folder: Path, *flags: str, kills: Sequence[int] = ()) -> bytes:
    """Return the weights of a command that was killed after these numbers of iterations, and resumed each time."""
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    words = [*KILLED, *flags]
    for iterations in kills:
        with Command(words, folder, TMPDIR=str(temporary)) as command:
            command.wait_until(partial(has_rows, folder / "run", iterations), 120)
            command.send(signal.SIGKILL)
            command.wait(30)
        assert needed_by_checkpoints(folder / "run")
    code, out, err = run_command(words, folder, 200, TMPDIR=str(temporary))
    assert code == 0, out + err
    return dppo.load_policy(folder / "run").weights.tobytes()


def has_rows(run_dir: Path, number: int) -> bool:
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_bytes().count(b"\n") >= number


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kwargs", "flags"),
    [({"files": 3}, ["--env-state", "own"]), ({"hidden": True}, ["--num-actors", "2"])],
    ids=str,
)
def test_a_run_whose_process_is_killed_loses_no_state_by_reference_and_leaves_none_over(
    kwargs: dict[str, Any], flags: list[str], tmp_path: Path
) -> None:
    slow = ["--env-kwargs", json.dumps(kwargs | {"sleep_s": 0.002})]
    calm = weights_of_command(tmp_path / "calm", *slow)
    killed = tmp_path / "killed"
    assert weights_of_command(killed, *slow, *flags, kills=[2, 7]) == calm

    run_dir = killed / "run"
    states = run_dir / "states"
    names = {str(entry.relative_to(states)) for entry in entries(run_dir)}
    assert names == needed_by_checkpoints(run_dir)

    scratch = (killed / "tmp").glob(f"*{SCRATCH}*")
    assert list(scratch) == []
    if "own" in flags:  # from the files, without a replay
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        assert sum(json.loads(line)["replay/steps"] for line in lines) == 0


def place_in(tmp_path: Path, **changes: Any) -> StatePlace:
    run_dir = tmp_path / "run"
    run_dir.mkdir(exist_ok=True)
    (run_dir / "run.lock").write_bytes(b"me")
    return StatePlace(run_dir / "run.lock", b"me", 4, tmp_path, **changes)


def test_paths_that_cannot_be_kept_are_refused(tmp_path: Path) -> None:
    files = StateFiles(place_in(tmp_path), 0)
    restart = tmp_path / "restart"
    restart.mkdir()
    (restart / "U").write_text("1")
    os.symlink(restart, tmp_path / "link")
    os.symlink("/etc", tmp_path / "etc")
    os.mkfifo(tmp_path / "pipe")
    refused = {
        tmp_path / "none": "does not exist",
        tmp_path / "link": "is a symbolic link",
        tmp_path / "etc" / "passwd": "neither below the scratch_dir of an environment nor below",
        Path("/etc/passwd"): "neither below",
        tmp_path: "neither below",
        tmp_path / "restart" / ".." / "..": "neither below",
        tmp_path / "pipe": "neither a file nor a folder",
    }
    for path, words in refused.items():
        with pytest.raises(NotKept, match=words):
            files.keep(path, 0)

    (restart / "loop").symlink_to(restart)
    with pytest.raises(NotKept, match=r"loop is neither a file nor a folder"):
        files.keep(restart, 0)
    assert [*files.folder.iterdir()] == []
    for name in ("../0", "0-" + "a" * 32, ""):
        with pytest.raises(StateLost):
            files.kept(name)

    (tmp_path / "run" / "run.lock").write_bytes(b"another run")
    with pytest.raises(NotKept, match="does not see the folder of the run"):
        files.keep(restart, 0)


def test_a_listing_that_was_rewritten_to_fit_a_changed_file_is_noticed_by_its_hash(
    tmp_path: Path,
) -> None:
    files = StateFiles(place_in(tmp_path), 0)
    restart = tmp_path / "restart"
    restart.write_text("1")
    name = files.keep(restart, 0)
    assert files.kept(name).read_text() == "1"

    entry = files.folder / name
    (entry / "content" / "restart").unlink()  # a link to the file of the environment
    (entry / "content" / "restart").write_text("2")
    (entry / "listing").write_bytes(listing(entry / "content"))
    with pytest.raises(StateLost, match="listing was changed since get_state returned it"):
        files.kept(name)


def make_many_files(folder: Path) -> None:
    folder.mkdir()
    for number in range(200):
        (folder / str(number)).write_text(str(number))


def test_a_folder_with_many_files_is_kept_without_a_copy_and_removed_in_time(
    tmp_path: Path,
) -> None:
    files = StateFiles(place_in(tmp_path), 3)
    for moment in range(8):
        folder = tmp_path / f"restart-{moment}"
        make_many_files(folder)
        name = files.keep(folder, moment)
        shutil.rmtree(folder)
        files.collect(moment)
        assert files.names(moment)[-1] == f"3/{name}"
        paths = list(files.kept(name).iterdir())
        assert len(paths) == 200
    assert len(list(files.folder.iterdir())) == 5

    (files.folder / name / "content" / "restart-7" / "more").touch()
    with pytest.raises(StateLost, match="restart-7/more was changed"):
        files.kept(name)


def test_a_file_on_another_file_system_is_copied_without_its_holes(tmp_path: Path) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs /dev/shm")
    source = Path("/dev/shm") / f"{SCRATCH}{os.getpid()}"
    try:
        source.write_bytes(b"begin")
        with source.open("r+b") as file:
            file.seek(2**24)
            file.write(b"end")
            file.truncate(2**30)
        copied = link(source, tmp_path / "copy")
    finally:
        copy = tmp_path / "copy"
        equal = are_equal(source, copy) if copy.exists() else False
        source.unlink()
    assert equal
    assert 0 < copied < 2**20
    assert copy.stat().st_blocks * 512 < 2**20

    (tmp_path / "other").write_bytes(b"begin")
    assert not are_equal(copy, tmp_path / "other")


def test_paths_are_plain_data_only_where_somebody_names_them(tmp_path: Path) -> None:
    value = {"a": [tmp_path, 1], "b": np.arange(3)}
    with pytest.raises(TypeError, match=r"holds a pathlib\.\w+ at \['a'\]\[0\]"):
        packed(value)
    data = packed(value, lambda path: path.name)
    restored = unpacked(data, lambda name: tmp_path.parent / name)
    assert restored["a"][0] == tmp_path
    with pytest.raises(ValueError, match="not packed plain data"):
        unpacked(data)


@executes("run/needed_states.py: Make it, on a disk that all actors see.")
def test_a_state_folder_that_is_none_is_refused_before_anything_starts(tmp_path: Path) -> None:
    folder = tmp_path / "none"
    config = settings(tmp_path / "run", state_folder=folder, total_timesteps=64)
    with pytest.raises(ConfigError, match=r"state_folder=.*none: is not a folder\. Make it"):
        dppo.train(config)
    folder.mkdir()
    assert dppo.train(config).iterations == 1


@pytest.mark.slow
@executes("envs/own_state.py: are copied for each state, because the file system")
def test_copies_between_file_systems_are_reported_and_avoided_by_another_tmpdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("needs /dev/shm")
    kwargs: dict[str, Any] = {"padding": 2**21}
    monkeypatch.setattr(tempfile, "tempdir", "/dev/shm")
    recorder = Recorder()
    dppo.train(settings(tmp_path / "copied", kwargs), observers=[recorder])
    assert [incident.message for incident in recorder.incidents] == [
        "sampler 0 (worlds.restarts:Restarting): 2,097,168 bytes are copied for each state, because the file system "
        "of the run folder is another one than that of the path from get_state. Set TMPDIR or `state_folder` to a "
        "folder there: files below it are kept without a copy."
    ]

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert dppo.train(settings(tmp_path / "linked", kwargs)).incidents == {}


def test_a_path_outside_is_an_error_where_states_are_demanded(tmp_path: Path) -> None:
    outside: dict[str, Any] = {"env_id": "worlds.restarts:outside", "env_state": "own"}
    with pytest.raises(EnvironmentFault, match=r"holds the path /etc, which is neither below"):
        dppo.train(settings(tmp_path / "run", **outside))
