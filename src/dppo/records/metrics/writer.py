"""Write rows of metrics to metrics.jsonl, complete through kills, full disks and resuming."""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.errors import DppoError
from dppo.files import open_file, read_file
from dppo.log import logger
from dppo.records.files.disk import cause, make_folder, remedy, write_file
from dppo.records.metrics.reading import FILE, parsed, plain
from dppo.records.observer import Result
from dppo.records.outside import FileWriter


class MetricsWriter(FileWriter):
    """Writes one row per iteration to metrics.jsonl, immediately.

    A row takes about 0.1 ms. A disk error is logged once, and rows stay in memory until they can be written.
    """

    def __init__(
        self, run_dir: Path, resume_iteration: int | None, file: str = FILE, line_of: Callable[..., Any] = plain
    ) -> None:
        """Open the file for a new run, or cut off the rows after `resume_iteration` and append.

        `line_of` returns the JSON values of a row. Raises a DppoError if the file cannot be written, or holds the rows
        of another run.
        """
        self.path, self._line_of = run_dir / file, line_of
        self._pending = b""
        self._warned = False
        try:
            kept = self._cut(resume_iteration)
            self._file = open_file(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        except OSError as error:
            raise DppoError(f"{self.path}: {cause(error)} {remedy(error)}") from error
        self.last_step = max((int(row["global_step"]) for row in kept), default=0)
        """Env steps up to the last row that is kept."""

    def taken(self, row: dict[str, Any]) -> bytes | None:
        """Return the line of a row; NaN and infinity become null, as in strict JSON."""
        line = self._line_of(row)
        return json.dumps(line, allow_nan=False).encode() + b"\n" if line else None

    def write(self, taken: bytes) -> None:
        """Append a line."""
        self._append(taken)

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
        """Write the file anew if it was deleted or replaced: the one that is open still has all rows."""
        with suppress(FileNotFoundError):
            if os.path.samestat(os.lstat(self.path), os.fstat(self._file)):
                return
        make_folder(self.path.parent)
        write_file(self.path, os.pread(self._file, os.fstat(self._file).st_size, 0))
        os.close(self._file)
        self._file = open_file(self.path, os.O_RDWR | os.O_APPEND)
        logger.warning("%s: was deleted or replaced by somebody; all of its rows are written anew", self.path)

    def _append(self, line: bytes) -> None:
        self._pending += line
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._file, self._pending) :]
        except OSError as error:
            if not self._warned:
                logger.warning("%s: %s %s Training continues.", self.path, cause(error), remedy(error))
            self._warned = True

    def _cut(self, resume_iteration: int | None) -> list[dict[str, float]]:
        """Keep the complete lines up to `resume_iteration`; return their rows."""
        data = b""
        with suppress(FileNotFoundError):
            data = read_file(self.path)
        if resume_iteration is None:
            if data:
                raise DppoError(f"{self.path}: contains a run already. Resume it, or choose another folder.")
            return []
        lines = list(parsed(data))
        kept = [(line, row) for line, row in lines if row is not None and row["iteration"] <= resume_iteration]
        whole = b"".join(line for line, _ in kept)
        shared = data and os.stat(self.path).st_nlink > 1  # by a hard link, whose content must not change
        if whole != data or shared:
            write_file(self.path, whole)
        if damaged := sum(row is None and line.endswith(b"\n") for line, row in lines):
            logger.warning("%s: skipped %d malformed %s", self.path, damaged, "line" if damaged == 1 else "lines")
        return [row for _, row in kept]
