"""Write rows of metrics as events for TensorBoard."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from dppo.files import open_file
from dppo.log import logger
from dppo.records.metrics.reading import plain
from dppo.records.observer import Observer, Result
from dppo.records.outside import ENDING_S, MOST_QUEUED, TICK_S, never

CLOSE_S = 30.0  # longest wait for the last events at the end of a run


class TensorBoard(Observer):
    """Writes an event file in a thread of its own, as the import alone takes a second.

    An error ends the writing of events, not the training.
    """

    def __init__(self, run_dir: Path, purge_step: int, since_signal: Callable[[], float] = never) -> None:
        """Start the thread. TensorBoard drops earlier events of the run from `purge_step` on."""
        self._run_dir = run_dir
        self._purge_step = purge_step
        self._since_signal = since_signal
        self._rows: queue.Queue[tuple[float, dict[str, float | None]] | None] = queue.Queue()
        self._left_out = 0
        self._thread = threading.Thread(target=self._run, name="dppo-tensorboard", daemon=True)
        self._thread.start()

    def on_iteration(self, row: dict[str, float]) -> None:
        """Pass the row to the thread, unless too many are waiting for the disk."""
        if not self._thread.is_alive():
            return
        if self._rows.qsize() < MOST_QUEUED:
            self._rows.put((time.time(), plain(row)))
        else:
            self._left_out += 1

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Wait until all rows are in the file, for 30 s at most, for 6 s after a signal."""
        self._rows.put(None)
        began = time.monotonic()
        while self._thread.is_alive():
            waited_s = time.monotonic() - began
            if waited_s >= CLOSE_S or min(waited_s, self._since_signal()) >= ENDING_S:
                text = "%s: the last events for TensorBoard were not written within %.0f s"
                logger.warning(text, self._run_dir, waited_s)
                break
            self._thread.join(min(TICK_S, CLOSE_S))
        if self._left_out:
            logger.warning("%s: %d rows are not in the events for TensorBoard", self._run_dir, self._left_out)

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # no error of TensorBoard is a reason to stop training
            logger.warning("No more events are written for TensorBoard (%s); metrics.jsonl is complete", error)

    def _write_all(self) -> None:
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
