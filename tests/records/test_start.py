"""The first lines of a run: sizes, hosts of samplers, and the notes that are held back until they are printed."""

from __future__ import annotations

import io
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import tiny_run

import dppo
from dppo.config import Config
from dppo.errors import ClusterError, ConfigError, DppoError
from dppo.records import observers
from dppo.records.files.checkpoint import find
from dppo.records.files.run_folder import RunFolder
from dppo.records.observer import RunInfo
from dppo.records.observers import Observers
from dppo.records.run_lines import hosting_line, returns_line, sizes_line
from dppo.records.terminal.plain import PlainLines
from dppo.run import runner
from dppo.run.outputs import describe_run
from dppo.spaces.actions import DiscreteActions

logger = logging.getLogger("dppo")
RUN = RunInfo(Config(env_id="E-v0"), Path("run"), "the run", (), 1000, None)


class Preparing:
    """A run that is getting ready, and what it prints."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.observers = Observers(PlainLines(self.stream), ())
        self.observers.prepare(RUN, "Starting ...")

    @property
    def printed(self) -> list[str]:
        return self.stream.getvalue().replace("  note: ", "").splitlines()


@pytest.mark.parametrize("is_slow", [False, True])
def test_notes_follow_the_first_lines_in_order_and_a_slow_start_is_shown_before_it_is_complete(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("dppo.records.observers.time.monotonic", lambda: now)
    run = Preparing()
    logger.warning("early")
    logger.info("network")
    now = observers.PATIENCE_S - (0.0 if is_slow else 0.1)
    run.observers.start_if_due()
    assert run.printed == (["the run", "early", "network"] if is_slow else [])

    run.observers.start()
    logger.warning("late")
    run.observers.start()
    run.observers.start_if_due()
    assert run.printed == ["the run", "early", "network", "late"]
    run.observers.end(None, None)


@pytest.mark.parametrize("error", [ClusterError("no actor"), ConfigError("not this")])
@pytest.mark.parametrize("progress", ["plain", "live"])
def test_notes_are_shown_where_the_cluster_fails_and_not_where_settings_are_refused(
    error: DppoError,
    progress: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def build(*_: object) -> None:
        logger.warning("actor 0 died; replaced")
        raise error

    monkeypatch.setattr(runner, "build", build)
    before = (logger.level, list(logger.handlers))
    with pytest.raises(type(error)):
        dppo.train(Config(env_id="CartPole-v1", run_dir=tmp_path / "run", progress=progress))
    assert ("actor 0 died; replaced" in capsys.readouterr().out) is isinstance(error, ClusterError)
    assert (logger.level, logger.handlers) == before


def test_a_start_that_fails_without_notes_prints_nothing() -> None:
    run = Preparing()
    run.observers.end(None, ClusterError("no actor"))
    assert run.printed == []


def test_sizes_are_those_of_the_run() -> None:
    sizes: dict[str, Any] = {"num_samplers": 3, "envs_per_sampler": 2, "num_steps": 50}
    config = Config(env_id="E-v0", minibatch_size=64, total_timesteps=1000, **sizes)
    assert sizes_line(replace(config, update_epochs=10)) == (
        "1,200 env steps in 4 iterations (1,000, rounded up to whole iterations): each collects 300 (3 samplers x 2 "
        "envs x 50 steps), then trains on them for 10 epochs."
    )

    rounded = replace(config, total_timesteps=1200)
    assert sizes_line(rounded).startswith("1,200 env steps in 4 iterations: each")
    assert sizes_line(config).endswith("for 10 epochs, or 20 if actions are discrete.")
    assert sizes_line(config, DiscreteActions(2)).endswith("for 20 epochs.")

    reusing = Config(
        env_id="E-v0", total_timesteps=3 * 512, minibatch_size=256, update_epochs=2, reuse=2
    )
    assert sizes_line(reusing).endswith(
        "then trains on them and those of 1 iteration before, for 2 epochs."
    )


@pytest.mark.parametrize(
    ("actors", "samplers", "words"),
    [
        (8, 8, "8 Ray actors host 1 sampler each."),
        (4, 8, "4 Ray actors host 2 samplers each."),
        (1, 8, "1 Ray actor hosts 8 samplers."),
        (3, 8, "3 Ray actors host 8 samplers unevenly: 2 host 3, the others 2 and have to wait."),
        (
            0,
            8,
            "Collecting in this process; num_actors=8 (--num-actors 8) would spread it over Ray actors, with the same "
            "result.",
        ),
        (0, 1, "Collecting in this process."),
        ("auto", 8, "Between 1 and 8 Ray actors, as there is room for them, host 8 samplers."),
        ("4..64", 8, "Between 4 and 8 Ray actors, as there is room for them, host 8 samplers."),
        ("2..4", 8, "Between 2 and 4 Ray actors, as there is room for them, host 8 samplers."),
    ],
)
def test_the_line_names_the_hosts_of_the_samplers(
    actors: int | str, samplers: int, words: str
) -> None:
    assert hosting_line(Config(env_id="E-v0", num_actors=actors, num_samplers=samplers)) == words


@pytest.mark.parametrize(
    ("settings", "noise"), [({}, "without noise"), ({"eval_stochastic": True}, "also with noise")]
)
def test_the_returns_of_training_and_of_evaluations_are_told_apart(
    settings: dict[str, Any], noise: str
) -> None:
    config = Config(env_id="E-v0", eval_every=2000, eval_episodes=1, **settings)
    assert returns_line(config) == (
        "return: the last 100 training episodes at most, with exploration noise; "
        f"eval: 1 episode {noise}, every 2,000 env steps."
    )


def test_only_a_run_with_evaluations_explains_two_returns(tmp_path: Path) -> None:
    for settings, lines in (({"eval_every": 64}, 1), ({}, 0)):
        config = tiny_run(tmp_path / f"run{lines}", **settings)
        folder = RunFolder(tmp_path, b"")
        info = describe_run(config, folder)
        assert sum(line.startswith("return: ") for line in info.lines) == lines


def test_a_resumed_run_knows_its_epochs_before_it_has_an_environment(tmp_path: Path) -> None:
    config = replace(tiny_run(tmp_path / "run"), update_epochs=None)
    start = find(dppo.train(config).run_dir)
    info = describe_run(config, RunFolder(tmp_path, b"", start=start))
    assert info.lines[0].endswith("for 20 epochs.")
