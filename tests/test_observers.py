"""Observers see a whole run and may stop it; an exception from one leaves a checkpoint and nothing open."""

from __future__ import annotations

import logging
import re
import runpy
import shlex
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import FullDisk, tiny_run
from recorder import Notes, Recorder
from remedies import executes
from worlds import joint

import dppo
from dppo.__main__ import main
from dppo.config.trust import resume_command
from dppo.errors import CheckpointNotWritten, ClusterError, ControllerFault, EnvironmentFault
from dppo.ppo.exchange.records import CollectionProgress
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files import disk
from dppo.records.files.disk import Disk
from dppo.records.observer import Display
from dppo.records.observers import Observers

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
ITERATIONS = 4
Capture = pytest.CaptureFixture[str]


def settings(run_dir: Path, **changes: Any) -> dppo.Config:
    return tiny_run(run_dir, samplers=2, steps=32, iterations=ITERATIONS, **changes)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    return dppo.train(settings(tmp_path_factory.mktemp("undisturbed") / "run")).weights_sha256


def resumed(run_dir: Path, **changes: Any) -> dppo.Result:
    return dppo.train(settings(run_dir, **changes), resume=run_dir)


def test_an_observer_sees_the_whole_run_and_does_not_change_its_result(
    tmp_path: Path, undisturbed: str
) -> None:
    recorder = Recorder()
    config = settings(tmp_path / "run", checkpoint_interval_s=0)
    result = dppo.train(config, observers=[dppo.Observer(), recorder])
    assert result.weights_sha256 == undisturbed

    each = []
    for number in range(ITERATIONS):
        each.append(f"iter_{number:06d}")
        each.append("iteration")
    assert recorder.calls == ["start", *each, "iter_000004", "end"]

    run = recorder.run
    assert run is not None
    assert run.config == config
    assert run.run_dir == tmp_path / "run"
    assert run.total_steps == 64 * ITERATIONS
    assert run.resumed_at is None

    assert recorder.rows == result.metrics
    assert len(recorder.episodes) == result.episodes > 0
    assert recorder.checkpoints[-1] == result.checkpoint
    assert recorder.result == result
    assert recorder.error is None
    assert "run_dir=" in repr(result)
    assert len(repr(result)) < 300

    (result.run_dir / "metrics.jsonl").unlink()
    with pytest.raises(dppo.errors.DppoError):
        _ = result.metrics


def test_checkpoints_that_fail_again_and_again_are_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(iteration: int) -> None:
        disk.DISK = FullDisk(lambda name: not name.startswith(".tmp-iter_000003"))

    recorder = Recorder(after_iteration=fill)
    config = settings(tmp_path / "run", checkpoint_interval_s=0, total_timesteps=6 * 64)
    with patch.object(disk, "DISK", Disk()), pytest.raises(CheckpointNotWritten):
        dppo.train(config, observers=[recorder])
    failed = [text for text in caplog.messages if "could not be written" in text]
    assert len(failed) == 2
    assert "iter_000001" in failed[0]
    assert "iter_000004" in failed[1]
    assert {incident.kind for incident in recorder.incidents} == {"checkpoint_failed"}


class Watcher(dppo.Observer):
    """Keeps the reports of progress."""

    def __init__(self) -> None:
        self.reports: list[CollectionProgress] = []

    def on_progress(self, progress: CollectionProgress) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.reports.append(progress)


def two_together() -> Any:
    """Make a vector environment: one constructor makes both."""
    return joint.Native(2, "NextStep")


