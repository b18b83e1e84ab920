"""Send the metrics of a run to experiment trackers: Weights & Biases and MLflow."""

import json
import os
import re
import time
from contextlib import suppress
from typing import Any

from dppo.config import Config, grouped, resolved
from dppo.files import read_file
from dppo.log import logger
from dppo.records.files.disk import write_file
from dppo.records.metrics.reading import plain
from dppo.records.metrics.writer import by_step
from dppo.records.observer import Observer, RunInfo
from dppo.records.result import Result
from dppo.user_code import require_package

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow-skinny"}
FILE = "trackers.json"  # of a run folder: the run's id in each tracker
LONGEST_VALUE, MOST_PARAMETERS = 6000, 100  # of a parameter in MLflow; in one of its messages
FINISHED, FAILED, KILLED = "FINISHED", "FAILED", "KILLED"
EXIT_CODES = {FINISHED: 0, FAILED: 1, KILLED: 255}  # which W&B shows as these states


def trackers(config: Config) -> list[Observer]:
    """Return the trackers that `config` asks for; raise ConfigError if the package of one is not installed."""
    for name in config.track:
        require_package(f"track={name}", name, PACKAGES[name])
    return [Tracker(name) for name in dict.fromkeys(config.track)]


class Tracker(Observer):
    """Sends rows to a tracker. No error of it ends the run: it is logged, and nothing more is sent."""

    def __init__(self, name: str) -> None:
        self._name = name
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
        ids, path = {}, run.run_dir / FILE
        with suppress(OSError, RecursionError, ValueError):
            found = json.loads(read_file(path, 1 << 16)) if run.resumed_at is not None else {}
            ids = {str(name): str(one) for name, one in found.items() if re.fullmatch(r"[\w-]{1,64}", str(one))}
        tracked = (_Wandb if self._name == "wandb" else _MLflow)(run, ids.get(self._name))
        write_file(path, json.dumps(ids | {self._name: tracked.id}).encode())
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
        metrics = [self._metric(key, value, now, step) for step, of in steps.items() for key, value in of.items()]
        self._sent = self._client.log_batch(self.id, metrics=metrics, synchronous=False)

    def end(self, state: str) -> None:
        if self._sent is not None:
            self._sent.wait()
        self._client.set_terminated(self.id, state)
