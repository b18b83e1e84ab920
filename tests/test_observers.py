"""Observers see all of a run, may stop it, and whatever they raise leaves a checkpoint and nothing open."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from commandline import fresh_environment
from recorder import Notes, Recorder

import dppo
from dppo.config import make_config
from dppo.errors import EnvironmentFault
from dppo.ppo.segment import Incident
from dppo.records import checkpoint as checkpoints

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ITERATIONS = 4


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    sizes = {"num_samplers": 2, "num_steps": 32, "total_timesteps": 64 * ITERATIONS, "update_epochs": 1}
    return make_config({"env_id": "CartPole-v1", "run_dir": run_dir, "progress": "off", **sizes, **changes})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dppo.train(settings(tmp_path_factory.mktemp("undisturbed") / "run")).weights_sha256


def resumed(run_dir: Path, **changes: Any) -> dppo.Result:
    return dppo.train(settings(run_dir, **changes), resume=run_dir)


# ---------------------------------------------------------------------- what they see


def test_an_observer_sees_the_whole_run(tmp_path: Path) -> None:
    recorder = Recorder()
    config = settings(tmp_path / "run", checkpoint_interval_s=0)
    result = dppo.train(config, observers=[recorder])
    assert recorder.calls == [
        *("start", "iter_000000", "iteration", "iter_000001", "iteration", "iter_000002"),
        *("iteration", "iter_000003", "iteration", "iter_000004", "end"),
    ]
    assert recorder.run is not None
    assert (recorder.run.config, recorder.run.run_dir) == (config, tmp_path / "run")
    assert (recorder.run.total_steps, recorder.run.resumed_at) == (64 * ITERATIONS, None)
    assert recorder.rows == result.metrics
    assert len(recorder.episodes) == result.episodes > 0
    assert recorder.checkpoints[-1] == result.checkpoint
    assert (recorder.result, recorder.error) == (result, None)


class Obstructing(Recorder):
    """Put a file in the place of the folder of checkpoints, until one has failed."""

    def on_iteration(self, row: dict[str, float]) -> bool | None:
        assert self.run is not None
        folder = self.run.run_dir / "checkpoints"
        if row["iteration"] == 2:
            folder.rename(folder.with_name("aside"))
            folder.touch()
        return super().on_iteration(row)

    def on_incident(self, incident: Incident) -> None:
        assert self.run is not None
        folder = self.run.run_dir / "checkpoints"
        folder.unlink()
        folder.with_name("aside").rename(folder)
        super().on_incident(incident)


def test_a_checkpoint_that_could_not_be_written_is_an_incident(tmp_path: Path) -> None:
    recorder = Obstructing()
    result = dppo.train(settings(tmp_path / "run", checkpoint_interval_s=0), observers=[recorder])
    assert result.incidents == {"checkpoint_failed": 1}
    assert [incident.kind for incident in recorder.incidents] == ["checkpoint_failed"]
    assert result.checkpoint.name == "iter_000004.safetensors"


def test_a_resumed_run_says_where_it_goes_on(tmp_path: Path) -> None:
    dppo.train(settings(tmp_path / "run"), observers=[Recorder(interrupt_at=2)])
    recorder = Recorder()
    result = dppo.train(settings(tmp_path / "run"), resume=tmp_path / "run", observers=[recorder])
    assert recorder.run is not None
    assert recorder.run.resumed_at == result.resumed_at == 2
    assert [row["iteration"] for row in recorder.rows] == [row["iteration"] for row in result.metrics] == [3, 4]


def test_only_observers_are_observers(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"observers: .* is not a dppo\.Observer"):
        dppo.train(settings(tmp_path / "run"), observers=[print])  # type: ignore[list-item]
    assert not (tmp_path / "run").exists()


def test_an_observer_without_methods_does_nothing(tmp_path: Path, undisturbed: str) -> None:
    observers = [dppo.Observer(), Recorder(), dppo.Observer()]
    assert dppo.train(settings(tmp_path / "run"), observers=observers).weights_sha256 == undisturbed


# ---------------------------------------------------------------------- stopping


class StopAt(dppo.Observer):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration(self, row: dict[str, float]) -> bool:
        return row["iteration"] == self.iteration


def test_an_observer_may_stop_the_run_which_can_go_on(tmp_path: Path, undisturbed: str) -> None:
    last = Recorder()
    result = dppo.train(settings(tmp_path / "run"), observers=[Recorder(), StopAt(2), StopAt(2), last])
    assert (result.stopped_by, result.iterations) == ("StopAt", 2)
    assert result.checkpoint.stem == "iter_000002"
    assert [row["iteration"] for row in last.rows] == [1, 2], "all see the last iteration"
    assert "Stopped by StopAt after 128 steps" in last.ending[0]
    assert last.ending[-1] == f"Resume with: dppo train --resume {tmp_path / 'run'}"
    assert resumed(tmp_path / "run").weights_sha256 == undisturbed


def test_a_stop_at_the_very_end_is_none(tmp_path: Path) -> None:
    result = dppo.train(settings(tmp_path / "run"), observers=[StopAt(ITERATIONS)])
    assert result.stopped_by is None


def test_the_example_stops_early(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "early_stop.py")],
        cwd=tmp_path,
        env=fresh_environment(),
        capture_output=True,
        text=True,
        timeout=250,
        check=True,
    )
    last = done.stdout.splitlines()[-1]
    assert last.startswith("StopAt after ")
    assert float(last.rpartition(" ")[2]) >= 400


# ---------------------------------------------------------------------- raising


class Pruned(Exception):
    """As of a library that searches for settings."""


class Raises(dppo.Observer):
    """Raises in one of its methods."""

    def __init__(self, where: str, error: BaseException) -> None:
        self.where, self.error, self.iterations = where, error, 0

    def _at(self, where: str) -> None:
        if where == self.where:
            raise self.error

    def on_start(self, run: dppo.RunInfo) -> None:
        self._at("start")

    def on_iteration(self, row: dict[str, float]) -> None:
        self.iterations += 1
        if self.iterations == 2:
            self._at("iteration")

    def on_episode(self, episode: object) -> None:
        self._at("episode")

    def on_checkpoint(self, path: Path) -> None:
        self._at("checkpoint")

    def on_end(self, result: dppo.Result | None, error: BaseException | None) -> None:
        self._at("end")


@pytest.mark.parametrize("error", [Pruned("hopeless"), KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("where", ["iteration", "episode"])
def test_what_an_observer_raises_comes_out_after_a_checkpoint(
    where: str, error: BaseException, tmp_path: Path, undisturbed: str
) -> None:
    recorder, handlers = Recorder(), list(logging.getLogger("dppo").handlers)
    config = settings(tmp_path / "run", progress="plain")
    with pytest.raises(type(error)) as raised:
        dppo.train(config, observers=[Raises(where, error), recorder])
    assert raised.value is error
    assert recorder.error is error
    assert recorder.calls[-1] == "end"
    assert recorder.result is not None
    assert recorder.result.stopped_by == type(error).__name__
    assert recorder.result.checkpoint.stem == f"iter_{recorder.result.iterations:06d}"
    assert any(line.startswith("Resume with: dppo train --resume ") for line in recorder.ending)
    assert logging.getLogger("dppo").handlers == handlers
    assert not any(thread.name == "dppo-tensorboard" for thread in threading.enumerate())
    assert not (tmp_path / "run" / "run.lock").exists()
    assert resumed(tmp_path / "run").weights_sha256 == undisturbed


@pytest.mark.parametrize("where", ["start", "checkpoint"])
def test_an_observer_that_raises_before_training_ends_what_has_begun(where: str, tmp_path: Path) -> None:
    first, last = Recorder(), Recorder()
    with pytest.raises(Pruned):
        dppo.train(settings(tmp_path / "run"), observers=[first, Raises(where, Pruned()), last])
    assert first.calls[-1] == "end"
    assert isinstance(first.error, Pruned)
    assert last.calls == ([] if where == "start" else ["start", "end"])
    if where == "start":
        assert not (tmp_path / "run").exists()


def test_all_are_ended_although_one_raises_in_it(tmp_path: Path) -> None:
    last = Recorder()
    with pytest.raises(Pruned):
        dppo.train(settings(tmp_path / "run"), observers=[Raises("end", Pruned()), last])
    assert last.calls[-1] == "end"
    assert last.result is not None
    assert last.result.stopped_by is None
    assert resumed(tmp_path / "run").iterations == ITERATIONS


def test_the_first_error_is_the_one_that_comes_out(tmp_path: Path) -> None:
    both = [Raises("iteration", KeyError("first")), Raises("end", Pruned("second"))]
    with Notes() as notes, pytest.raises(KeyError):
        dppo.train(settings(tmp_path / "run"), observers=both)
    assert any("Pruned('second')" in text for text in notes.texts)


# ---------------------------------------------------------------------- faults


class Breaking(gym.Wrapper[Any, Any, Any, Any]):
    """Raises at a step, if it is set to, and changes the current directory at each reset."""

    at_step, error, steps = -1, BaseException(), 0

    def step(self, action: Any) -> Any:
        type(self).steps += 1
        if type(self).steps == type(self).at_step:
            raise type(self).error
        return self.env.step(action)


def breaking() -> gym.Env[Any, Any]:
    return Breaking(gym.make("CartPole-v1"))


@pytest.fixture
def break_at(monkeypatch: pytest.MonkeyPatch) -> Any:
    def set_up(step: int, error: BaseException) -> None:
        monkeypatch.setattr(Breaking, "at_step", step)
        monkeypatch.setattr(Breaking, "error", error)
        monkeypatch.setattr(Breaking, "steps", 0)

    return set_up


def test_a_run_that_ends_by_a_fault_says_how_to_go_on(
    tmp_path: Path, break_at: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    break_at(64 * 2 + 10, ValueError("licence"))
    config = settings(tmp_path / "run", env_id=breaking, progress="plain")
    with pytest.raises(EnvironmentFault):
        dppo.train(config)
    said = capsys.readouterr().out
    assert "Stopped by EnvironmentFault after 128 steps" in said
    assert f"Checkpoint: {tmp_path / 'run' / 'checkpoints' / 'iter_000002.safetensors'}" in said
    assert f"Resume with: dppo train --resume {tmp_path / 'run'}" in said


def test_a_keyboard_interrupt_in_a_step_is_an_interruption(tmp_path: Path, break_at: Any, undisturbed: str) -> None:
    break_at(64 * 2 + 10, KeyboardInterrupt())
    result = dppo.train(settings(tmp_path / "run", env_id=breaking))
    assert (result.stopped_by, result.checkpoint.stem) == ("SIGINT", "iter_000002")
    assert resumed(tmp_path / "run", env_id=breaking).weights_sha256 == undisturbed


@pytest.mark.parametrize("error", [SystemExit(4), BaseException("bare")])
def test_an_environment_that_raises_something_bare_leaves_a_checkpoint(
    error: BaseException, tmp_path: Path, break_at: Any, undisturbed: str
) -> None:
    break_at(64 * 2 + 10, error)
    with pytest.raises(EnvironmentFault, match=r"env 0: step of episode \d+ \(seed \d+, step \d+\) raised") as stopped:
        dppo.train(settings(tmp_path / "run", env_id=breaking))
    assert repr(error).rstrip(")").rpartition("(")[2].strip("'") in str(stopped.value)
    assert checkpoints.find(tmp_path / "run").path.stem == "iter_000002"
    assert resumed(tmp_path / "run", env_id=breaking).weights_sha256 == undisturbed


# ---------------------------------------------------------------------- the result


def test_a_result_is_short_and_its_metrics_are_in_the_file(tmp_path: Path) -> None:
    result = dppo.train(settings(tmp_path / "run"))
    assert len(repr(result)) < 300
    assert "run_dir=" in repr(result)
    assert [row["iteration"] for row in result.metrics] == [1, 2, 3, 4]
    os.unlink(result.run_dir / "metrics.jsonl")
    with pytest.raises(dppo.errors.DppoError):
        _ = result.metrics
