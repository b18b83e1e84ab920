"""A run folder belongs to one run and one process, and files of the user in it are left alone."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import tiny_run
from commandline import fresh_environment
from recorder import Recorder

import dppo
from dppo.__main__ import main
from dppo.config import plain_settings, reading
from dppo.errors import CheckpointError, ConfigError, EnvironmentFault, TrainingDiverged
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.disk import Disk
from dppo.records.files.lock import locked
from dppo.records.files.run_files import CONFIG, FILE, PARTS, Part
from dppo.records.files.run_folder import open_run, settings_to_resume

BATCH = 32
ITERATIONS = 3


def settings(run_dir: Path | None, **changes: Any) -> dppo.Config:
    return tiny_run(run_dir, samplers=2, iterations=ITERATIONS, **changes)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dppo.train(settings(tmp_path_factory.mktemp("whole") / "run")).weights_sha256


@pytest.mark.parametrize("name", ["a/b", "../x", "/x/y"])
def test_the_name_of_a_run_names_one_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_run(settings(None, name=name), None) as folder:
        assert folder.path.parent == tmp_path / "runs"


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


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
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


def test_a_config_of_the_user_is_neither_overwritten_nor_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "exp" / "config.yaml"
    mine.parent.mkdir()
    mine.write_text("# my own words\nenv_id: CartPole-v1\n")

    assert main(["train", "--config", "exp/config.yaml", "--run-dir", "exp"]) == 2
    assert "contains a config.yaml, which the run would overwrite" in capsys.readouterr().err
    assert mine.read_text().startswith("# my own words")
    assert os.listdir(tmp_path / "exp") == ["config.yaml"]


def raises() -> gym.Env[Any, Any]:
    raise RuntimeError("licence")


def test_a_run_that_fails_before_training_leaves_an_incident_and_nothing_else(
    tmp_path: Path,
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for name in ("notes", "empty", "new"):
        with pytest.raises(EnvironmentFault):
            dppo.train(settings(tmp_path / name, env_id=raises))
        shutil.rmtree(tmp_path / name / "incidents")

    assert sorted(path.name for path in tmp_path.rglob("*")) == [
        "empty",
        "new",
        "notes",
        "todo.txt",
    ]


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
    tmp_path: Path, whole: str
) -> None:
    run = tmp_path / "run"
    dppo.train(settings(run), observers=[Recorder(interrupt_at=1)])
    (run / "config.yaml").unlink()
    assert settings_to_resume(run)["env_id"] == "CartPole-v1"
    assert main(["train", "--resume", str(run)]) == 0
    assert dppo.train(settings(run), resume=run).weights_sha256 == whole


def test_resume_auto_starts_a_run_or_continues_it(tmp_path: Path, whole: str) -> None:
    run = tmp_path / "run"
    stopped = dppo.train(settings(run), resume="auto", observers=[Recorder(interrupt_at=1)])
    assert (stopped.resumed_at, stopped.iterations) == (0, 1)
    ended = dppo.train(settings(run), resume="auto")
    assert ended.resumed_at == 1
    assert ended.iterations == ITERATIONS
    assert ended.weights_sha256 == whole
    again = dppo.train(settings(run), resume="auto")
    assert (again.resumed_at, again.metrics) == (ITERATIONS, [])
    with pytest.raises(ConfigError, match="resume=auto: needs a fixed folder"):
        dppo.train(settings(None), resume="auto")


def test_a_run_is_resumed_in_its_own_folder_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    other = tmp_path / "other"
    dppo.train(settings(run), observers=[Recorder(interrupt_at=1)])
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for resume in (run, run / "checkpoints" / "iter_000001"):
        with pytest.raises(
            ConfigError, match=f"^run_dir={other}: has no effect with resume=.* Leave it out, or "
        ):
            dppo.train(settings(other), resume=resume)
    assert not other.exists()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
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
    config = settings(
        run, env_id=Fatal, env_kwargs={"marker": str(marker)}, checkpoint_interval_s=0
    )
    whole = dppo.train(config)

    marker.touch()
    child = multiprocessing.get_context("fork").Process(
        target=dppo.train, args=(config,), kwargs={"resume": run / "checkpoints" / "iter_000001"}
    )
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL

    marker.unlink()
    again = dppo.train(config, resume=run)

    assert (again.resumed_at, again.weights_sha256) == (1, whole.weights_sha256)
    assert [row["iteration"] for row in whole.metrics] == [1, 2, 3]


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
    fixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: None
) -> None:
    home = tmp_path / "home"
    away = tmp_path / "away"
    home.mkdir()
    away.mkdir()
    monkeypatch.chdir(home)
    run_dir = Path("run") if fixed else None
    result = dppo.train(settings(run_dir, env_id=Wandering, env_kwargs={"folder": str(away)}))

    assert result.run_dir.is_absolute()
    assert result.run_dir.is_relative_to(home)
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
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of digits is no number that takes long to read; what makes config.yaml too large is in checkpoints."""
    monkeypatch.setattr(reading, "MAX_SETTINGS_BYTES", 20_000)
    monkeypatch.setitem(PARTS, CONFIG, Part(FILE, 20_000))
    run = tmp_path / "run"
    dppo.train(
        settings(run, env_id=Tasked, env_kwargs={"task": task}),
        observers=[Recorder(interrupt_at=1)],
    )

    assert settings_to_resume(run)["env_kwargs"] == {"task": task}
    assert main(["train", "--resume", str(run), "--trust"]) == 0
    assert main(["eval", str(run), "--episodes", "1", "--trust"]) == 0
    assert main(["report", str(run)]) == 0


