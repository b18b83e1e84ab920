"""Write metrics.jsonl so that it stays complete through kills, full disks and resuming; and events of TensorBoard."""

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dppo.errors import DppoError
from dppo.files import open_file, read_file
from dppo.log import logger
from dppo.records.files.disk import cause, make_folder, remedy, write_file
from dppo.records.metrics.reading import FILE, parsed, plain
from dppo.records.observer import Observer
from dppo.records.result import Result

FLUSH_S = 1.0  # between two flushes
CLOSE_S = 30.0  # longest wait for the last events at the end of a run


class MetricsWriter(Observer):
    """Writes one row per iteration to metrics.jsonl, immediately.

    A row takes about 0.1 ms. A disk error is logged once, and rows stay in memory until they can be written.
    """

    def __init__(
        self, run_dir: Path, resume_iteration: int | None, file: str = FILE, line_of: Callable[..., Any] = plain
    ) -> None:
        """Open the file for a new run, or cut off the rows after `resume_iteration` and append.

        `line_of` returns the JSON values of a row.

        Raises a DppoError if the file cannot be written, or holds the rows of another run.
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

    def on_iteration(self, row: dict[str, Any]) -> None:
        """Append one row; NaN and infinity become null, as in strict JSON."""
        self._append(json.dumps(self._line_of(row), allow_nan=False).encode() + b"\n")

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


class TensorBoard(Observer):
    """Writes an event file in a thread of its own, as the import alone takes a second.

    An error ends the writing of events, not the training.
    """

    def __init__(self, run_dir: Path, purge_step: int) -> None:
        """Start the thread. TensorBoard drops earlier events of the run from `purge_step` on."""
        self._run_dir = run_dir
        self._purge_step = purge_step
        self._rows: queue.SimpleQueue[tuple[float, dict[str, float | None]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dppo-tensorboard", daemon=True)
        self._thread.start()

    def on_iteration(self, row: dict[str, float]) -> None:
        """Pass the row to the thread."""
        if self._thread.is_alive():
            self._rows.put((time.time(), plain(row)))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Wait until all rows are in the file, for 30 s at most."""
        self._closing.set()
        self._rows.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s: the last events for TensorBoard were not written within %.0f s", self._run_dir, CLOSE_S)

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # no error of TensorBoard is a reason to stop training
            logger.warning("No more events are written for TensorBoard (%s); metrics.jsonl is complete", error)

    def _write_all(self) -> None:
        """Write rows as they arrive; flush at most once a second."""
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        path = _new_event_file(self._run_dir)
        os.close(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        with closing(RecordWriter(str(path))) as file:
            file.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            # At each START except the first, TensorBoard drops earlier events from this step on.
            start = SessionLog(status=SessionLog.START)
            file.write(Event(wall_time=time.time(), step=self._purge_step, session_log=start).SerializeToString())
            while (item := self._rows.get()) is not None:
                wall_time, row = item
                for step, scalars in by_step(row).items():
                    values = [Summary.Value(tag=key, simple_value=value) for key, value in scalars.items()]
                    # All scalars as one event: ten times cheaper than an event for each.
                    event = Event(wall_time=wall_time, step=step, summary=Summary(value=values))
                    file.write(event.SerializeToString())
                if self._rows.empty():
                    file.flush()
                    self._closing.wait(FLUSH_S)


def by_step(row: dict[str, float | None]) -> dict[int, dict[str, float]]:
    """Return the scalars of a row by the env steps that they belong to: an evaluation is of an earlier policy."""
    found: dict[int, dict[str, float]] = {}
    for key, value in row.items():
        if "/" in key and value is not None:
            of = "eval/global_step" if key.startswith("eval/") else "global_step"
            found.setdefault(int(row[of] or 0), {})[key] = value
    return found


def _new_event_file(run_dir: Path) -> Path:
    """Return a name after the existing ones: TensorBoard reads the files of a run in alphabetical order."""
    seconds = int(time.time())
    for path in run_dir.glob("events.out.tfevents.*"):
        with suppress(ValueError):
            seconds = max(seconds, 1 + int(path.name.split(".")[3]))
    return run_dir / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}"
