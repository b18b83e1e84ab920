"""Write rows of metrics to metrics.jsonl, complete through kills, full disks and resuming."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dppo.errors import DppoError, counted
from dppo.files import open_file, read_file
from dppo.log import logger
from dppo.records.files.disk import cause, make_folder, remedy, write_file
from dppo.records.metrics.reading import parsed
from dppo.records.observer import Result
from dppo.records.outside import FileWriter


def plain(row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return a row as Python numbers; NaN and infinity, which JSON does not have, become None."""
    plain_row = {}
    for key, value in row.items():
        number = value.item() if hasattr(value, "item") else value
        plain_row[key] = number if math.isfinite(number) else None
    return plain_row


class MetricsWriter(FileWriter):
    """Writes one row per iteration to metrics.jsonl, immediately.

    A row takes about 0.1 ms. A disk error is logged once, and rows stay in memory until they can be written.
    """

    def __init__(self, path: Path, line_of: Callable[[dict[str, float]], Any] = plain) -> None:
        """Open the file `path`, to append to it. `line_of` returns the JSON values of a row.

        Raises a DppoError if the file cannot be written.
        """
        self.path = path
        self._line_of = line_of
        self._pending = b""
        self._warned = False
        with _disk_errors(path):
            self._file = open_file(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)

    def snapshot(self, row: dict[str, Any]) -> bytes | None:
        """Return the line of a row; NaN and infinity become null, as in strict JSON."""
        line = self._line_of(row)
        if line:
            return json.dumps(line, allow_nan=False).encode() + b"\n"
        return None

    def write(self, snapshot: bytes) -> None:
        """Append a line."""
        self._append(snapshot)

    def flush(self) -> None:
        """Wait until all rows so far would survive a power cut."""
        self._append(b"")
        with suppress(OSError):
            os.fsync(self._file)
            self._put_back()

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Write the remaining rows and close the file."""
        if self._file < 0:
            return
        self.flush()
        if self._pending:
            logger.warning("%s: %d rows could not be written", self.path, self._pending.count(10))
        os.close(self._file)
        self._file = -1

    def _put_back(self) -> None:
        """Write the file again if it was deleted or replaced: the one that is open still has all rows."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self._file)):
                return
        make_folder(self.path.parent)
        write_file(self.path, os.pread(self._file, os.fstat(self._file).st_size, 0))
        os.close(self._file)
        self._file = open_file(self.path, os.O_RDWR | os.O_APPEND)
        logger.warning(
            "%s: was deleted or replaced by another program; all of its rows are written again",
            self.path,
        )

    def _append(self, line: bytes) -> None:
        self._pending += line
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._file, self._pending) :]
        except OSError as error:
            if not self._warned:
                logger.warning(
                    "%s: %s %s Training continues.", self.path, cause(error), remedy(error)
                )
            self._warned = True


def cut_rows(path: Path, last_iteration: int | None) -> None:
    """Cut off the rows after `last_iteration` from a file, if it exists, and malformed lines.

    Raises a DppoError if the file cannot be written, or holds the rows of a run although `last_iteration` is None.
    """
    with _disk_errors(path):
        try:
            data = read_file(path)
        except FileNotFoundError:
            return
        if last_iteration is None:
            if data:
                raise DppoError(
                    f"{path}: contains a run already. Resume it, or choose another folder."
                )
            return
        lines = list(parsed(data))
        rows = b"".join(
            line for line, row in lines if row is not None and row["iteration"] <= last_iteration
        )
        # the content of the other name must not change
        has_hard_links = data and os.stat(path).st_nlink > 1
        if rows != data or has_hard_links:
            write_file(path, rows)
        malformed = sum(row is None and line.endswith(b"\n") for line, row in lines)
        if malformed:
            logger.warning("%s: skipped %s", path, counted(malformed, "malformed line"))


@contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Context that raises a DppoError in place of an error of the disk."""
    try:
        yield
    except OSError as error:
        raise DppoError(f"{path}: {cause(error)} {remedy(error)}") from error
