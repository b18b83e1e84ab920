"""MLflow: `--track mlflow`."""

import os
import re
import time
from typing import Any

from dppo.config import plain_settings
from dppo.records.metrics.tensorboard import by_step
from dppo.records.observer import RunInfo

MAX_VALUE_LENGTH = 6000  # characters of a parameter
MAX_PARAMETERS = 100  # entries in one message
MAX_METRICS = 1000  # entries in one message
NOT_ALLOWED_IN_NAMES = re.compile(r"[^/\w.\- ]")


class Backend:
    """A run of MLflow, configured by its environment variables."""

    package = "mlflow-skinny"
    remedy = "Set MLFLOW_TRACKING_URI to a server, or to a file such as sqlite:///mlflow.db; or leave out `track`."

    @staticmethod
    def server() -> str:
        return f"MLFLOW_TRACKING_URI={os.environ.get('MLFLOW_TRACKING_URI', '')}"

    @staticmethod
    def check() -> None:
        """Raise if the tracking server, or the file in its place, cannot be used."""
        from mlflow import MlflowClient

        MlflowClient().get_experiment_by_name(experiment_name())

    def __init__(self, run: RunInfo, known_id: str | None) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._client: Any = MlflowClient()
        self._metric: Any = Metric
        self._last_batch: Any = None
        if known_id is None:
            known_id = self._create(run)
        self._client.update_run(known_id, status="RUNNING")
        self.id = str(known_id)
        self.place = (
            f"{self._client.tracking_uri}, experiment {experiment_name()}, run {run.run_dir.name}"
        )

    def _create(self, run: RunInfo) -> str:
        """Create a run with the settings as parameters; return its id."""
        from mlflow.entities import Param

        name = experiment_name()
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = self._client.create_experiment(name)
        else:
            experiment_id = experiment.experiment_id
        run_id: str = self._client.create_run(experiment_id, run_name=run.run_dir.name).info.run_id
        settings = plain_settings(run.config).items()
        parameters = [Param(setting, str(value)[:MAX_VALUE_LENGTH]) for setting, value in settings]
        while parameters:
            self._client.log_batch(run_id, params=parameters[:MAX_PARAMETERS])
            del parameters[:MAX_PARAMETERS]
        return run_id

    def send(self, row: dict[str, float | None]) -> None:
        """Send a row: metrics of evaluations at the step of the policy that was evaluated."""
        now_ms = int(1000 * time.time())
        metrics = []
        for step, values in by_step(row).items():
            for name, value in values.items():
                allowed_name = NOT_ALLOWED_IN_NAMES.sub("_", name)
                metrics.append(self._metric(allowed_name, value, now_ms, step))
        while metrics:
            batch = metrics[:MAX_METRICS]
            del metrics[:MAX_METRICS]
            self._last_batch = self._client.log_batch(self.id, metrics=batch, synchronous=False)

    def end(self, state: str) -> None:
        """Wait for the last rows, and end the run."""
        try:
            if self._last_batch is not None:
                self._last_batch.wait()
        finally:
            self._client.set_terminated(self.id, state)


def experiment_name() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME", "dppo")