@pytest.mark.parametrize(
    ("value", "recorded"),
    [
        *(
            (Path("/a/b"), "/a/b"),
            (np.float32(0.5), 0.5),
            ((1, 2), [1, 2]),
            ({"1": {"x": None}}, {"1": {"x": None}}),
        ),
        ({1: {"x": None}}, {"!python": "{1: {'x': None}}"}),  # JSON would make it {"1": ...}
        ({"a": {True: 1}, "b": 2}, {"a": {"!python": "{True: 1}"}, "b": 2}),
        ([{None: 1}], {"!python": "[{None: 1}]"}),
        ([{1, 2}], [{"!python": "{1, 2}"}]),
        ({(1, 2): 3}, {"!python": "{(1, 2): 3}"}),
        (np.arange(2), {"!python": "array([0, 1])"}),
    ],
)
def test_values_are_recorded_as_readable_json(value: Any, recorded: Any) -> None:
    assert plain_settings(settings(None, env_kwargs={"x": value}))["env_kwargs"] == {"x": recorded}


@pytest.mark.parametrize("keys", [{1: 5}, [{True: 5}]])
def test_keys_that_are_not_text_are_given_again_and_compared(keys: Any, tmp_path: Path) -> None:
    """An environment that looks up 1 would not find "1", and might play another task."""
    config = settings(tmp_path / "run", env_id=Tasked, env_kwargs={"task": keys})
    dppo.train(config, observers=[Recorder(interrupt_at=1)])
    with pytest.raises(
        ConfigError, match=r"env_kwargs: task was .*, and a run folder cannot hold Python objects"
    ):
        settings_to_resume(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^env_kwargs="):
        dppo.train(
            settings(tmp_path / "run", env_id=Tasked, env_kwargs={"task": {"1": 5}}),
            resume=tmp_path / "run",
        )

    assert dppo.train(config, resume=tmp_path / "run").iterations == ITERATIONS


def full(disk: Disk, path: Path, *parts: bytes | memoryview) -> None:
    """Refuse to write; replaces the method of the disk."""
    raise OSError(28, "No space left on device")


def test_resuming_on_a_full_disk_is_an_error_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    dppo.train(settings(run), observers=[Recorder(interrupt_at=1)])
    monkeypatch.setattr(Disk, "write", full)
    assert main(["train", "--resume", str(run)]) == 1
    text = capsys.readouterr().err
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
    few = dppo.train(settings(tmp_path / "few", checkpoint_interval_s=0))
    assert 0 < few.episodes < 20
    assert not (tmp_path / "few" / "checkpoints" / "best.json").exists()

    longer = {"num_steps": 64, "total_timesteps": 128 * 6, "checkpoint_interval_s": 0}
    many = dppo.train(settings(tmp_path / "many", **longer))
    assert many.episodes >= 20
    best = json.loads((tmp_path / "many" / "checkpoints" / "best.json").read_text())
    episodes = {row["iteration"]: row["charts/episodes"] for row in many.metrics}

    assert episodes[best["iteration"]] >= 20


class Spiking(gym.Wrapper[Any, Any, Any, Any]):
    """Gives a reward in the third iteration whose square overflows float32, while the marker exists."""

    def __init__(self, marker: str) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self._marker = Path(marker)
        self._steps = 0

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, info = self.env.step(action)
        self._steps += 1
        if self._steps == 2 * BATCH + 5 and self._marker.exists():
            reward = 1e17  # times scale_reward
        return obs, reward, terminated, truncated, info


def test_a_run_that_diverges_leaves_the_weights_from_before_the_update(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    spiking: dict[str, Any] = {
        "num_samplers": 1,
        "num_steps": BATCH,
        "minibatch_size": 4,
        "gamma": 0.0,
        "gae_lambda": 0.0,
    }
    spiking |= {
        "env_id": Spiking,
        "env_kwargs": {"marker": str(marker)},
        "checkpoint_interval_s": 0,
        "scale_reward": 1e13,
    }
    spiking |= {"norm_reward": False}
    whole = dppo.train(settings(tmp_path / "whole", **spiking))
    marker.touch()
    with pytest.raises(TrainingDiverged, match=r"SGD step [1-9]") as diverged:
        dppo.train(settings(tmp_path / "run", **spiking | {"checkpoint_interval_s": 1000}))
    assert "step 0" not in str(diverged.value), "some SGD steps of the update were made and undone"
    left = checkpoints.find(tmp_path / "run").path
    same = [
        checkpoints.load(path) for path in (left, tmp_path / "whole" / "checkpoints" / left.name)
    ]
    assert left.stem == "iter_000002"
    for part in ("model", "optimizer", "samplers"):
        for name, array in same[0].arrays[part].items():
            assert array.tobytes() == same[1].arrays[part][name].tobytes(), (part, name)
    marker.unlink()

    assert (
        dppo.train(settings(tmp_path / "run", **spiking), resume=tmp_path / "run").weights_sha256
        == whole.weights_sha256
    )


def test_folders_that_a_run_made_and_did_not_use_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with open_run(settings(None), None):
        assert list(Path("runs").iterdir())
    assert not Path("runs").exists()
    with open_run(settings(None), None), open_run(settings(None, name="other"), None) as other:
        (other.path / "metrics.jsonl").touch()
    assert list(Path("runs").iterdir()) == [other.path.relative_to(tmp_path)], (
        "what another run uses stays"
    )
    Path("mine").mkdir()
    with open_run(settings(Path("mine")), None):
        pass

    assert Path("mine").exists(), "it was there before"