@pytest.mark.parametrize(
    ("kind", "environments"),
    [
        ({}, [*range(7)]),
        ({"env_id": two_together}, [0, 2, 4, 6]),
        ({"standby_envs": 1}, [*range(13)]),
    ],
    ids=["single", "vector", "standby"],
)
def test_progress_counts_environments_while_they_are_made(
    kind: dict[str, Any], environments: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.engine.progress.PROGRESS_S", 0.0)
    monkeypatch.setattr("dppo.records.observers.PATIENCE_S", 0.0)
    watcher = Watcher()
    sizes = {"envs_per_sampler": 2, "total_timesteps": 192}
    config = settings(tmp_path / "run", num_samplers=3, **sizes, **kind)
    dppo.train(config, observers=[watcher])
    counts = [report.environments for report in watcher.reports if not report.steps]
    assert [*dict.fromkeys(counts)] == environments, "also after the last constructor"
    assert watcher.reports[-1].environments == config.num_samplers * config.envs_of_sampler


class Adding(dppo.Observer):
    """Adds a key to each row."""

    def on_iteration(self, row: dict[str, float]) -> None:
        row["charts/mine"] = 1.0


def test_a_key_that_an_observer_adds_to_its_row_is_said_once_to_be_dropped(tmp_path: Path) -> None:
    with Notes() as notes:
        result = dppo.train(settings(tmp_path / "run"), observers=[Adding()])
    assert [text for text in notes.texts if "charts/mine" in text] == [
        "Adding.on_iteration has added charts/mine to its row, which is a copy: no file of the run gets it. Log it "
        "yourself; info_keys logs numbers of the environment"
    ]
    assert "charts/mine" not in result.metrics[0]


SLEEPY: dict[str, Any] = {"env_id": "dppo/SlowCartPole-v0", "env_kwargs": {"step_s": 0.25}}


@pytest.mark.parametrize(
    ("num_actors", "steps", "iterations"),
    [(0, 3, 2), pytest.param(2, 6, 1, marks=pytest.mark.slow)],
)
def test_progress_is_reported_while_a_slow_simulator_collects(
    num_actors: int, steps: int, iterations: int, tmp_path: Path, capsys: Capture, ray_session: None
) -> None:
    batch = 2 * steps
    total = batch * iterations
    changes = SLEEPY | {
        "num_steps": steps,
        "total_timesteps": total,
        "num_actors": num_actors,
        "progress": "plain",
    }
    watcher = Watcher()
    dppo.train(settings(tmp_path / "run", **changes), observers=[watcher])
    reports = watcher.reports
    assert {progress.iteration for progress in reports} == set(range(1, iterations + 1))

    for progress in reports:
        before = batch * (progress.iteration - 1)
        assert 0 <= progress.steps <= batch
        assert progress.global_step == before + progress.steps
        assert progress.elapsed_s >= 1
        assert progress.processes == max(1, num_actors) or progress.steps > 0
    assert any(0 < progress.steps < batch for progress in reports if progress.iteration == 1)

    times = r"(   \S+ ms per env step   left \d.*)?"
    line = rf"^ +\d+ / {total} +\d+%   iteration 1: \d+ of {batch} steps{times}$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def raising(where: str, error: BaseException, at: int = 1) -> dppo.Observer:
    """Return an observer whose method `on_WHERE` raises, the `at`-th time that it is called."""
    calls = count(1)

    def method(self: dppo.Observer, *arguments: Any) -> None:
        if next(calls) == at:
            raise error

    observer: dppo.Observer = type("Raising", (dppo.Observer,), {f"on_{where}": method})()
    return observer


def test_an_interrupt_while_progress_is_reported_leaves_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        dppo.train(
            settings(tmp_path / "run", **SLEEPY),
            observers=[raising("progress", KeyboardInterrupt())],
        )
    assert checkpoints.find(tmp_path / "run").path.stem == "iter_000000"


class StopAt(dppo.Observer):
    def __init__(self, iteration: int) -> None:
        self.iteration = iteration

    def on_iteration(self, row: dict[str, float]) -> bool:
        return row["iteration"] == self.iteration


def test_an_observer_may_stop_a_run_which_can_be_resumed(tmp_path: Path, undisturbed: str) -> None:
    config = settings(tmp_path / "run")
    last = Recorder()
    result = dppo.train(config, observers=[Recorder(), StopAt(2), StopAt(2), last])
    assert result.stopped_by == "StopAt"
    assert result.iterations == 2
    assert result.checkpoint.stem == "iter_000002"

    seen_by_last = [row["iteration"] for row in last.rows]
    assert seen_by_last == [1, 2], "all observers see the last iteration"
    assert "Stopped by StopAt after 128 steps" in last.ending[0]
    assert last.ending[-1] == f"Resume with: dppo train --resume {tmp_path / 'run'}"

    after = Recorder()
    whole = dppo.train(config, resume=tmp_path / "run", observers=[after, StopAt(ITERATIONS)])
    assert whole.weights_sha256 == undisturbed
    assert whole.resumed_at == 2
    assert whole.stopped_by is None  # it has not ended early
    assert after.run is not None
    assert after.run.resumed_at == 2
    assert after.rows == whole.metrics
    assert [row["iteration"] for row in after.rows] == [3, 4]


class Says(dppo.Observer):
    """Answers each iteration with the same value."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.asked = 0

    def on_iteration(self, row: dict[str, float]) -> Any:
        self.asked += 1
        return self.answer


@pytest.mark.parametrize(
    ("answer", "stops"),
    [
        (True, True),
        (False, False),
        (None, False),
        (np.True_, True),
        (np.False_, False),
        (np.array(True), True),
        (torch.tensor(2.0) > 1, True),
        (torch.tensor(2.0) > 3, False),
    ],
)
def test_an_observer_stops_a_run_with_true_also_that_of_numpy(answer: Any, stops: bool) -> None:
    """A comparison of NumPy's numbers, as `np.mean(...) > 0`, is no bool of Python."""
    observers = Observers(Display(), [Says(answer)])
    expected = "Says" if stops else None
    assert observers.iteration({"iteration": 1}) == expected


@pytest.mark.parametrize("answer", [1, 0, "stop", 0.5, np.float64(1.0), np.ones(2), [True]])
@executes("records/observers.py: Return True to stop the run, and False or None to go on")
def test_an_answer_that_is_neither_a_bool_nor_none_is_refused(answer: Any) -> None:
    """After all observers have been called: the others have seen the row."""
    last = Says(None)
    observers = Observers(Display(), [Says(answer), last])
    fact = re.escape(f"Says.on_iteration returned {answer!r}. Return True to stop")
    with pytest.raises(TypeError, match=fact):
        observers.iteration({"iteration": 1})
    assert last.asked == 1
    mended = Observers(Display(), [Says(True)])
    assert mended.iteration({"iteration": 1}) == "Says"


def test_a_run_whose_observer_answers_with_a_number_ends_with_a_checkpoint(tmp_path: Path) -> None:
    config = tiny_run(tmp_path / "run", steps=8, iterations=3)
    with pytest.raises(TypeError, match=r"Says\.on_iteration returned 1"):
        dppo.train(config, observers=[Says(1)])
    resumed = dppo.train(config, resume=config.run_dir)
    assert resumed.iterations == 3


@dataclass
class Curve(dppo.Observer):
    """Observers with equal values are equal, and arrays cannot be compared at all."""

    values: np.ndarray = field(default_factory=lambda: np.zeros(3))
    ended: int = 0

    def on_end(self, result: dppo.Result | None, error: BaseException | None) -> None:
        self.ended += 1


def test_observers_are_ended_one_by_one_even_if_they_are_equal(tmp_path: Path) -> None:
    curves = [Curve(), Curve()]
    watching = Observers(Display(), curves)
    run = dppo.RunInfo(settings(tmp_path), tmp_path, "", (), 1, None)
    watching.prepare(run, "Creating ...")
    watching.add_file(Display())
    watching._started += curves
    watching.end(None, None)
    assert [curve.ended for curve in curves] == [1, 1]


def test_the_observer_of_the_example_stops_at_its_target(tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLES / "early_stop.py"))
    observer = example["StopAt"](15.0)
    result = dppo.train(settings(tmp_path / "run", total_timesteps=64 * 100), observers=[observer])
    assert result.stopped_by == "StopAt"
    assert result.iterations < 100
    *before, last = [row.get("charts/episodic_return", 0.0) for row in result.metrics]
    assert last >= 15.0
    assert all(value < 15.0 for value in before)


