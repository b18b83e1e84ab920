"""Write rows of metrics as events for TensorBoard."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dppo.files import open_file
from dppo.log import logger
from dppo.records.metrics.reading import Row
from dppo.records.metrics.writer import plain
from dppo.records.observer import Observer, Result
from dppo.records.outside import OutsideThread, never

CLOSE_S = 30.0  # longest wait for the last events at the end of a run


class TensorBoard(Observer):
    """Writes an event file in a thread of its own, as the import alone takes a second.

    An error ends the writing of events, not the training.
    """

    def __init__(
        self, run_dir: Path, purge_step: int, since_signal: Callable[[], float] = never
    ) -> None:
        """Begin to open the file. TensorBoard drops earlier events of the run from `purge_step` on."""
        self._run_dir = run_dir
        self._thread = OutsideThread(
            f"the disk of {run_dir}", notify=logger.info, since_signal=since_signal
        )
        self._file: _EventFile | None = None
        self._left_out = 0
        self._post("opening the events for TensorBoard", partial(self._open, purge_step))

    def on_iteration(self, row: Row) -> None:
        """Pass the row to the thread, unless too many are waiting for the disk."""
        if self._thread.is_full:
            self._left_out += 1
        else:
            self._post(
                "writing events for TensorBoard", partial(self._write, time.time(), plain(row))
            )

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Wait until all rows are in the file, for 30 s without progress at most, for 6 s after a signal."""
        if not self._post("closing the events for TensorBoard", self._close, CLOSE_S):
            logger.warning("%s: the last events for TensorBoard were not written", self._run_dir)
        if self._left_out:
            logger.warning(
                "%s: %d rows are not in the events for TensorBoard", self._run_dir, self._left_out
            )
        self._thread.close()

    def _post(self, action: str, function: Callable[[], None], patience_s: float = 0.0) -> bool:
        return self._thread.post(action, partial(self._try, function), patience_s)

    def _try(self, function: Callable[[], None]) -> None:
        try:
            function()
        except Exception as error:  # no error of TensorBoard is a reason to stop training
            self._file = None
            logger.warning(
                "No more events are written for TensorBoard (%s); metrics.jsonl is complete", error
            )

    def _open(self, purge_step: int) -> None:
        self._file = _EventFile(_new_event_file(self._run_dir), purge_step)

    def _write(self, wall_time: float, row: dict[str, float | None]) -> None:
        if self._file is not None:
            self._file.write(wall_time, row)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


class _EventFile:
    """An event file, written by the record writer of tensorboardX.

    Its `EventFileWriter` is not used, which follows a link of the file's name, and loses errors in its own thread.
    """

    def __init__(self, path: Path, purge_step: int) -> None:
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event: Any = Event
        self._summary: Any = Summary
        os.close(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        self._records: Any = RecordWriter(str(path))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # At each START except the first, TensorBoard drops earlier events from this step on.
        start = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=purge_step, session_log=start))

    def write(self, wall_time: float, row: dict[str, float | None]) -> None:
        """Write the scalars of a row as one event for each step: ten times cheaper than an event for each scalar."""
        for step, scalars in by_step(row).items():
            values = [
                self._summary.Value(tag=key, simple_value=value) for key, value in scalars.items()
            ]
            self._add(
                self._event(wall_time=wall_time, step=step, summary=self._summary(value=values))
            )
        self._records.flush()

    def close(self) -> None:
        self._records.close()

    def _add(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def by_step(row: dict[str, float | None]) -> dict[int, dict[str, float]]:
    """Return the scalars of a row by the env steps that they belong to: an evaluation is of an earlier policy."""
    scalars: dict[int, dict[str, float]] = {}
    for key, value in row.items():
        if "/" in key and value is not None:
            counter = "global_step"
            if key.startswith("eval/"):
                counter = "eval/global_step"
            step = int(row[counter] or 0)
            scalars.setdefault(step, {})[key] = value
    return scalars


def _new_event_file(run_dir: Path) -> Path:
    """Return a name after the existing ones: TensorBoard reads the files of a run in alphabetical order."""
    seconds = int(time.time())
    for path in run_dir.glob("events.out.tfevents.*"):
        with suppress(ValueError):
            seconds = max(seconds, 1 + int(path.name.split(".")[3]))
    return run_dir / f"events.out.tfevents.{seconds:010d}.{socket.gethostname()}"
