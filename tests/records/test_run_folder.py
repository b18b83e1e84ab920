"""A run folder belongs to one run and one process, and files of the user in it are left alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import contents, tiny_run
from commandline import Typed, fresh_environment
from recorder import Recorder

import dppo
from dppo.config import plain_settings, reading
from dppo.errors import CheckpointError, ConfigError, EnvironmentFault, TrainingDiverged
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.disk import Disk
from dppo.records.files.lock import locked
from dppo.records.files.run_files import CONFIG, FILE, PARTS, PartRule, json_in
from dppo.records.files.run_folder import open_run, settings_to_resume

ITERATIONS = 3


def settings(run_dir: Path | None, **changes: Any) -> dppo.Config:
    return tiny_run(run_dir, samplers=2, iterations=ITERATIONS, **changes)


def interrupted(run_dir: Path, **changes: Any) -> dppo.Config:
    """Train for an iteration, and return the settings."""
    config = settings(run_dir, **changes)
    dppo.train(config, observers=[Recorder(interrupt_at=1)])
    return config


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dppo.train(settings(tmp_path_factory.mktemp("uninterrupted") / "run")).weights_sha256


@pytest.mark.parametrize("name", ["a/b", "../x", "/x/y"])
def test_the_name_of_a_run_names_one_folder(name: str, desk: Path) -> None:
    with open_run(settings(None, name=name), None) as folder:
        assert folder.path.parent == desk / "runs"


def test_a_folder_in_use_is_refused_with_the_name_of_the_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    notes: list[str] = []

    def again(_: int) -> None:
        for resume in (None, run, "auto"):
            with pytest.raises(ConfigError, match="is in use by process") as refused:
                dppo.train(settings(run), resume=resume)
            notes.append(str(refused.value))

    result = dppo.train(settings(run), observers=[Recorder(after_iteration=again)])

    assert result.iterations == ITERATIONS, "the run itself is not disturbed"
    assert f"process {os.getpid()} on {socket.gethostname()} since 20" in notes[0]
    assert not (run / "run.lock").exists()


def taken(folder: Path) -> ExitStack:
    """Lock a run folder, until the result is closed."""
    stack = ExitStack()
    stack.enter_context(locked(folder))
    return stack


def test_a_child_of_a_killed_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A forked child, such as a process of the environment, holds the lock of its parent."""
    code = (
        "import os, sys, time; from pathlib import Path; from dppo.records.files.lock import locked\n"
        "lock = locked(Path('.'))\nlock.__enter__()\n"
        "child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(1000)"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(
        words, cwd=tmp_path, env=fresh_environment(), stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        child = int(other.stdout.readline())
        try:
            with pytest.raises(ConfigError, match=f"process {other.pid} on "):
                taken(tmp_path)
            other.kill()
            other.wait()
            assert (tmp_path / "run.lock").exists(), "a killed process cannot remove its lock"
            lock = taken(tmp_path)
            with pytest.raises(ConfigError, match=f"process {os.getpid()} "):
                taken(tmp_path)
            lock.close()
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_child_of_a_finished_run_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = taken(tmp_path)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(1000,))
    child.start()
    try:
        lock.close()
        taken(tmp_path).close()
    finally:
        child.kill()
        child.join()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}', "[" * 100_000], ids=len)
