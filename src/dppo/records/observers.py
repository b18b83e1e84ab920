"""Observers: calls all observers of a run, in order, until it ends."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dppo.log import logger
from dppo.ppo.exchange.records import CollectionProgress
from dppo.records.observer import Display, Observer, Result, RunInfo

PATIENCE_S = 10.0  # a run that takes longer to get ready is shown before it is


def _is_true(answer: Any) -> bool:
    """Return whether this is True, or that of NumPy, which a comparison of its numbers returns."""
    return isinstance(answer, bool | np.bool_) and bool(answer)


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

    def note(self, text: str) -> None:
        """Show `text` on the display at once, unless the run is over. From any thread."""
        if self._started:
            self._display.note(text)

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
        return iter((*self._ours, *self._users))

    @property
    def _ours(self) -> tuple[Observer, ...]:
        return *self._files, self._display

    def progress(self, progress: CollectionProgress) -> None:
        """Report progress within an iteration."""
        for observer in self:
            observer.on_progress(progress)

    def iteration(self, row: dict[str, float]) -> str | None:
        """Report a row of metrics; return the name of the first observer that asks to stop.

        Each of the user's observers gets a row of its own, because it may change it.
        """
        asked = [type(observer).__name__ for observer in self._ours if _is_true(observer.on_iteration(row))]
        asked += [type(user).__name__ for user in self._users if _is_true(user.on_iteration(row.copy()))]
        return asked[0] if asked else None

    def end(self, result: Result | None, error: BaseException | None) -> None:
        """End all that were started, the display last; a second call does nothing.

        Raises the first exception from an observer, unless the run has already ended with an `error`.
        """
        started, self._started = self._started, []
        raised: list[BaseException] = []
        for observer in (*self._files, *self._users, self._display):
            if any(observer is one for one in started):
                try:
                    observer.on_end(result, error)
                except BaseException as another:
                    if raised or error is not None:
                        logger.warning("%s.on_end raised %r", type(observer).__qualname__, another)
                    raised.append(another)
        if raised and error is None:
            raise raised[0]