class Pruned(Exception):
    """An exception like that of a hyperparameter search."""


@pytest.mark.parametrize(
    "observer",
    [
        raising("episode", Pruned("hopeless")),
        raising("iteration", KeyboardInterrupt(), at=2),
        raising("iteration", SystemExit(3), at=2),
    ],
)
def test_an_error_of_an_observer_is_raised_after_a_checkpoint(
    observer: Any, tmp_path: Path, undisturbed: str
) -> None:
    recorder = Recorder()
    handlers = list(logging.getLogger("dppo").handlers)
    config = settings(tmp_path / "run", progress="plain")
    with pytest.raises((Pruned, KeyboardInterrupt, SystemExit)) as raised:
        dppo.train(config, observers=[observer, recorder])
    assert recorder.error is raised.value
    assert recorder.calls[-1] == "end"
    assert recorder.result is not None
    assert recorder.result.stopped_by == raised.type.__name__
    assert recorder.result.checkpoint.stem == f"iter_{recorder.result.iterations:06d}"
    assert any(line.startswith("Resume with: dppo train --resume ") for line in recorder.ending)
    assert logging.getLogger("dppo").handlers == handlers
    assert not any(thread.name == "dppo-tensorboard" for thread in threading.enumerate())
    assert not (tmp_path / "run" / "run.lock").exists()
    assert resumed(tmp_path / "run").weights_sha256 == undisturbed


