"""Observers: calls all observers of a run, in order, until it ends."""

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dppo.config.aliases import METRICS
from dppo.log import logger
from dppo.ppo.exchange.records import CollectionProgress
from dppo.records.metrics.reading import Row
from dppo.records.observer import Display, EnvOptions, Observer, Result, RunInfo
from dppo.records.outside import OnDisk

PATIENCE_S = 10.0  # a run that takes longer to get ready is shown before it is ready


class Observers:
    """Calls the observers of one run: files first, so that rows are safe; then the display, then the user's."""

    def __init__(self, display: Display, users: Sequence[Observer]) -> None:
        self._files: list[Observer] = []
        self._on_disk: list[OnDisk] = []
        self._display = display
        self._users = list(users)
        self._started: list[Observer] = []
        self._run: RunInfo | None = None  # None once the observers have started
        self._options = EnvOptions()
        self._has_noted_keys = False
        self._start_at = 0.0  # time at which the observers start even if the run is not ready

    def prepare(self, run: RunInfo, text: str) -> None:
        """Show on the display what the run is waiting for before it starts."""
        self._run = run
        self._options = run.options
        self._start_at = time.monotonic() + PATIENCE_S
        self._started.append(self._display)
        self._display.prepare(text)

    def describe(self, run: RunInfo) -> None:
        """Describe the run more exactly, unless the observers have started."""
        if self._run is not None:
            self._run = run

    def note(self, text: str) -> None:
        """Show `text` on the display at once, unless the run is over; may be called from any thread."""
        if self._started:
            self._display.note(text)

    def start(self) -> None:
        """Start the observers, the display first, because it shows what they log; a second call does nothing."""
        run = self._run
        self._run = None
        if run is None:
            return
        for observer in (self._display, *self._users):
            self._started.append(observer)
            observer.on_start(run)

    def start_if_due(self) -> None:
        """Start the observers if the run has been preparing for 10 s, so that a slow start is not silent."""
        if self._run is not None and time.monotonic() >= self._start_at:
            self.start()

    def add_file(self, observer: Observer) -> None:
        """Add an observer that can only be made when the run knows where it starts."""
        self._files.append(observer)
        if isinstance(observer, OnDisk):
            self._on_disk.append(observer)
        self._started.append(observer)

    def flush_files(self) -> None:
        """Wait until all rows so far would survive a power cut; called in the thread of the disk."""
        for observer in self._on_disk:
            observer.flush()

    def __iter__(self) -> Iterator[Observer]:
        """Iterate over the observers in the order in which they are called."""
        return iter((*self._files, self._display, *self._users))

    def progress(self, progress: CollectionProgress) -> None:
        """Report progress within an iteration, once the observers have started."""
        self.start_if_due()
        if self._run is None:
            for observer in self:
                observer.on_progress(progress)

    def iteration(self, row: Row, *, is_repeated: bool = False) -> str | None:
        """Report a row of metrics; return the name of the first observer that asks to stop.

        `is_repeated`: for an evaluation that has ended at a time that may depend on actors; options are fixed then.

        Each of the user's observers gets a row of its own, because it may change it. Raises TypeError, once all have
        been called, if one of them answers neither with a bool nor with None.
        """
        answers = [
            (observer, observer.on_iteration(row)) for observer in (*self._files, self._display)
        ]
        if self._users:
            for file in self._on_disk:  # where the user's observers may look for the row
                file.settle()
        self._options.fixed = is_repeated
        for user in self._users:
            users_row = row.copy()
            with _metrics_named():
                answers.append((user, user.on_iteration(users_row)))
            self._note_keys(user, users_row.keys() - row.keys())
        self._options.fixed = False
        stopping = [
            type(observer).__name__ for observer, answer in answers if _stops(observer, answer)
        ]
        return next(iter(stopping), None)

    def _note_keys(self, user: Observer, keys: Collection[Any]) -> None:
        """Log once that keys which an observer adds to its row are dropped."""
        if keys and not self._has_noted_keys:
            self._has_noted_keys = True
            logger.warning(
                "%s.on_iteration has added %s to its row, which is a copy: no file of the run gets it. Log it "
                "yourself; info_keys logs numbers of the environment",
                type(user).__qualname__,
                ", ".join(sorted(map(str, keys))),
            )

    def end(self, result: Result | None, error: BaseException | None) -> None:
        """End the observers that were started, the display last; a second call does nothing.

        Raises the first exception from an observer, unless the run has already ended with an `error`.
        """
        started = self._started
        self._started = []
        first_error = error
        for observer in (*self._files, *self._users, self._display):
            if not any(observer is other for other in started):
                continue
            try:
                observer.on_end(result, error)
            except BaseException as problem:
                if first_error is None:
                    first_error = problem
                else:
                    logger.warning("%s.on_end raised %r", type(observer).__qualname__, problem)
        if error is None and first_error is not None:
            raise first_error


@contextmanager
def _metrics_named() -> Iterator[None]:
    """Log the name of a metric here, before the KeyError about its name in another library ends the run."""
    try:
        yield
    except KeyError as error:
        for key in map(str, error.args):
            if key in METRICS:
                logger.warning("%s is the metric %s here.", key, METRICS[key])
        raise


def _stops(observer: Observer, answer: Any) -> bool:
    """Return whether the answer of an observer to a row stops the run; raise TypeError if that is not clear.

    A number is refused: 0 and 1 may be an exit code, a count or a reward just as well as an answer.
    """
    if answer is None or isinstance(answer, bool):
        return bool(answer)
    if getattr(answer, "shape", None) == ():  # a comparison of numbers of NumPy or tensors of torch
        item = answer.item()
        if isinstance(item, bool):
            return item
    raise TypeError(
        f"{type(observer).__qualname__}.on_iteration returned {answer!r}. Return True to stop the run, and False or "
        f"None to go on."
    )
