"""The first lines of a run, and what is noted before them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import dppo
from dppo.config import make_config
from dppo.errors import ClusterError, ConfigError, DppoError
from dppo.records.terminal.announcement import PATIENCE_S, Announcement
from dppo.run import runner


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def printed(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, "dppo")
    return caplog


def announced(printed: pytest.LogCaptureFixture, clock: Clock) -> Announcement:
    return Announcement(lambda: logging.getLogger("dppo").info("the run"), clock)


def test_notes_follow_the_first_lines_in_order(printed: pytest.LogCaptureFixture) -> None:
    announcement = announced(printed, Clock())
    announcement.note("early")
    announcement.note("network", logging.INFO)
    assert printed.messages == []
    announcement.show()
    announcement.note("late")
    announcement.show()
    assert printed.messages == ["the run", "early", "network", "late"]
    assert [record.levelname for record in printed.records] == ["INFO", "WARNING", "INFO", "WARNING"]


def test_a_slow_start_is_announced_before_it_is_complete(printed: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    announcement = announced(printed, clock)
    announcement.note("waiting for actors")
    clock.now = PATIENCE_S - 0.1
    announcement.check()
    assert printed.messages == []
    clock.now = PATIENCE_S
    announcement.check()
    assert printed.messages == ["the run", "waiting for actors"]
    announcement.check()
    announcement.show()
    assert printed.messages.count("the run") == 1


@pytest.mark.parametrize(("error", "shown"), [(ClusterError("no actor"), True), (ConfigError("not this"), False)])
def test_notes_are_shown_where_the_cluster_fails_and_not_where_settings_are_refused(
    error: DppoError, shown: bool, printed: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(*parts: Any) -> None:
        parts[-1].note("actor 0 died; replaced")
        raise error

    monkeypatch.setattr(runner, "build", build)
    with pytest.raises(type(error)):
        dppo.train(make_config({"env_id": "CartPole-v1", "run_dir": tmp_path / "run", "progress": "off"}))
    assert ("actor 0 died; replaced" in printed.messages) is shown


def test_a_start_that_fails_without_notes_announces_nothing(printed: pytest.LogCaptureFixture) -> None:
    announcement = announced(printed, Clock())
    announcement.show_notes()
    assert printed.messages == []
    announcement.note("early")
    announcement.show_notes()
    assert printed.messages == ["the run", "early"]
