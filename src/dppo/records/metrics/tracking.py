"""Send rows of metrics to experiment trackers."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from dppo.config import Config, grouped, resolved
from dppo.errors import ConfigError
from dppo.files import read_file
from dppo.log import logger
from dppo.records.files.disk import write_file
from dppo.records.metrics.reading import plain
from dppo.records.metrics.tensorboard import by_step
from dppo.records.observer import Observer, Result, RunInfo
from dppo.records.outside import NoAnswer, OutsideThread, never
from dppo.user_code import in_a_line, require_package

CLOSE_S = 30.0  # longest wait for the last rows at the end of a run
CHECK_S = 20.0  # the same for a tracker before the run starts
PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
TRACKERS = "trackers.json"  # of a run folder: the run's id in each tracker
LONGEST_VALUE, MOST_PARAMETERS = 6000, 100  # of a parameter in MLflow; in one of its messages
MOST_METRICS, NOT_IN_MLFLOW = 1000, re.compile(r"[^/\w.\- ]")  # in one of its messages; in the name of a metric
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"
EXIT_CODES = {FINISHED: 0, FAILED: 1, KILLED: 255}  # which W&B shows as these states


def trackers(
    config: Config, notify: Callable[[str], object] = logger.warning, since_signal: Callable[[], float] = never
) -> list[Observer]:
    """Return the trackers that `config` asks for; raise ConfigError if one is not installed, or refuses to work.

    `notify` and `since_signal` as for `OutsideThread`.
    """
    for name in config.track:
        require_package(f"track={name}", name, PACKAGES[name])
    shared = _Ids()
    found = list[Observer]()
    for name in dict.fromkeys(config.track):
        place = f"the server of {name}"
        checking = OutsideThread(place, notify=notify, since_signal=since_signal)
        _check(name, checking)
        checking.close()
        found.append(Tracker(name, OutsideThread(place, notify=notify, since_signal=since_signal), shared))
    return found


def _check(name: str, thread: OutsideThread) -> None:
    """Raise ConfigError if a tracker refuses to work, before anything of the run has started."""
    kind = _kind(name)
    problem = ""
    try:
        thread.call("connecting", kind.check, CHECK_S)
    except NoAnswer:
        problem = f"{kind.server()} does not answer within {CHECK_S:.0f} s"
    except (Exception, SystemExit) as error:  # of any class of a package of others
        problem = f"{kind.server()} refuses: {in_a_line(error)[:500]}"
    if problem:
        raise ConfigError(f"track={name}: {problem}. {kind.remedy}")


def tracking_notes(observers: Iterable[Observer]) -> list[str]:
    """Return a line for the end of the run for each tracker among the observers that has failed."""
    return [note for observer in observers if isinstance(observer, Tracker) for note in observer.notes()]


class _Ids:
    """The ids of a run by tracker, which all of its trackers share, and write."""

    def __init__(self) -> None:
        self.by_name = dict[str, str]()
        self.lock = threading.Lock()


class Tracker(Observer):
    """Sends rows to a tracker, in a thread. No error of it ends the run: it is logged, and nothing more is sent."""

    def __init__(self, name: str, thread: OutsideThread, ids: _Ids) -> None:
        self._name, self._thread, self._ids = name, thread, ids
        self._tracked: _Wandb | _MLflow | None = None
        self._problem = ""

    def notes(self) -> list[str]:
        """Return a line for the end of the run if something was not sent."""
        return [f"Tracking: {self._problem}"] if self._problem else []

    def _try(self, call: Callable[[], object]) -> None:
        """Make a call in the thread; log its error, and call no more."""
        if self._problem:
            return
        try:
            call()
        except (Exception, SystemExit) as error:
            self._tracked = None
            self._problem = f"nothing more is sent to {self._name} ({error!r}); metrics.jsonl is complete"
            logger.warning("%s", self._problem)

    def on_start(self, run: RunInfo) -> None:
        """Begin a run of the tracker, or continue that of the run that is resumed."""
        self._thread.post("beginning a run", partial(self._try, partial(self._begin, run)))

    def _begin(self, run: RunInfo) -> None:
        self._tracked = self._begun(run)

    def _begun(self, run: RunInfo) -> Any:
        ids, path = {}, run.run_dir / TRACKERS
        with suppress(OSError, RecursionError, ValueError):
            found = json.loads(read_file(path, 1 << 16)) if run.resumed_at is not None else {}
            ids = {str(name): str(one) for name, one in found.items() if re.fullmatch(r"[\w-]{1,64}", str(one))}
        tracked = _kind(self._name)(run, ids.get(self._name))
        with self._ids.lock:
            self._ids.by_name.update(ids | self._ids.by_name | {self._name: tracked.id})
            write_file(path, json.dumps(self._ids.by_name).encode())
        logger.info("%s: %s", self._name, tracked.place)
        return tracked

    def on_iteration(self, row: dict[str, float]) -> None:
        """Send the row; do not wait for that."""
        if not self._problem:
            self._thread.post("sending rows", partial(self._try, partial(self._send, plain(row))), 0)

    def _send(self, row: dict[str, float | None]) -> None:
        if self._tracked is not None:
            self._tracked.send(row)

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """End the tracker's run, as finished, failed, or killed by a signal."""
        stopped_by = (result.stopped_by if result else None) or ""
        signalled = isinstance(error, KeyboardInterrupt | SystemExit) or stopped_by.startswith("SIG")
        state = KILLED if signalled else FINISHED if error is None else FAILED
        if not self._thread.post("ending the run", partial(self._try, partial(self._end, state)), CLOSE_S):
            logger.warning("%s does not answer: the last rows were not sent; metrics.jsonl is complete", self._name)
        self._thread.close()

    def _end(self, state: str) -> None:
        if self._tracked is not None:
            self._tracked.end(state)


def _kind(name: str) -> type[_Wandb] | type[_MLflow]:
    return _Wandb if name == "wandb" else _MLflow


class _Wandb:
    remedy = "Log in with `wandb login`, set WANDB_MODE=offline, or leave out `track`."

    @staticmethod
    def server() -> str:
        return os.environ.get("WANDB_BASE_URL", "Weights & Biases")

    @staticmethod
    def check() -> None:
        """Raise if W&B is not configured; its server is not asked where runs are kept here."""
        import wandb

        mode = os.environ.get("WANDB_MODE") or getattr(wandb.setup().settings, "mode", "online")
        if mode in ("online", "run", "shared"):
            wandb.login(timeout=int(CHECK_S))

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
    remedy = "Set MLFLOW_TRACKING_URI to a server, or to a file such as sqlite:///mlflow.db; or leave out `track`."

    @staticmethod
    def server() -> str:
        return f"MLFLOW_TRACKING_URI={os.environ.get('MLFLOW_TRACKING_URI', '')}"

    @staticmethod
    def check() -> None:
        """Raise if the tracking server, or the file in its place, cannot be used."""
        from mlflow import MlflowClient

        MlflowClient().get_experiment_by_name(os.environ.get("MLFLOW_EXPERIMENT_NAME", "dppo"))

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
