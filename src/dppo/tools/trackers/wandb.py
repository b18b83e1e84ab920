"""Weights & Biases: `--track wandb`."""

import os
from typing import Any

from dppo.config import grouped, plain_settings
from dppo.records.observer import RunInfo
from dppo.tools.trackers import FAILED, FINISHED, KILLED

EXIT_CODES = {FINISHED: 0, FAILED: 1, KILLED: 255}  # W&B shows these as the states of a run
LOGIN_S = 20


class Backend:
    """A run of Weights & Biases, configured by its environment variables."""

    package = "wandb"
    remedy = "Log in with `wandb login`, set WANDB_MODE=offline, or leave out `track`."

    @staticmethod
    def server() -> str:
        """The address of the server, or the name of the public one."""
        return os.environ.get("WANDB_BASE_URL", "Weights & Biases")

    @staticmethod
    def check() -> None:
        """Raise if W&B is not configured. Its server is not asked if runs are kept on this machine."""
        import wandb

        mode = os.environ.get("WANDB_MODE") or getattr(wandb.setup().settings, "mode", "online")
        if mode in ("online", "run", "shared"):
            wandb.login(timeout=LOGIN_S)

    def __init__(self, run: RunInfo, known_id: str | None) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dppo"),
            name=run.run_dir.name,
            dir=str(run.run_dir),
            id=known_id,
            resume="allow",
            config=grouped(plain_settings(run.config)),
            settings=wandb.Settings(console="off", silent=True),
        )
        self.id = str(self._run.id)
        self.place = str(self._run.dir if self._run.offline else self._run.url)
        self._run.define_metric("*", step_metric="global_step")
        self._run.define_metric("eval/*", step_metric="eval/global_step")

    def send(self, row: dict[str, float | None]) -> None:
        """Log the finite metrics of a row."""
        finite = {name: value for name, value in row.items() if value is not None}
        self._run.log(finite)

    def end(self, state: str) -> None:
        """End the run with the exit code that W&B shows as `state`."""
        self._run.finish(exit_code=EXIT_CODES[state])
