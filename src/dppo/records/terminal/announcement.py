"""The first lines of a run, held back until the run is known to start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PATIENCE_S = 10.0  # a start that takes longer is announced before it is complete

logger = logging.getLogger("dppo")


class Announcement:
    """Announces a run once, when all its parts are built, so that a refusal is all that is printed.

    Notes that arrive earlier are kept, and follow the announcement. A start that takes longer than `PATIENCE_S` is
    announced by the next `check`, so that a slow start is not silent.
    """

    def __init__(self, show: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Start the clock.

        Args:
            show: prints the first lines of the run; called at most once.
        """
        self._show = show
        self._clock = clock
        self._due = clock() + PATIENCE_S
        self._early: list[tuple[int, str]] = []
        self._shown = False

    def note(self, text: str, level: int = logging.WARNING) -> None:
        """Log `text`, but not before the announcement."""
        if self._shown:
            logger.log(level, "%s", text)
        else:
            self._early.append((level, text))

    def check(self) -> None:
        """Announce the run if it is overdue; cheap enough for each tick of a wait."""
        if not self._shown and self._clock() >= self._due:
            self.show()

    def show(self) -> None:
        """Announce the run, then log the notes kept so far; a second call does nothing."""
        if self._shown:
            return
        self._shown = True
        self._show()
        for level, text in self._early:
            logger.log(level, "%s", text)
        self._early.clear()

    def show_notes(self) -> None:
        """Announce the run if notes are kept: where its start fails, they say what went wrong before."""
        if self._early:
            self.show()
