"""`dppo train --resume`: a run that was interrupted, and went on, is the run that was not. By command line."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from commandline import Command

import dppo
from dppo.__main__ import main

STEPS, ITERATIONS, SAMPLERS = 50, 6, 2
BATCH = STEPS * SAMPLERS
TOTAL = BATCH * ITERATIONS


def words(folder: Path, *more: str, run: str = "run", slow_after: int = 0) -> list[str]:
    """A training in which episodes stay open from one iteration to the next, and everything is normalised."""
    return [
        *("train", "odd_worlds:hesitant_cartpole", "--run-dir", str(folder / run), "--progress", "plain"),
        *("--env-kwargs", json.dumps({"folder": str(folder), "slow_after": slow_after})),
        *("--num-samplers", str(SAMPLERS), "--num-steps", str(STEPS), "--total-timesteps", str(TOTAL)),
        *("--norm-obs", "--norm-reward", "--update-epochs", "2", *more),
    ]


def weights(run: Path) -> bytes:
    return dppo.load_policy(run).weights.tobytes()


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def of_learning(run: Path) -> list[dict[str, Any]]:
    """The rows of a run without the figures that are of time."""
    timely = ("time/", "perf/", "charts/SPS")
    return [{key: value for key, value in row.items() if not key.startswith(timely)} for row in rows(run)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed; every checkpoint is kept."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(words(folder, "--checkpoint-interval-s", "0", "--keep-checkpoints", "99")) == 0
    return folder / "run"


LAST = ITERATIONS - 1


@pytest.mark.parametrize(
    ("moment", "finished"), [(STEPS // 2, 0), (2 * STEPS + 7, 2), (LAST * STEPS + STEPS - 1, LAST)]
)
def test_interrupted_at_some_moment_it_goes_on_as_if_it_had_not_been(
    moment: int, finished: int, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "slow").touch()
    with Command(words(tmp_path, slow_after=moment), tmp_path) as command:
        command.wait_until(lambda: list(tmp_path.glob("waiting-*")))
        command.send(signal.SIGINT)
        assert command.wait(60) == 130
    run = tmp_path / "run"
    assert len(rows(run)) == finished
    assert weights(run) != weights(whole)
    (tmp_path / "slow").unlink()
    assert main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr().out
    assert f"Going on from iter_{finished:06d} at step {finished * BATCH}" in said
    assert weights(run) == weights(whole)
    assert [row["iteration"] for row in rows(run)] == list(range(1, ITERATIONS + 1))
    assert [row["global_step"] for row in rows(run)] == [BATCH * (i + 1) for i in range(ITERATIONS)]
    assert of_learning(run) == of_learning(whole)


def test_interrupted_again_and_again_it_goes_on_by_the_command_that_it_names(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    line = words(tmp_path, slow_after=STEPS + 20)
    for _ in range(2):
        (tmp_path / "slow").touch()
        with Command(line, tmp_path) as command:
            command.wait_until(lambda: list(tmp_path.glob("waiting-*")))
            command.send(signal.SIGTERM)
            assert command.wait(60) == 143
            told = next(line for line in command.out.splitlines() if line.startswith("Go on with: dppo "))
        line = told.removeprefix("Go on with: dppo ").split()
        for path in tmp_path.glob("waiting-*"):
            path.unlink()
        (tmp_path / "slow").unlink()
    assert 0 < len(rows(run)) < ITERATIONS
    with Command(line, tmp_path) as command:
        assert command.wait(60) == 0
    assert weights(run) == weights(whole)
    assert of_learning(run) == of_learning(whole)


def test_from_an_older_checkpoint_the_rest_is_made_again(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert main(["train", "--resume", str(run / "checkpoints" / "iter_000002")]) == 0
    assert weights(run) == weights(whole)
    assert of_learning(run) == of_learning(whole)


def test_a_finished_run_is_left_as_it_is(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert main(["train", "--resume", str(run)]) == 0
    said = capsys.readouterr()
    assert "nan" not in said.out
    assert said.err == ""
    assert weights(run) == weights(whole)
    assert rows(run) == rows(whole)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == sorted(
        path.name for path in (whole / "checkpoints").iterdir()
    )


def test_without_annealing_a_run_can_be_made_longer(tmp_path: Path, whole: Path) -> None:
    constant = ("--no-anneal-lr", "--total-timesteps")
    assert main(words(tmp_path, *constant, str(3 * BATCH))) == 0
    assert main(["train", "--resume", str(tmp_path / "run"), "--total-timesteps", str(TOTAL)]) == 0
    assert main(words(tmp_path, *constant, str(TOTAL), run="at once")) == 0
    assert weights(tmp_path / "run") == weights(tmp_path / "at once") != weights(whole)
    assert of_learning(tmp_path / "run") == of_learning(tmp_path / "at once")


def test_a_run_made_longer_can_be_resumed_without_saying_so_again(tmp_path: Path) -> None:
    """Made longer, then interrupted: what counts is what the newest checkpoint was made with."""
    assert main(words(tmp_path, "--no-anneal-lr", "--total-timesteps", str(2 * BATCH))) == 0
    (tmp_path / "slow").touch()
    longer = ["train", "--resume", str(tmp_path / "run"), "--total-timesteps", str(TOTAL)]
    with Command(longer, tmp_path) as command:
        command.wait_until(lambda: list(tmp_path.glob("waiting-*")))
        command.send(signal.SIGINT)
        assert command.wait(60) == 130
    (tmp_path / "slow").unlink()
    assert main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert len(rows(tmp_path / "run")) == ITERATIONS


def test_what_changes_nothing_that_is_learnt_may_be_changed(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    older = str(run / "checkpoints" / "iter_000003")
    assert main(["train", "--resume", older, "--checkpoint-interval-s", "9", "--keep-checkpoints", "1"]) == 0
    assert weights(run) == weights(whole)
