"""The results of a run and of an evaluation."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from dppo.config import Config
from dppo.config.trust import NAMING
from dppo.errors import counted
from dppo.records.metrics.reading import read_metrics


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run that finished, was stopped, or failed."""

    env_name: str
    """The id of the environment, or the import path of a callable."""
    run_dir: Path
    """The folder of the run, as an absolute path."""
    checkpoint: Path
    """The last checkpoint written."""
    iterations: int
    resumed_at: int
    """Iterations finished before this call; 0 for a new run."""
    global_step: int
    """Env steps over all environments, from the start of the run."""
    episodes: int
    episodic_return: float
    """Mean return of the last 100 episodes at most; nan if none has finished."""
    wall_s: float
    """Seconds from the call of `train` to the last checkpoint."""
    training_s: float
    """Seconds from the first request for segments to the end of the last update."""
    steps_per_s: float
    """Env steps per second of training in this call; nan if nothing was left to do."""
    weights_sha256: str
    """Fingerprint of the final weights."""
    incidents: dict[str, int]
    """Incidents that the run recovered from, counted by kind."""
    stopped_by: str | None
    """Name of the signal, observer or exception that ended the run early; None if it finished."""
    model_name: str | None = None
    """The import path of the user's network; None for the default network."""
    wrapper_names: tuple[str, ...] = ()
    times: str = ""
    """The times of collecting and of updating in an iteration, in words; "" for less than two iterations."""
    bottleneck: str = ""
    """The bottleneck of the run, in words; "" if no other setting would gain enough."""
    env_faults: dict[str, int] = field(default_factory=dict)
    """Faults that the run survived, by environment and kind: "sampler 3, env 0: ValueError in step"; "steps lost"."""
    notes: tuple[str, ...] = ()
    """Lines about slow actors."""
    config: Config | None = field(default=None, compare=False)
    """The settings, with the objects that were given: environment, wrappers, model."""

    @property
    def objects(self) -> dict[str, Any]:
        """The environment, the wrappers and the model that were given as objects, which only this process can name."""
        named = {name: getattr(self.config, name, None) for name in NAMING}
        several = {name: value if isinstance(value, tuple) else (value,) for name, value in named.items()}
        return {name: value for name, value in named.items() if any(map(callable, several[name]))}

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl written by this call. Each access reads the file."""
        return [row for row in read_metrics(self.run_dir) if row["iteration"] > self.resumed_at]

    @property
    def picture(self) -> Path:
        """The path of the learning curve."""
        return self.run_dir / "learning_curve.png"

    def __repr__(self) -> str:
        return (
            f"Result(env_name={self.env_name!r}, run_dir={str(self.run_dir)!r}, global_step={self.global_step}, "
            f"episodic_return={self.episodic_return:.1f}, stopped_by={self.stopped_by!r})"
        )


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation:
    """Returns and lengths of the episodes that a policy played."""

    env_name: str
    """The environment's id, or the import path of a callable or class."""
    returns: tuple[float, ...]
    """Undiscounted sum of rewards of each episode."""
    lengths: tuple[int, ...]
    """Env steps of each episode."""

    @property
    def mean_return(self) -> float:
        """Mean of the episode returns."""
        return fmean(self.returns)

    @property
    def std_return(self) -> float:
        """Standard deviation of the episode returns, over these episodes (not an estimate from a sample)."""
        return pstdev(self.returns)

    @property
    def mean_length(self) -> float:
        """Mean number of env steps of an episode."""
        return fmean(self.lengths)

    def __repr__(self) -> str:
        return (
            f"Evaluation({self.env_name}: return {self.mean_return:.1f} +- {self.std_return:.1f}, "
            f"mean length {self.mean_length:.1f}, {counted(len(self.returns), 'episode')})"
        )
