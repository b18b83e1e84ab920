"""An observer and a log handler for tests: they record their calls, and can act on them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

import dppo
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.exchange.records import Episode, Incident
from dppo.records.closing_lines import closing_lines


def lasting(result: dppo.Result) -> dict[str, int]:
    """Return the incidents without `samplers_moved`: on a busy machine an actor may start so late that they move."""
    return {kind: count for kind, count in result.incidents.items() if kind != "samplers_moved"}


def stop_in_episode(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Send SIGTERM to this process in an episode of evaluations; they are counted from 1."""
    play = EpisodePlayer.play
    episodes = count(1)

    def interrupted(*args: Any) -> Any:
        if next(episodes) == number:
            os.kill(os.getpid(), signal.SIGTERM)
        return play(*args)

    monkeypatch.setattr(EpisodePlayer, "play", interrupted)


class Recorder(dppo.Observer):
    """Records all calls. Can press Ctrl-C at an iteration, and call a function after each."""

    def __init__(
        self,
        *,
        interrupt_at: int | None = None,
        after_iteration: Callable[[int], object] = lambda number: None,
    ) -> None:
        self.calls: list[str] = []
        self.run: dppo.RunInfo | None = None
        self.rows: list[dict[str, float]] = []
        self.episodes: list[Episode] = []
        self.incidents: list[Incident] = []
        self.checkpoints: list[Path] = []
        self.result: dppo.Result | None = None
        self.error: BaseException | None = None
        self._interrupt_at = interrupt_at
        self._after_iteration = after_iteration

    @property
    def ending(self) -> list[str]:
        """The last lines that the run has printed."""
        assert self.result is not None
        return closing_lines(self.result, self.error)

    def on_start(self, run: dppo.RunInfo) -> None:
        self.calls.append("start")
        self.run = run

    def on_iteration(self, row: dict[str, float]) -> bool | None:
        self.calls.append("iteration")
        self.rows.append(row)
        self._after_iteration(int(row["iteration"]))
        if row["iteration"] == self._interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)  # a person pressing Ctrl-C
        return None

    def on_episode(self, episode: Episode) -> None:
        self.episodes.append(episode)

    def on_incident(self, incident: Incident) -> None:
        self.incidents.append(incident)

    def on_checkpoint(self, path: Path) -> None:
        self.calls.append(path.stem)
        self.checkpoints.append(path)

    def on_end(self, result: dppo.Result | None, error: BaseException | None) -> None:
        self.calls.append("end")
        self.result = result
        self.error = error


class Notes(logging.Handler):
    """Records the log messages of `dppo` while it is entered; can call a function after each."""

    def __init__(self, after: Callable[[str], object] = lambda text: None) -> None:
        super().__init__(logging.INFO)
        self.texts: list[str] = []
        self._after = after

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._after(record.getMessage())

    def __enter__(self) -> Notes:
        logger = logging.getLogger("dppo")
        self._level_before = logger.level
        logger.setLevel(logging.INFO)
        logger.addHandler(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        logger = logging.getLogger("dppo")
        logger.removeHandler(self)
        logger.setLevel(self._level_before)
