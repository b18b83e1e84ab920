"""The first lines of a run, and the notes that are held back until they are printed."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

import pytest

import dppo
from dppo.config import Config
from dppo.errors import ClusterError, ConfigError, DppoError
from dppo.records import observer
from dppo.records.observer import Observers, RunInfo
from dppo.records.terminal.plain import PlainLines
from dppo.run import runner

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
    monkeypatch.setattr("dppo.records.observer.time.monotonic", lambda: now)
    run = Preparing()
    logger.warning("early")
    logger.info("network")
    now = observer.PATIENCE_S - (0.0 if is_slow else 0.1)
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
    error: DppoError, progress: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
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
