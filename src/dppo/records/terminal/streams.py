"""The stream that displays write to, and the log that they show."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TextIO

from dppo.errors import ClusterError, printable
from dppo.log import logger
from dppo.process_state.states import usable


class PatientStream:
    """A stream that ignores write errors: a closed terminal is not a reason to stop training.

    It keeps writing to the stream that it was created with, even if `sys.stdout` is replaced, and opens it again if
    user code has closed it.
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
        """Write a line and flush it, if possible."""
        self.write(f"{text}\n")
        self.flush()

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def showing_log(stream: TextIO) -> Iterator[None]:
    """Context in which each log record of `dppo` is a line of `stream`."""
    with closing(ShowLog(PatientStream(stream).line)) as show_log:
        show_log.start()
        yield


class ShowLog:
    """Shows log records of `dppo`: `hold` starts to store them, `start` shows stored and new ones, `close` stops."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._held: list[str] = []
        self._started = False
        self._level_changed = False

    def hold(self) -> None:
        """Store log records from now on, to be shown by `start`."""
        is_listening = self._emit in logger.listeners
        if is_listening:
            return
        drops_info = not logger.isEnabledFor(logging.INFO)
        has_own_level = logger.level != logging.NOTSET  # chosen by the program, so it stays
        self._level_changed = drops_info and not has_own_level
        if self._level_changed:
            # the log handlers of the program then get INFO records, too
            logger.setLevel(logging.INFO)
        logger.listeners.append(self._emit)

    def start(self) -> None:
        """Show the stored records, and from now on each new record at once."""
        self.hold()
        self._started = True
        stored = self._held
        self._held = []
        for text in stored:
            self._show(text)

    def close(self, error: BaseException | None = None) -> None:
        """Stop, and restore the log level; `error` is the exception that ended the run, if any.

        Stored records are shown before a ClusterError, and dropped otherwise.
        """
        if self._emit not in logger.listeners:
            return
        if isinstance(error, ClusterError):
            self.start()  # the records explain the error
        logger.listeners.remove(self._emit)
        self._started = False
        self._held = []
        if self._level_changed:
            logger.setLevel(logging.NOTSET)

    def _emit(self, record: logging.LogRecord) -> None:
        """Show or store one record; skip it if it has been shown elsewhere. Records with `at_once` are never stored."""
        if getattr(record, "shown", False):
            return
        text = printable(record.getMessage())
        if self._started or getattr(record, "at_once", False):
            self._show(text)
        else:
            self._held.append(text)
