"""The stream that displays write to, and the log that they show."""

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from dppo.errors import ClusterError, printable
from dppo.log import logger
from dppo.process_state.states import usable


class PatientStream:
    """A stream that ignores write errors: a closed terminal is not a reason to stop training.

    It keeps the stream that it is made for, whatever becomes of `sys.stdout`, and opens it again if code of a user has
    closed it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` if possible."""
        self._stream = usable(self._stream)
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def line(self, text: str) -> None:
        """Write a line if possible, at once."""
        self.write(f"{text}\n")
        self.flush()

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ShowLog:
    """Shows the log records of `dppo` from `start` to `close`, preceded by those since `hold`."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._held: list[str] = []
        self._started = False
        self._level_changed = False

    def hold(self) -> None:
        """Hold records back until `start`."""
        if self._emit in logger.listeners:
            return
        self._level_changed = (
            not logger.isEnabledFor(logging.INFO) and logger.level == logging.NOTSET
        )
        if self._level_changed:
            logger.setLevel(logging.INFO)  # handlers of the program get these records, too
        logger.listeners.append(self._emit)

    def start(self) -> None:
        """Show the records held back so far, and from now on each at once."""
        self.hold()
        self._started = True
        held = self._held
        self._held = []
        for text in held:
            self._show(text)

    def close(self, error: BaseException | None = None) -> None:
        """Stop, and restore the log level; `error` is the exception that ended the run. Drops records still held."""
        if self._emit not in logger.listeners:
            return
        if isinstance(error, ClusterError):
            self.start()  # the records say what went wrong before
        logger.listeners.remove(self._emit)
        self._started = False
        self._held = []
        if self._level_changed:
            logger.setLevel(logging.NOTSET)

    def _emit(self, record: logging.LogRecord) -> None:
        """Show or hold back one record, unless it was shown already; one that says `at_once` is never held back."""
        if getattr(record, "shown", False):
            return
        text = printable(record.getMessage())
        if self._started or getattr(record, "at_once", False):
            self._show(text)
        else:
            self._held.append(text)