def test_a_lock_file_that_nobody_holds_is_stale(content: str, tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text(content)
    taken(tmp_path).close()


def test_without_file_locks_the_process_id_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some network file systems have no locks."""
    import fcntl

    def unsupported(handle: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    lock = taken(tmp_path)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} "):
        taken(tmp_path)

    lock.close()
    taken(tmp_path).close()
    holder = {"pid": 2**22 + 1, "host": socket.gethostname()}
    (tmp_path / "run.lock").write_text(json.dumps(holder))
    taken(tmp_path).close()
    (tmp_path / "run.lock").write_text(json.dumps({"pid": 1, "host": "another-host"}))
    with pytest.raises(ConfigError, match="on another-host"):
        taken(tmp_path)


def raises() -> gym.Env[Any, Any]:
    raise RuntimeError("licence")


def test_a_run_that_fails_before_training_leaves_nothing(tmp_path: Path) -> None:
    for name in ("notes", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes" / "todo.txt").touch()
    for name in ("notes", "empty", "new"):
        with pytest.raises(EnvironmentFault):
            dppo.train(settings(tmp_path / name, env_id=raises))
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == ["empty", "notes", "todo.txt"]


def test_there_is_a_checkpoint_before_the_first_segment(tmp_path: Path) -> None:
    """So that a run that is killed then can be resumed."""
    written: list[str] = []

    class Looking(gym.Wrapper[Any, Any, Any, Any]):
        def reset(self, **keywords: Any) -> Any:
            written[:] = written or [
                str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")
            ]
            return self.env.reset(**keywords)

    dppo.train(settings(tmp_path / "run", env_id=lambda: Looking(gym.make("CartPole-v1"))))

    assert {"run/checkpoints/iter_000000.safetensors", "run/config.yaml"} <= set(written)


def test_a_run_killed_before_its_settings_were_written_can_be_resumed(
    tmp_path: Path, uninterrupted: str
) -> None:
    run = tmp_path / "run"
    interrupted(run)
    (run / "config.yaml").unlink()
    assert settings_to_resume(run)["env_id"] == "CartPole-v1"
    assert dppo.train(settings(run), resume=run).weights_sha256 == uninterrupted


def test_resume_auto_starts_a_run_or_continues_it(tmp_path: Path, uninterrupted: str) -> None:
    config = settings(tmp_path / "run")
    stopped = dppo.train(config, resume="auto", observers=[Recorder(interrupt_at=1)])
    assert stopped.resumed_at == 0
    assert stopped.iterations == 1

    ended = dppo.train(config, resume="auto")
    assert ended.resumed_at == 1
    assert ended.iterations == ITERATIONS
    assert ended.weights_sha256 == uninterrupted

    again = dppo.train(config, resume="auto")
    assert again.resumed_at == ITERATIONS
    assert again.metrics == []
    with pytest.raises(ConfigError, match="resume=auto: needs a fixed folder"):
        dppo.train(settings(None), resume="auto")


def test_a_run_is_resumed_in_its_own_folder_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = tmp_path / "other"
    interrupted(run)
    before = contents(run)
    for resume in (run, run / "checkpoints" / "iter_000001"):
        with pytest.raises(
            ConfigError, match=f"^run_dir={other}: has no effect with resume=.* Leave it out, or "
        ):
            dppo.train(settings(other), resume=resume)
    assert not other.exists()
    assert contents(run) == before

    other.symlink_to(run)  # the same folder by another name

    assert dppo.train(settings(other), resume=run).iterations == ITERATIONS
    assert dppo.train(settings(None), resume=run).iterations == ITERATIONS


class Fatal(gym.Wrapper[Any, Any, Any, Any]):
    """Kills its process at a step while the marker exists."""

    def __init__(self, marker: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._marker = Path(marker)

    def step(self, action: Any) -> Any:
        if self._marker.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return self.env.step(action)


def test_a_run_killed_after_resuming_from_an_older_checkpoint_loses_no_row(tmp_path: Path) -> None:
    """Rows after the checkpoint are cut off, so later checkpoints must not be used any more."""
    run = tmp_path / "run"
    marker = tmp_path / "marker"
    fatal = {"env_id": Fatal, "env_kwargs": {"marker": str(marker)}}
    config = settings(run, checkpoint_interval_s=0, **fatal)
    uninterrupted = dppo.train(config)

    marker.touch()
    earlier = {"resume": run / "checkpoints" / "iter_000001"}
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=dppo.train, args=(config,), kwargs=earlier)
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL

    marker.unlink()
    again = dppo.train(config, resume=run)

    assert (again.resumed_at, again.weights_sha256) == (1, uninterrupted.weights_sha256)
    assert [row["iteration"] for row in uninterrupted.metrics] == [1, 2, 3]


class Wandering(gym.Wrapper[Any, Any, Any, Any]):
    """Changes the current directory, as many simulators do."""

    def __init__(self, folder: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._folder = folder

    def reset(self, **keywords: Any) -> Any:
        os.chdir(self._folder)
        return self.env.reset(**keywords)


@pytest.mark.parametrize("fixed", [True, False])
def test_an_environment_may_change_the_current_directory(
    fixed: bool, desk: Path, pictures: None
) -> None:
    away = desk / "away"
    away.mkdir()
    run_dir = Path("run") if fixed else None
    result = dppo.train(settings(run_dir, env_id=Wandering, env_kwargs={"folder": str(away)}))

    assert result.run_dir.is_relative_to(desk)
    assert (result.run_dir / "learning_curve.png").exists()
    assert checkpoints.find(result.run_dir).path == result.checkpoint
    assert list(away.iterdir()) == []


class Tasked(gym.Wrapper[Any, Any, Any, Any]):
    """CartPole that is made with a task of any kind."""

    def __init__(self, task: Any) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.task = task


@pytest.mark.parametrize("task", ["0110" * 500, "x" * 20_001], ids=["digits", "large"])
def test_a_run_with_a_long_argument_can_be_resumed_evaluated_and_reported(
    task: str, desk: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of digits is no number that takes long to read; what makes config.yaml too large is in checkpoints."""
    monkeypatch.setattr(reading, "MAX_SETTINGS_BYTES", 20_000)
    monkeypatch.setitem(PARTS, CONFIG, PartRule(FILE, 20_000))
    interrupted(Path("run"), env_id=Tasked, env_kwargs={"task": task})

    assert settings_to_resume(Path("run"))["env_kwargs"] == {"task": task}
    for line in ("train --resume run --trust", "eval run --episodes 1 --trust", "report run"):
        typed(line)


def in_python(text: str) -> dict[str, str]:
    """Return the record of a value that JSON cannot hold."""
    return {"!python": text}


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        (Path("/a/b"), "/a/b"),
        (np.float32(0.5), 0.5),
        ((1, 2), [1, 2]),
        ({"1": {"x": None}}, {"1": {"x": None}}),
        ({1: {"x": None}}, in_python("{1: {'x': None}}")),  # JSON would make it {"1": ...}
        ({"a": {True: 1}, "b": 2}, {"a": in_python("{True: 1}"), "b": 2}),
        ([{None: 1}], in_python("[{None: 1}]")),
        ([{1, 2}], [in_python("{1, 2}")]),
        ({(1, 2): 3}, in_python("{(1, 2): 3}")),
        (np.arange(2), in_python("array([0, 1])")),
    ],
)
def test_values_are_recorded_as_readable_json(value: Any, recorded: Any) -> None:
    config = settings(None, env_kwargs={"x": value})
    plain = plain_settings(config)
    assert plain["env_kwargs"] == {"x": recorded}