@pytest.mark.parametrize("where", ["start", "checkpoint"])
def test_an_observer_that_raises_before_training_ends_the_observers_before_it(
    where: str, tmp_path: Path
) -> None:
    first = Recorder()
    last = Recorder()
    with pytest.raises(Pruned):
        dppo.train(settings(tmp_path / "run"), observers=[first, raising(where, Pruned()), last])
    assert first.calls[-1] == "end"
    assert isinstance(first.error, Pruned)
    assert last.calls == ([] if where == "start" else ["start", "end"])
    assert (tmp_path / "run").exists() == (where != "start")


def test_all_observers_are_ended_even_if_one_raises_at_the_end(tmp_path: Path) -> None:
    last = Recorder()
    at_end = Pruned("at the end")
    with pytest.raises(Pruned):
        dppo.train(settings(tmp_path / "run"), observers=[raising("end", at_end), last])
    assert last.calls[-1] == "end"
    assert last.result is not None
    assert last.result.stopped_by is None
    assert resumed(tmp_path / "run").iterations == ITERATIONS

    observers = [raising("iteration", KeyError("first")), raising("end", at_end)]
    # the first error is raised, and the other logged
    with Notes() as notes, pytest.raises(KeyError):
        dppo.train(settings(tmp_path / "other"), observers=observers)
    assert any("Pruned('at the end')" in text for text in notes.texts)


class Breaking(gym.Wrapper[Any, Any, Any, Any]):
    """Raises `error` in the third iteration, at one step of the class."""

    error = BaseException()
    steps = 0

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))

    def step(self, action: Any) -> Any:
        Breaking.steps += 1
        if Breaking.steps == 64 * 2 + 10:
            raise Breaking.error
        return self.env.step(action)


def break_with(error: BaseException, run_dir: Path, **changes: Any) -> dppo.Result:
    Breaking.error = error
    Breaking.steps = 0
    return dppo.train(settings(run_dir, env_id=Breaking, **changes))


class FailingNotes(dppo.Observer):
    """Raises where it is asked for its lines at the end of a run."""

    def closing_notes(self) -> Sequence[str]:
        raise RuntimeError("no notes")


