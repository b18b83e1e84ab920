"""The hooks of a run: panel, lines, files, trackers, early stopping and pruning are observers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dppo.config import Config
from dppo.ppo.segment import Episode, Incident
from dppo.records.result import Result

logger = logging.getLogger("dppo")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run that is about to start."""

    config: Config
    run_dir: Path
    title: str
    """Its environment and seed, in a line."""
    lines: tuple[str, ...]
    """Its sizes and its folder, in words."""
    total_steps: int
    """Env steps, from the beginning to the end of the run."""
    resumed_at: int | None
    """Iterations that were finished before; None for a new run."""


class Observer:
    """Watch a run, and stop it if need be. Derive from it, and override what you need: each method does nothing.

    All calls come from the thread that called `train`, one at a time; training waits for them. An exception out of one
    ends the run: a checkpoint is written, everything is closed, then `train` raises it.
    """

    def on_start(self, run: RunInfo) -> None:
        """Prepare: the run folder exists; environments and Ray do not yet."""

    def on_iteration(self, row: dict[str, float]) -> bool | None:
        """Take one row of metrics.jsonl; its keys are those of docs/METRICS.md.

        Returns:
            True to stop the run after a checkpoint.
        """

    def on_episode(self, episode: Episode) -> None:
        """Take one finished episode of training; in the order of samplers, after their iteration."""

    def on_incident(self, incident: Incident) -> None:
        """Take note of something that went wrong and was dealt with."""

    def on_checkpoint(self, path: Path) -> None:
        """Take note of a checkpoint, which is on the disk."""

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Tidy up. Called once after `on_start`, whatever happens, also if `on_start` raised.

        Args:
            result: how far the run came; None if it ended before there was anything to train.
            error: what ended it; None if it came to its end or was stopped.
        """


class Observers:
    """Call the observers of one run in a fixed order: files first, so that rows are safe; then display, then users."""

    def __init__(self, display: Observer, users: Sequence[Observer]) -> None:
        """Raises:
        TypeError: one of `users` is not an Observer.
        """
        for user in users:
            if not isinstance(user, Observer):
                raise TypeError(f"observers: {user!r} is not a dppo.Observer. Derive its class from it.")
        self._files: list[Observer] = []
        self._display = display
        self._users = list(users)
        self._started: list[Observer] = []

    def start(self, run: RunInfo) -> None:
        """Begin with the display, which shows what the others log."""
        for observer in (self._display, *self._users):
            self._started.append(observer)
            observer.on_start(run)

    def add_file(self, observer: Observer) -> None:
        """Add an observer that could not be made before the run knew where to go on."""
        self._files.append(observer)
        self._started.append(observer)

    def iteration(self, row: dict[str, float]) -> str | None:
        """Pass on a row; return the name of the first observer that asks to stop."""
        asked = [type(observer).__name__ for observer in self._all() if observer.on_iteration(row) is True]
        return asked[0] if asked else None

    def episode(self, episode: Episode) -> None:
        """Pass on a finished episode."""
        for observer in self._all():
            observer.on_episode(episode)

    def incident(self, incident: Incident) -> None:
        """Pass on an incident."""
        for observer in self._all():
            observer.on_incident(incident)

    def checkpoint(self, path: Path) -> None:
        """Pass on the path of a checkpoint."""
        for observer in self._all():
            observer.on_checkpoint(path)

    def end(self, result: Result | None, error: BaseException | None) -> None:
        """End all that were started, the display last; a second call does nothing.

        Raises:
            What the first of them raised, unless the run has ended with an `error` already.
        """
        started, self._started = self._started, []
        raised: list[BaseException] = []
        for observer in (*self._files, *self._users, self._display):
            if observer in started:
                _call(observer.on_end, result, error, raised)
        if raised and error is None:
            raise raised[0]

    def _all(self) -> tuple[Observer, ...]:
        return (*self._files, self._display, *self._users)


def _call(
    on_end: Callable[[Result | None, BaseException | None], None],
    result: Result | None,
    error: BaseException | None,
    raised: list[BaseException],
) -> None:
    try:
        on_end(result, error)
    except BaseException as another:
        if raised or error is not None:
            logger.warning("%s raised %r", on_end.__qualname__, another)
        raised.append(another)
