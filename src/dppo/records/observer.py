"""The hooks of a run: displays, files, experiment trackers, early stopping and pruning are observers."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dppo.config import Config
from dppo.errors import CheckpointError, ConfigError
from dppo.log import logger
from dppo.ppo.exchange.records import CollectionProgress, Episode, Incident
from dppo.records.result import Result

PATIENCE_S = 10.0  # a run that takes longer to get ready is shown before it is


@dataclass(slots=True)
class EnvOptions:
    """The options with which environments are reset; observers change them with `RunInfo.set_env`."""

    now: dict[str, Any] | None = None
    fixed: bool = False
    """True until a run that is resumed has started: it goes on with those of its checkpoint."""

    def __post_init__(self) -> None:
        if not isinstance(self.now, dict | None):
            raise CheckpointError(f"env_options={self.now!r} in the checkpoint: not options of environments.")


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run that is about to start."""

    config: Config
    run_dir: Path
    title: str
    """The environment and the seed, in one line."""
    lines: tuple[str, ...]
    """The sizes and the folder of the run, in words."""
    total_steps: int
    """Env steps of the whole run, from its start to its end."""
    resumed_at: int | None
    """Iterations finished before this call; None for a new run."""
    options: EnvOptions = field(default_factory=EnvOptions, repr=False, compare=False)

    @property
    def env_options(self) -> dict[str, Any]:
        """The options that `set_env` has set, also before the run was resumed."""
        return dict(self.options.now or {})

    def set_env(self, **options: Any) -> None:
        """Change options of the environments: from then on, each new episode starts with reset(seed, options=...).

        Called after iteration k, it takes effect with the policy after iteration k + 1, so in iteration k + 2, or
        k + 2 + K with a policy lag of K: it depends on the iteration alone. Called in `on_start`, it sets the options
        of the first episodes; of a run that is resumed, it is ignored, because the checkpoint has the options. Options
        that are not named stay as they are. Open episodes go on, and are rebuilt, with those that they started with.

        Raises:
            ConfigError: a value is not JSON.
        """
        try:
            options = json.loads(json.dumps(options, allow_nan=False))  # as a checkpoint holds them
        except (TypeError, ValueError) as error:
            raise ConfigError(f"set_env: {options!r} is not JSON ({error}). Use numbers, text, lists, dicts.") from None
        if not self.options.fixed:
            self.options.now = {**(self.options.now or {}), **options}


class Observer:
    """Watches a run, and may stop it. Subclass it and override the methods you need; by default they do nothing.

    All calls come from the thread that called `train`, and training waits for each of them. An exception ends the run:
    a checkpoint is written, everything is closed, then `train` raises it.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called first, when the run is ready to train; or after 10 s, if it takes longer to get ready."""

    def on_progress(self, progress: CollectionProgress) -> None:
        """Called about once a second during iterations that take longer than that, while segments are collected."""

    def on_iteration(self, row: dict[str, float]) -> bool | None:
        """Called after each iteration with its row of metrics.jsonl; docs/METRICS.md describes the keys.

        Returns:
            True to write a checkpoint and stop the run.
        """

    def on_episode(self, episode: Episode) -> None:
        """Called for each finished training episode, in sampler order, at the end of its iteration."""

    def on_incident(self, incident: Incident) -> None:
        """Called when the run has recovered from a fault."""

    def on_checkpoint(self, path: Path) -> None:
        """Called when a checkpoint has been written."""

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Called once at the end of the run, however it ends, also if `on_start` raised.

        Args:
            result: the result so far; None if the run ended before training started.
            error: the exception that ended the run; None if it finished or was stopped.
        """


class Display(Observer):
    """Shows a run to the user; this one shows nothing."""

    def prepare(self, text: str) -> None:
        """Show `text` until `on_start` or `on_end`, if it can be erased then; hold back notes until then."""


class Observers:
    """Calls the observers of one run: files first, so that rows are safe; then the display, then the user's."""

    def __init__(self, display: Display, users: Sequence[Observer]) -> None:
        """Check the observers; raise a TypeError if one of `users` is not an Observer."""
        for user in users:
            if not isinstance(user, Observer):
                raise TypeError(f"observers: {user!r} is not a dppo.Observer. Make its class a subclass of it.")
        self._files, self._display, self._users = list[Observer](), display, list(users)
        self._started: list[Observer] = []
        self._run: RunInfo | None = None  # until it has started
        self._due = 0.0

    def prepare(self, run: RunInfo, text: str) -> None:
        """Show on the display what the run is waiting for before it starts."""
        self._run, self._due = run, time.monotonic() + PATIENCE_S
        self._started.append(self._display)
        self._display.prepare(text)

    def start(self) -> None:
        """Start all, the display first, because it shows what the others log; a second call does nothing."""
        run, self._run = self._run, None
        if run is None:
            return
        for observer in (self._display, *self._users):
            self._started.append(observer)
            observer.on_start(run)

    def start_if_due(self) -> None:
        """Start all if the run has been preparing for 10 s, so that a slow start is not silent."""
        if self._run is not None and time.monotonic() >= self._due:
            self.start()

    def add_file(self, observer: Observer) -> None:
        """Add an observer that can only be made when the run knows where it starts."""
        self._files.append(observer)
        self._started.append(observer)

    def __iter__(self) -> Iterator[Observer]:
        """Iterate over all, in the order in which they are called."""
        return iter((*self._files, self._display, *self._users))

    def progress(self, progress: CollectionProgress) -> None:
        """Report progress within an iteration."""
        for observer in self:
            observer.on_progress(progress)

    def iteration(self, row: dict[str, float]) -> str | None:
        """Report a row of metrics; return the name of the first observer that asks to stop."""
        asked = [type(observer).__name__ for observer in self if observer.on_iteration(row) is True]
        return asked[0] if asked else None

    def end(self, result: Result | None, error: BaseException | None) -> None:
        """End all that were started, the display last; a second call does nothing.

        Raises the first exception from an observer, unless the run has already ended with an `error`.
        """
        started, self._started = self._started, []
        raised: list[BaseException] = []
        for observer in (*self._files, *self._users, self._display):
            if observer in started:
                try:
                    observer.on_end(result, error)
                except BaseException as another:
                    if raised or error is not None:
                        logger.warning("%s.on_end raised %r", type(observer).__qualname__, another)
                    raised.append(another)
        if raised and error is None:
            raise raised[0]