@pytest.mark.parametrize("keys", [{1: 5}, [{True: 5}]])
def test_keys_that_are_not_text_are_given_again_and_compared(keys: Any, tmp_path: Path) -> None:
    """An environment that looks up 1 would not find "1", and might play another task."""
    run = tmp_path / "run"
    config = interrupted(run, env_id=Tasked, env_kwargs={"task": keys})
    with pytest.raises(
        ConfigError, match=r"env_kwargs: task was .*, and a run folder cannot hold Python objects"
    ):
        settings_to_resume(run)
    with pytest.raises(ConfigError, match=r"^env_kwargs="):
        dppo.train(replace(config, env_kwargs={"task": {"1": 5}}), resume=run)

    assert dppo.train(config, resume=run).iterations == ITERATIONS


def full(disk: Disk, path: Path, *parts: bytes | memoryview) -> None:
    """Refuse to write; replaces the method of the disk."""
    raise OSError(28, "No space left on device")


def test_resuming_on_a_full_disk_is_an_error_with_a_remedy(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted(tmp_path / "run")
    monkeypatch.setattr(Disk, "write", full)
    text = typed(f"train --resume {tmp_path / 'run'} --progress off", 1)
    assert "config.yaml: cannot be written: No space left on device. Free some disk space." in text
    assert "Traceback" not in text


def test_the_last_lines_are_printed_even_if_the_last_checkpoint_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill(iteration: int) -> None:
        if iteration == ITERATIONS:
            monkeypatch.setattr(Disk, "write", full)

    recorder = Recorder(after_iteration=fill)
    with pytest.raises(
        CheckpointError, match=r"iter_000003\.safetensors: the checkpoint could not be written"
    ) as no:
        dppo.train(settings(tmp_path / "run", progress="plain"), observers=[recorder])
    assert no.value.exit_code == 1

    text = capsys.readouterr().out

    assert recorder.result is not None
    assert recorder.result.iterations == ITERATIONS
    assert f"Weights: sha256 {recorder.result.weights_sha256[:16]}" in text
    assert "iter_000000.safetensors" in text
    assert "Resume with: dppo train --resume " in text


def test_a_checkpoint_has_a_score_from_twenty_episodes_on(tmp_path: Path) -> None:
    run = tiny_run(tmp_path / "run", samplers=2, steps=64, iterations=6, checkpoint_interval_s=0)
    scored: list[float] = []

    def look(iteration: int) -> None:
        if not scored and (tmp_path / "run" / "checkpoints" / "best.json").exists():
            scored.append(iteration - 1)  # the checkpoint of this iteration is written later

    result = dppo.train(run, observers=[Recorder(after_iteration=look)])
    episodes = {row["iteration"]: row["charts/episodes"] for row in result.metrics}
    first = min(iteration for iteration, count in episodes.items() if count >= 20)
    assert episodes[1] < 20
    assert scored == [first]


class Spiking(gym.Wrapper[Any, Any, Any, Any]):
    """Gives a reward in the third iteration whose square overflows float32, while the marker exists."""

    def __init__(self, marker: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._marker = Path(marker)
        self._steps = 0

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        if self._steps == 69 and self._marker.exists():  # an iteration has 32
            reward = 1e17  # times scale_reward
        return obs, reward, terminated, truncated, info


def test_a_run_that_diverges_leaves_the_weights_from_before_the_update(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    spiking: dict[str, Any] = {
        "env_id": Spiking,
        "env_kwargs": {"marker": str(marker)},
        "minibatch_size": 4,
        "gamma": 0.0,
        "gae_lambda": 0.0,
        "scale_reward": 1e13,
        "norm_reward": False,
        "checkpoint_interval_s": 0,
    }
    uninterrupted = dppo.train(tiny_run(tmp_path / "uninterrupted", steps=32, **spiking))
    run = tmp_path / "run"
    marker.touch()
    rarely = spiking | {"checkpoint_interval_s": 1000}
    with pytest.raises(TrainingDiverged, match=r"SGD step [1-9]") as diverged:
        dppo.train(tiny_run(run, steps=32, **rarely))
    assert "step 0" not in str(diverged.value), "some SGD steps of the update were made and undone"

    incident = json_in(run / "incidents" / "001" / "incident.json")
    assert (incident["kind"], incident["message"]) == ("run_failed", str(diverged.value))

    newest = checkpoints.find(run)
    assert newest.path.stem == "iter_000002"
    before = checkpoints.load(tmp_path / "uninterrupted" / "checkpoints" / newest.path.name)
    for part in ("model", "optimizer", "samplers"):
        expected = before.arrays[part]
        for name, array in newest.checkpoint.arrays[part].items():
            assert array.tobytes() == expected[name].tobytes(), (part, name)

    marker.unlink()
    again = dppo.train(tiny_run(run, steps=32, **spiking), resume=run)
    assert again.weights_sha256 == uninterrupted.weights_sha256


def test_folders_that_a_run_made_and_did_not_use_are_removed(desk: Path) -> None:
    runs = Path("runs")
    with open_run(settings(None), None):
        assert list(runs.iterdir())
    assert not runs.exists()

    with open_run(settings(None), None), open_run(settings(None, name="other"), None) as other:
        (other.path / "metrics.jsonl").touch()
    folders = [path.absolute() for path in runs.iterdir()]
    assert folders == [other.path], "what another run uses stays"

    Path("mine").mkdir()
    with open_run(settings(Path("mine")), None):
        pass

    assert Path("mine").exists(), "it was there before"
