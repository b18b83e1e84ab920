"""The logger of all modules, which shows its notes independently of the settings of `logging`."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SILENT = logging.NullHandler()
"""The handler without which `logging` writes warnings to the standard error in a program that has no other."""


class NoteLogger(logging.Logger):
    """A logger that calls its listeners itself, and logs besides.

    The switches of `logging` belong to the whole process: a simulator that calls `logging.disable` or `dictConfig`
    would silence the notes of a run. Only the level of this logger counts, which is not set by accident.
    """

    listeners: list[Callable[[logging.LogRecord], None]]

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802  its name in `logging`
        return self._is_shown(level) or super().isEnabledFor(level)

    def handle(self, record: logging.LogRecord) -> None:
        """Show a record, and log it unless that is switched off."""
        if self._is_shown(record.levelno):
            for listener in self.listeners.copy():
                listener(record)
        if super().isEnabledFor(record.levelno):
            super().handle(record)

    def _is_shown(self, level: int) -> bool:
        return bool(self.listeners) and level >= (self.level or logging.INFO)


def _note_logger() -> NoteLogger:
    note_logger = logging.getLogger("dppo")  # the program may know it already
    note_logger.__class__ = NoteLogger
    assert isinstance(note_logger, NoteLogger)
    note_logger.listeners = []
    note_logger.addHandler(SILENT)
    return note_logger


logger = _note_logger()


@contextmanager
def showing_warnings() -> Iterator[None]:
    """Context in which warnings are written to the standard error if nothing else shows the log."""
    if not logger.listeners:
        logger.removeHandler(SILENT)
    try:
        yield
    finally:
        logger.addHandler(SILENT)
