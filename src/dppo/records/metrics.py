"""The figures of a run: metrics.jsonl, which is the record, and the same for TensorBoard."""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.errors import DppoError
from dppo.records import sealed

FILE = "metrics.jsonl"
FLUSH_S = 1.0  # how old TensorBoard's view may be
CLOSE_S = 30.0  # how long close() waits for the last events to be written
Note = Callable[[str], None]


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


class MetricsWriter:
    """Write one row an iteration: to metrics.jsonl at once, to TensorBoard's event file beside training.

    A row costs its caller some 0.1 ms. No trouble with the disk stops training: it is told once, what could
    not be written to metrics.jsonl is kept and written when there is room again, and TensorBoard is given up.
    """

    def __init__(self, run_dir: Path, resume_iteration: int | None, *, note: Note = _tell) -> None:
        """Open, for a new run or to go on after `resume_iteration`; later rows are cut off.

        Raises:
            DppoError: the file cannot be written, or holds a run that is not to be resumed.
        """
        self.path = run_dir / FILE
        self._note = note
        self._pending = b""
        self._told = False
        try:
            kept = self._cut(resume_iteration)
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise DppoError(f"{self.path}: {sealed.cause(error)} {sealed.remedy(error)}") from error
        self._events = _EventFile(run_dir, 1 + max((int(row["global_step"]) for row in kept), default=0), note)

    def write(self, row: dict[str, float]) -> None:
        """Append one row; NaN and infinity become null, so that any JSON reader will do."""
        plain = {key: _plain(value) for key, value in row.items()}
        self._append(json.dumps(plain, allow_nan=False).encode() + b"\n")
        self._events.put(plain)

    def flush(self) -> None:
        """Wait until all rows so far would survive a power cut."""
        self._append(b"")
        with suppress(OSError):
            os.fsync(self._file)

    def history(self) -> list[dict[str, float]]:
        """All rows of the run, also those from before it was resumed."""
        return read_metrics(self.path)

    def close(self) -> None:
        """Waits until all rows are in both files, at most 30 s."""
        if self._file < 0:
            return
        self.flush()
        if self._pending:
            self._note(f"{self.path}: {self._pending.count(10)} rows were never written")
        os.close(self._file)
        self._file = -1
        self._events.close()

    def _append(self, line: bytes) -> None:
        self._pending += line
        try:
            while self._pending:
                self._pending = self._pending[os.write(self._file, self._pending) :]
        except OSError as error:
            if not self._told:
                self._note(f"{self.path}: {sealed.cause(error)} {sealed.remedy(error)} Training goes on.")
            self._told = True

    def _cut(self, resume_iteration: int | None) -> list[dict[str, float]]:
        """Leave the rows up to `resume_iteration`, whole lines only."""
        data = self.path.read_bytes() if self.path.exists() else b""
        if resume_iteration is None:
            if data:
                raise DppoError(f"{self.path}: holds a run already. Resume it, or choose another folder.")
            return []
        parsed = list(_parsed(data))
        kept = [(line, row) for line, row in parsed if row is not None and row["iteration"] <= resume_iteration]
        whole = b"".join(line for line, _ in kept)
        if whole != data:
            sealed.write_file(self.path, whole)
        if damaged := sum(row is None and line.endswith(b"\n") for line, row in parsed):
            self._note(f"{self.path}: {damaged} lines were no rows of metrics, and are left out")
        return [row for _, row in kept]


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The rows of metrics.jsonl (or of the run in the folder `path`), with null as NaN.

    A last line that a kill has torn is left out.

    Raises:
        DppoError: no such file, or a line that is no row.
    """
    path = path / FILE if path.is_dir() else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DppoError(f"{path}: {sealed.cause(error)} Give the folder of a run.") from error
    rows = []
    for number, (line, row) in enumerate(_parsed(data), 1):
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            raise DppoError(f"{path}:{number}: is no row of metrics. Delete this line.")
    return rows


def _parsed(data: bytes) -> Iterator[tuple[bytes, dict[str, float] | None]]:
    """Each line, and its row if it is whole and one."""
    for line in data.splitlines(keepends=True):
        row = None
        with suppress(ValueError):
            content = json.loads(line) if line.endswith(b"\n") else None
            if isinstance(content, dict) and isinstance(content.get("iteration"), int):
                row = {key: math.nan if value is None else value for key, value in content.items()}
        yield line, row


def _plain(value: Any) -> float | None:
    value = value.item() if hasattr(value, "item") else value
    return value if math.isfinite(value) else None


class _EventFile:
    """TensorBoard's events, written by a thread of its own: even the import takes a second."""

    def __init__(self, run_dir: Path, purge_step: int, note: Note) -> None:
        self._run_dir = run_dir
        self._purge_step = purge_step
        self._note = note
        self._rows: queue.SimpleQueue[tuple[float, dict[str, float | None]] | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="dppo-tensorboard", daemon=True)
        self._thread.start()

    def put(self, row: dict[str, float | None]) -> None:
        if self._thread.is_alive():
            self._rows.put((time.time(), row))

    def close(self) -> None:
        self._closing.set()
        self._rows.put(None)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._note(f"{self._run_dir}: the last events for TensorBoard were not written within {CLOSE_S:.0f} s")

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # whatever it is, it is no reason to stop training
            self._note(f"TensorBoard gets no more of this run ({error}); metrics.jsonl has all of it")

    def _write_all(self) -> None:
        """Write rows as they come, and flush at most once a second."""
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        file = RecordWriter(str(_new_event_file(self._run_dir)))
        try:
            file.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())
            # At each START but the first, TensorBoard drops what it has from this step on.
            start = SessionLog(status=SessionLog.START)
            file.write(Event(wall_time=time.time(), step=self._purge_step, session_log=start).SerializeToString())
            while (item := self._rows.get()) is not None:
                file.write(_event(*item))
                if self._rows.empty():
                    file.flush()
                    self._closing.wait(FLUSH_S)
        finally:
            file.close()


def _event(wall_time: float, row: dict[str, float | None]) -> bytes:
    """All scalars of a row as one event: one record costs a tenth of thirty."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary

    values = [
        Summary.Value(tag=key, simple_value=value) for key, value in row.items() if "/" in key and value is not None
    ]
    event = Event(wall_time=wall_time, step=int(row["global_step"] or 0), summary=Summary(value=values))
    return bytes(event.SerializeToString())


def _new_event_file(run_dir: Path) -> Path:
    """A name after those that are there: TensorBoard reads the files of a run in the order of their names."""
    seconds = int(time.time())
    for path in run_dir.glob("events.out.tfevents.*"):
        with suppress(ValueError):
            seconds = max(seconds, 1 + int(path.name.split(".")[3]))
    return run_dir / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}"
