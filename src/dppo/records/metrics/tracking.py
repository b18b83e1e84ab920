"""Send rows of metrics to TensorBoard and experiment trackers."""

import json
import os
import queue
import re
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from dppo.config import Config, grouped, resolved
from dppo.files import open_file, read_file
from dppo.log import logger
from dppo.records.files.disk import write_file
from dppo.records.metrics.reading import plain
from dppo.records.observer import Observer, Result, RunInfo
from dppo.user_code import require_package

CLOSE_S = 30.0  # longest wait for the last events at the end of a run
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
TRACKERS = "trackers.json"  # of a run folder: the run's id in each tracker
LONGEST_VALUE, MOST_PARAMETERS = 6000, 100  # of a parameter in MLflow; in one of its messages
MOST_METRICS, NOT_IN_MLFLOW = 1000, re.compile(r"[^/\w.\- ]")  # in one of its messages; in the name of a metric
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"
EXIT_CODES = {FINISHED: 0, FAILED: 1, KILLED: 255}  # which W&B shows as these states


class TensorBoard(Observer):
    """Writes an event file in a thread of its own, as the import alone takes a second.

    An error ends the writing of events, not the training.
    """

    def __init__(self, run_dir: Path, purge_step: int) -> None:
        """Start the thread. TensorBoard drops earlier events of the run from `purge_step` on."""
        self._run_dir = run_dir
        self._purge_step = purge_step
        self._rows: queue.SimpleQueue[tuple[float, dict[str, float | None]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="dppo-tensorboard", daemon=True)
        self._thread.start()

    def on_iteration(self, row: dict[str, float]) -> None:
        """Pass the row to the thread."""
        if self._thread.is_alive():
            self._rows.put((time.time(), plain(row)))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Wait until all rows are in the file, for 30 s at most."""
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


def trackers(config: Config) -> list[Observer]:
    """Return the trackers that `config` asks for; raise ConfigError if the package of one is not installed."""
    for name in config.track:
        require_package(f"track={name}", name, PACKAGES[name])
    ids = dict[str, str]()
    return [Tracker(name, ids) for name in dict.fromkeys(config.track)]


class Tracker(Observer):
    """Sends rows to a tracker. No error of it ends the run: it is logged, and nothing more is sent."""

    def __init__(self, name: str, ids: dict[str, str] | None = None) -> None:
        """`ids`, by tracker, are those of the run so far, which all of its trackers share."""
        self._name, self._ids = name, {} if ids is None else ids
        self._tracked: _Wandb | _MLflow | None = None

    def _try(self, call: Any, *args: Any) -> Any:
        try:
            return call(*args)
        except (Exception, SystemExit) as error:
            self._tracked = None
            logger.warning("nothing more is sent to %s (%r); metrics.jsonl is complete", self._name, error)

    def on_start(self, run: RunInfo) -> None:
        """Begin a run of the tracker, or continue that of the run that is resumed."""
        self._tracked = self._try(self._begun, run)

    def _begun(self, run: RunInfo) -> Any:
        ids, path = {}, run.run_dir / TRACKERS
        with suppress(OSError, RecursionError, ValueError):
            found = json.loads(read_file(path, 1 << 16)) if run.resumed_at is not None else {}
            ids = {str(name): str(one) for name, one in found.items() if re.fullmatch(r"[\w-]{1,64}", str(one))}
        tracked = (_Wandb if self._name == "wandb" else _MLflow)(run, ids.get(self._name))
        self._ids.update(ids | self._ids | {self._name: tracked.id})
        write_file(path, json.dumps(self._ids).encode())
        logger.info("%s: %s", self._name, tracked.place)
        return tracked

    def on_iteration(self, row: dict[str, float]) -> None:
        """Send the row."""
        if self._tracked is not None:
            self._try(self._tracked.send, plain(row))

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """End the tracker's run, as finished, failed, or killed by a signal."""
        stopped_by = (result.stopped_by if result else None) or ""
        signalled = isinstance(error, KeyboardInterrupt | SystemExit) or stopped_by.startswith("SIG")
        if self._tracked is not None:
            self._try(self._tracked.end, KILLED if signalled else FINISHED if error is None else FAILED)


class _Wandb:
    def __init__(self, run: RunInfo, known: str | None) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dppo"),
            name=run.run_dir.name,
            dir=str(run.run_dir),
            id=known,
            resume="allow",
            config=grouped(resolved(run.config)),
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id, self.place = self._run.id, self._run.dir if self._run.offline else self._run.url
        self._run.define_metric("*", step_metric="global_step")
        self._run.define_metric("eval/*", step_metric="eval/global_step")

    def send(self, row: dict[str, float | None]) -> None:
        self._run.log({key: value for key, value in row.items() if value is not None})

    def end(self, state: str) -> None:
        self._run.finish(exit_code=EXIT_CODES[state])


class _MLflow:
    def __init__(self, run: RunInfo, known: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._client: Any = MlflowClient()
        self._metric: Any = Metric
        self._sent: Any = None
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "dppo")
        if known is None:
            found = self._client.get_experiment_by_name(name)
            experiment = self._client.create_experiment(name) if found is None else found.experiment_id
            known = self._client.create_run(experiment, run_name=run.run_dir.name).info.run_id
            settings = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in resolved(run.config).items()]
            for first in range(0, len(settings), MOST_PARAMETERS):
                self._client.log_batch(known, params=settings[first : first + MOST_PARAMETERS])
        self._client.update_run(known, status="RUNNING")
        self.id, self.place = str(known), f"{self._client.tracking_uri}, experiment {name}, run {run.run_dir.name}"

    def send(self, row: dict[str, float | None]) -> None:
        now, steps = int(1000 * time.time()), by_step(row)
        named = ((NOT_IN_MLFLOW.sub("_", key), value, step) for step, of in steps.items() for key, value in of.items())
        metrics = [self._metric(key, value, now, step) for key, value, step in named]
        for start in range(0, len(metrics), MOST_METRICS):
            batch = metrics[start : start + MOST_METRICS]
            self._sent = self._client.log_batch(self.id, metrics=batch, synchronous=False)

    def end(self, state: str) -> None:
        try:
            if self._sent is not None:
                self._sent.wait()
        finally:
            self._client.set_terminated(self.id, state)
