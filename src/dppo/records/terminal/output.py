"""The stream that a display writes to, and the log records that it shows."""

import logging
from collections.abc import Callable
from contextlib import suppress
from logging.handlers import MemoryHandler
from typing import Any, TextIO

from dppo.errors import ClusterError, printable
from dppo.log import logger


class PatientStream:
    """A stream that ignores write errors: a closed terminal is not a reason to stop training."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write `text` if possible."""
        with suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush if possible."""
        with suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ShowLog(logging.Handler):
    """Shows the log records of `dppo` from `start` to `close`, preceded by those since `hold`.

    The user's own logging gets all records at once.
    """

    def __init__(self, show: Callable[[str], None]) -> None:
        super().__init__()
        self._show = show
        self._held: MemoryHandler | None = None
        self._level_changed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record."""
        self._show(printable(record.getMessage()))

    def hold(self) -> None:
        """Keep records until `start`."""
        if self._held is None:
            self._level_changed = not logger.isEnabledFor(logging.INFO) and logger.level == logging.NOTSET
            if self._level_changed:
                logger.setLevel(logging.INFO)
            self._held = MemoryHandler(capacity=1, flushOnClose=False)  # keeps all of them until it has a target
            self._held.setLevel(logging.INFO)
            logger.addHandler(self._held)

    def start(self) -> None:
        """Show the records kept so far, and from now on each at once."""
        self.hold()
        assert self._held is not None
        self._held.setTarget(self)
        self._held.flush()

    def close(self, error: BaseException | None = None) -> None:
        """Stop, and restore the log level; `error` is the exception that ended the run. Drops records still held."""
        if self._held is not None:
            if isinstance(error, ClusterError):
                self.start()  # the records say what went wrong before
            logger.removeHandler(self._held)
            self._held.close()
            self._held = None
            if self._level_changed:
                logger.setLevel(logging.NOTSET)
        super().close()