def test_closing_notes_that_raise_do_not_hide_how_a_run_ended(tmp_path: Path) -> None:
    recorder = Recorder()
    dppo.train(settings(tmp_path / "run"), observers=[FailingNotes(), recorder])
    assert "FailingNotes.closing_notes raised RuntimeError('no notes')" in recorder.ending


def test_the_first_lines_name_the_epochs_of_this_run(tmp_path: Path) -> None:
    """They follow from the actions, which are known before the lines are shown."""
    recorder = Recorder()
    config = tiny_run(tmp_path / "run", samplers=1, iterations=1, update_epochs=None)
    dppo.train(config, observers=[recorder])
    assert recorder.run is not None
    assert recorder.run.lines[0].endswith("then trains on them for 20 epochs.")


@pytest.mark.parametrize("together", [True, False])
def test_the_cause_is_printed_once_where_the_error_follows_on_the_same_terminal(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except where the error follows late, because a cluster that does not answer has to be left before."""
    recorder = Recorder()
    config = settings(tmp_path / "run", prior="worlds.priors:outside", prior_steps=64)
    with pytest.raises(ControllerFault):
        dppo.train(config, observers=[recorder])
    files = ["both", "both"] if together else ["out", "err"]
    with ExitStack() as stack:
        for name, file in zip(("stdout", "stderr"), files, strict=True):
            stream = stack.enter_context((tmp_path / file).open("a"))
            monkeypatch.setattr(sys, name, stream)
        causes = [line for line in recorder.ending if line.startswith("Cause: prior=")]
        recorder.error = ClusterError("Ray does not answer")
        assert "Cause: Ray does not answer" in recorder.ending
        monkeypatch.undo()
    assert len(causes) == (0 if together else 1)


def test_the_command_to_resume_quotes_a_folder_with_spaces() -> None:
    assert (
        resume_command(Path("runs/my run"), {"env_id": "CartPole-v1"})
        == "dppo train --resume 'runs/my run'"
    )


@pytest.mark.proves("raises `KeyboardInterrupt` or `BaseException`")
@pytest.mark.parametrize(
    "error",
    [ValueError("licence"), SystemExit(4), BaseException("bare"), KeyboardInterrupt()],
    ids=repr,
)
def test_a_failed_run_prints_cause_and_resume_command(
    error: BaseException, tmp_path: Path, capsys: Capture, undisturbed: str
) -> None:
    with pytest.raises(EnvironmentFault):
        break_with(error, tmp_path / "run", progress="plain", on_env_fault="raise")
    printed = capsys.readouterr().out
    assert "Failed with EnvironmentFault after 128 steps" in printed

    place = r"sampler 1 \(test_observers:Breaking\), env 0: step of episode \d+ \(.*\)"
    [raised] = traceback.format_exception_only(error)
    assert re.search(rf"^Cause: {place} raised {raised}", printed, re.MULTILINE)
    assert f"Checkpoint: {tmp_path / 'run' / 'checkpoints' / 'iter_000002.safetensors'}" in printed
    assert f"Resume with: dppo train --resume {tmp_path / 'run'} --trust\n" in printed

    [*_, command] = re.findall(r"^Resume with: dppo (.*)$", printed, re.MULTILINE)
    assert main(shlex.split(command)) == 0
    assert f"Weights: sha256 {undisturbed[:16]}" in capsys.readouterr().out


class Typed(dppo.Observer):
    """Collects the types of the rows."""

    def __init__(self) -> None:
        self.types: set[type] = set()

    def on_iteration(self, row: dict[str, float]) -> None:
        self.types.add(type(row))


def test_rows_are_plain_dictionaries(tmp_path: Path) -> None:
    """YAML and `torch.load` refuse other classes."""
    typed = Typed()
    result = dppo.train(tiny_run(tmp_path / "run", steps=8, iterations=2), observers=[typed])
    assert typed.types == {dict}
    assert set(map(type, result.metrics)) == {dict}
