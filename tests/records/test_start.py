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


def test_notes_follow_the_first_lines_in_order() -> None:
    run = Preparing()
    logger.warning("early")
    logger.info("network")
    assert run.printed == []
    run.observers.start()
    logger.warning("late")
    run.observers.start()
    assert run.printed == ["the run", "early", "network", "late"]
    run.observers.end(None, None)


def test_a_slow_start_is_shown_before_it_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("dppo.records.observer.time.monotonic", lambda: now)
    run = Preparing()
    logger.warning("waiting for actors")
    now = observer.PATIENCE_S - 0.1
    run.observers.start_if_due()
    assert run.printed == []
    now = observer.PATIENCE_S
    run.observers.start_if_due()
    assert run.printed == ["the run", "waiting for actors"]
    run.observers.start_if_due()
    run.observers.start()
    assert run.printed.count("the run") == 1
    run.observers.end(None, None)


@pytest.mark.parametrize(("error", "shown"), [(ClusterError("no actor"), True), (ConfigError("not this"), False)])
@pytest.mark.parametrize("progress", ["plain", "live"])
def test_notes_are_shown_where_the_cluster_fails_and_not_where_settings_are_refused(
    error: DppoError,
    shown: bool,
    progress: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build(*_: object) -> None:
        logger.warning("actor 0 died; replaced")
        raise error

    monkeypatch.setattr(runner, "build", build)
    before = (logger.level, list(logger.handlers))
    with pytest.raises(type(error)):
        dppo.train(Config(env_id="CartPole-v1", run_dir=tmp_path / "run", progress=progress))
    assert ("actor 0 died; replaced" in capsys.readouterr().out) is shown
    assert (logger.level, logger.handlers) == before


def test_a_start_that_fails_without_notes_prints_nothing() -> None:
    run = Preparing()
    run.observers.end(None, ClusterError("no actor"))
    assert run.printed == []
