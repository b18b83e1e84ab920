"""The hooks of a run, for displays, files, trackers, early stopping and pruning; and the results of runs."""

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any, NoReturn

from dppo.config import Config
from dppo.config.aliases import MODEL_METHODS, no_attribute
from dppo.config.trust import NAMING
from dppo.errors import CheckpointError, ConfigError, counted
from dppo.log import logger
from dppo.ppo.exchange.records import CollectionProgress, Episode, EpisodeInfo, Incident
from dppo.records.comparison import BaselineComparison
from dppo.records.metrics.reading import read_metrics
from dppo.records.terminal.figures import deviation, number


@dataclass(slots=True)
class EnvOptions:
    """The options with which environments are reset; observers change them with `RunInfo.set_env`."""

    now: dict[str, Any] | None = None
    fixed: bool = False
    """True until a resumed run has started, whose checkpoint has the options, and while a repeated row is reported."""

    def __post_init__(self) -> None:
        if not isinstance(self.now, dict | None):
            raise CheckpointError(
                f"env_options={self.now!r} in the checkpoint: not options of environments."
            )


@dataclass(frozen=True, slots=True)
class RunInfo:
    """A run that is about to start."""

    config: Config
    run_dir: Path
    title: str
    """The environment and the seed, in one line."""
    lines: tuple[str, ...]
    """The sizes and the folder of the run, in words."""
    total_steps: int
    """Env steps of the whole run, from its start to its end."""
    resumed_at: int | None
    """Iterations finished before this call; None for a new run."""
    options: EnvOptions = field(default_factory=EnvOptions, repr=False, compare=False)

    @property
    def env_options(self) -> dict[str, Any]:
        """The options that `set_env` has set, also before the run was resumed."""
        return deepcopy(self.options.now or {})

    def set_env(self, **options: Any) -> None:
        """Change the options of `reset`: from then on, each new episode starts with reset(seed=..., options=options).

        Arguments of the constructor (`env_kwargs`) stay as they are. The `reset` of the environment has to read its
        options: one that ignores them trains as before, and dppo cannot notice it.

        Called after iteration k, it takes effect with the policy after iteration k + 1, so in iteration k + 2, or
        k + 2 + K with a policy lag of K: it depends on the iteration alone. Called in `on_start`, it sets the options
        of the first episodes; of a run that is resumed, it is ignored, because the checkpoint has the options. A
        call is also ignored while `on_iteration` gets a row once more, because an evaluation has ended. Options that
        are not named stay as they are. Open episodes go on, and are rebuilt, with those that they started with.

        Raises:
            ConfigError: a value is not JSON.
        """
        try:
            options = json.loads(json.dumps(options, allow_nan=False))  # as a checkpoint holds them
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"set_env: {options!r} is not JSON ({error}). Use numbers, text, lists, dicts."
            ) from None
        if self.options.fixed:
            return
        if not self.options.now:
            logger.info(
                "set_env: new episodes start with reset(options=%s). The environment's `reset` has to read them; "
                "arguments of its constructor stay as they are.",
                json.dumps(options),
            )
        self.options.now = {**(self.options.now or {}), **options}


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
    """Mean return of the last 100 episodes at most, without those of wide exploration and those that a controller
    began; nan if none has finished."""
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
    recent_episodes: int = 0
    """Episodes in `episodic_return`."""
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
    """Lines about slow actors, cores that were all busy, evaluations and trackers."""
    baseline: BaselineComparison | None = None
    """The comparison of the best evaluation with the baseline; None without a baseline."""
    config: Config | None = field(default=None, compare=False)
    """The settings, with the objects that were given: environment, wrappers, model."""

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Answer a method that the model of another library has."""
            raise no_attribute(self, name, MODEL_METHODS)

    @property
    def objects(self) -> dict[str, Any]:
        """The environment, the wrappers and the model that were given as objects, which only this process can name."""
        values = {name: getattr(self.config, name, None) for name in NAMING}
        elements = {
            name: value if isinstance(value, tuple) else (value,) for name, value in values.items()
        }
        return {name: value for name, value in values.items() if any(map(callable, elements[name]))}

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The rows of metrics.jsonl written by this call. Each access reads the file."""
        return [row for row in read_metrics(self.run_dir) if row["iteration"] > self.resumed_at]

    @property
    def deployed(self) -> Path:
        """The path to load a policy from: the last checkpoint; with `never_worse` the folder, whose best counts."""
        if self.baseline is not None and self.baseline.never_worse:
            return self.run_dir
        return self.checkpoint

    @property
    def picture(self) -> Path:
        """The path of the learning curve."""
        return self.run_dir / "learning_curve.png"

    def __repr__(self) -> str:
        return (
            f"Result(env_name={self.env_name!r}, run_dir={str(self.run_dir)!r}, global_step={self.global_step}, "
            f"episodic_return={number(self.episodic_return)}, stopped_by={self.stopped_by!r})"
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
    info: dict[str, tuple[EpisodeInfo, ...]] = field(default_factory=dict)
    """By name, numbers in the info of the steps: `total`, `mean` and `last` of each episode that has it."""
    left_out: tuple[int, ...] = ()
    """Indices of the episodes that are left out, because the environment failed in them."""
    success_rate: float | None = None
    """Share of the episodes with a true `info["is_success"]` in their last step; None if no episode reports it."""

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

    def __iter__(self) -> NoReturn:
        """Answer `mean, std = ...`, which other libraries return."""
        raise TypeError("an Evaluation is not a pair. Use its mean_return and std_return.")

    def __repr__(self) -> str:
        left_out = f", {len(self.left_out)} left out" if self.left_out else ""
        spread = deviation(self.std_return, self.mean_return)
        return (
            f"Evaluation({self.env_name}: return {number(self.mean_return)} +- {spread}, "
            f"mean length {self.mean_length:.1f}, {counted(len(self.returns), 'episode')}{left_out})"
        )


class Observer:
    """Watches a run, and may stop it. Subclass it and override the methods you need; by default they do nothing.

    All calls come from the thread that called `train`, and training waits for each of them. An exception ends the run:
    a checkpoint is written, everything is closed, then `train` raises it.
    """

    def on_start(self, run: RunInfo) -> None:
        """Called first, when the run is ready to train; or after 10 s, if it takes longer to get ready."""

    def on_progress(self, progress: CollectionProgress) -> None:
        """Called about once a second during iterations that take longer than that, while segments are collected."""

    def on_iteration(self, row: dict[str, float]) -> bool | None:
        """Called after each iteration with its row; True stops the run with a checkpoint; None or False: it goes on.

        Any other answer, such as 1, ends the run with a TypeError. docs/METRICS.md describes the keys of the row. It is
        a copy: no file of the run gets what you add to it. If several evaluations have ended since the last row, it is
        called once more for each of the others.
        """

    def on_episode(self, episode: Episode) -> None:
        """Called for each finished training episode, in sampler order, at the end of its iteration."""

    def on_incident(self, incident: Incident) -> None:
        """Called when the run has recovered from a fault."""

    def on_checkpoint(self, path: Path) -> None:
        """Called when a checkpoint has been written."""

    def closing_notes(self) -> Sequence[str]:
        """Add lines to the summary at the end of the run."""
        return ()

    def on_end(self, result: Result | None, error: BaseException | None) -> None:
        """Called once at the end of the run, however it ends, also if `on_start` raised.

        Args:
            result: the result so far; None if the run ended before training started.
            error: the exception that ended the run; None if it finished or was stopped.
        """


class Display(Observer):
    """Shows a run to the user; this one shows nothing."""

    def prepare(self, text: str) -> None:
        """Show `text` until `on_start` or `on_end`, if it can be erased then; hold back notes until then."""

    def note(self, text: str) -> None:
        """Show `text` at once, also while the run is being prepared. From any thread."""
