"""The settings of actors, learners and the run: where and how it computes, for how long, and what it stores."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from dppo.config.field import constant, free, setting
from dppo.config.parts.env import Sampling
from dppo.errors import ConfigError
from dppo.slots.layout import Layout
from dppo.user_code import import_path

EVAL_EPISODES = 20
"""Episodes of each evaluation: with steps of 1 s and episodes of 168 steps, an hour in one process."""

NEWEST_CHECKPOINTS = 3


@dataclass(frozen=True, kw_only=True)
class Actors:
    """Collecting on Ray."""

    num_actors: int | str = free(0)
    """Ray actors that host the samplers, one each at most; 0: without Ray; auto: as many as there is room for, also
    while nodes come and go; 4..64 or 4..: the same between bounds. Changes the time, never the result."""
    address: str | None = free(None)
    """Address of a running Ray cluster, auto or host:port. Default: $RAY_ADDRESS if it is set; otherwise Ray is started
    here."""
    upload: tuple[Path, ...] = free(())
    """Folders whose files are sent to the nodes of a cluster that do not share them: the current one as `.`; 100 MB at
    most, without what git ignores, .git, .venv and the folders of runs."""
    cpus_per_actor: float = free(1.0, gt=0)
    """Logical CPUs that Ray reserves for each actor."""
    actor_gpus: float = free(0.0, ge=0)
    """GPUs that Ray reserves for each actor, for its simulator."""
    actor_resources: dict[str, float] | list[dict[str, float]] = free({})
    """Other resources that Ray reserves for each actor, as JSON: '{"licence": 1}'; on a cluster also a list of
    alternatives, such as '[{"node:10.0.0.1": 0.25}, {"node:10.0.0.2": 0.1}]': 4 on one node, 10 on another."""
    actors_per_node: int | None = free(None, gt=0, le=100)
    """Maximum number of actors on one node; none: as many as it has room for."""
    ranks_per_env: int = setting(1, resume="close", gt=0, le=100_000)
    """Ranks that the program of each environment has, for solvers with MPI. The factory of the environment asks for
    them by a parameter slots; dppo.remote:make does. Sums in other orders differ in their last bits, so it is part of
    the result."""
    cores_per_rank: int = free(1, ge=0, le=1024)
    """Cores that each rank of ranks_per_env has to itself and is bound to. An actor reserves those of all its
    environments, and hosts no more samplers than that. 0: ranks share all cores, and are not bound."""
    nodes_per_env: int | str = free(1)
    """Nodes of a cluster among which the ranks of each environment are divided evenly; auto: the fewest on which they
    fit at the start. Changes no result if MPI sums in the same order."""
    samplers_per_actor: int | None = free(None, gt=0)
    """Maximum number of samplers in one process, for simulators that allow few instances in a process: with 1 and
    envs_per_sampler=1, one instance. Samplers then move only to actors with room, and evaluations play on actors of
    their own. none: no limit, until a second instance cannot be made where the first one could."""
    segment_timeout_s: float = free(600.0, gt=0)
    """Timeout in seconds for one step, reset or constructor of an environment; a slower actor is killed and
    replaced."""
    start_timeout_s: float | None = free(None, gt=0)
    """Timeout in seconds for constructing an environment. Default: segment_timeout_s; once constructors have been
    timed, 20 times the measured duration, between 300 s and segment_timeout_s."""
    reset_timeout_s: float | None = free(None, gt=0)
    """Timeout in seconds for a reset. Default: segment_timeout_s; once resets have been timed, 20 times the measured
    duration, between 300 s and segment_timeout_s."""
    step_timeout_s: float | None = free(None, gt=0)
    """Timeout in seconds for a step. Default: segment_timeout_s; once steps have been timed, 20 times the measured
    duration, between 60 s and segment_timeout_s."""
    max_actor_restarts: int = free(5, ge=0)
    """Replacements of an actor in a row that deliver no segment, after which the run stops."""
    recycle_after: str = free("never")
    """Replace an actor between two segments once it and its children use this much memory, or it has made this many
    segments: 2GB; 800MB; 500segments; 2GB,500segments. The result is the same."""
    replay: bool = True
    """Rebuild a lost sampler by replaying its actions; without it, its open episodes are abandoned."""
    backup_requests: bool = free(False)
    """Ask an idle actor for a late segment as well if it would make it sooner, replay included; the first answer
    counts. The result is the same. It may make more environments at once than there are samplers."""
    on_other_cpu: Literal["warn", "refuse"] = free("warn")
    """If an actor or learner runs on a CPU that computes different last bits than this process: warn, because the
    result then depends on which process runs where; or refuse to use it."""
    dashboard: bool = free(False)
    """Start the dashboard of the Ray that is started on this machine (needs ray[default])."""

    @property
    def resource_groups(self) -> list[dict[str, float]]:
        """Return the alternatives of `actor_resources`: each actor takes the resources of one of them."""
        if isinstance(self.actor_resources, dict):
            return [self.actor_resources]
        return self.actor_resources or [{}]

    @property
    def layout(self) -> Layout:
        """Ranks and cores of each environment."""
        return Layout(self.ranks_per_env, self.cores_per_rank)

    @property
    def node_counts(self) -> tuple[int, ...]:
        """Return the numbers of nodes that an environment may have; raise ConfigError for another form."""
        if self.nodes_per_env == "auto":
            counts = range(1, self.ranks_per_env + 1)
            return tuple(count for count in counts if self.ranks_per_env % count == 0)
        if isinstance(self.nodes_per_env, str) or self.nodes_per_env < 1:
            raise ConfigError(
                f"nodes_per_env={self.nodes_per_env}: must be a number of at least 1, or auto.",
                setting="nodes_per_env",
            )
        return (self.nodes_per_env,)

    def placed(self, sampling: Sampling) -> "Actors":
        """Return actors that reserve the cores of their environments' ranks, and host a limited number of samplers.

        Return these actors if ranks have no cores of their own, or without actors.
        """
        if not self.layout.cores or self.num_actors == 0:
            return self
        actors = min(self.actor_bounds[1], sampling.num_samplers)
        samplers = self.samplers_per_actor or math.ceil(sampling.num_samplers / actors)
        # a rank computes while its actor waits, and the other way round
        cores = samplers * sampling.envs_of_sampler * self.layout.cores
        cpus = max(self.cpus_per_actor, cores)
        return replace(self, samplers_per_actor=samplers, cpus_per_actor=cpus)

    @property
    def recycling(self) -> tuple[float, float]:
        """Return the bytes and the segments after which an actor is replaced; raise ConfigError if it is neither."""
        match = re.fullmatch(
            r"(never)?(?:(\d+(?:\.\d+)?)(GB|MB))?,?(?:(\d+)segments)?", self.recycle_after
        )
        if match is None or not any(match.groups()):
            raise ConfigError(
                f"recycle_after={self.recycle_after}: must be like 2GB, 800MB, 500segments or 2GB,500segments.",
                setting="recycle_after",
            )
        _, size, unit, segments = match.groups()
        unit_bytes = 1e6 if unit == "MB" else 1e9
        return float(size or math.inf) * unit_bytes, float(segments or math.inf)

    def fewest_for(self, num_samplers: int) -> int:
        """Return the fewest actors that can host `num_samplers` samplers; 1 without a limit."""
        if self.samplers_per_actor is None:
            return 1
        return math.ceil(num_samplers / self.samplers_per_actor)

    @property
    def elastic(self) -> bool:
        """True if actors join and leave, False if their number is fixed."""
        return isinstance(self.num_actors, str)

    @property
    def actor_bounds(self) -> tuple[int, int]:
        """Return fewest and most actors, equal if fixed, 0, 0 in process; raise ConfigError for another form."""
        if isinstance(self.num_actors, int) and self.num_actors >= 0:
            return self.num_actors, self.num_actors
        if self.num_actors == "auto":
            return 1, sys.maxsize
        match = re.fullmatch(r"(\d+)\.\.(\d*)", str(self.num_actors))
        if match is None:
            raise ConfigError(
                f"num_actors={self.num_actors}: must be a number of at least 0, auto, or bounds. Use one such as 8, "
                f"auto, 4.. or 4..64.",
                setting="num_actors",
            )
        return int(match[1]), int(match[2] or sys.maxsize)


@dataclass(frozen=True, kw_only=True)
class Learners:
    """Training, in this process or on several Ray actors."""

    num_learners: int = setting(0, resume="close", ge=0)
    """Ray actors that share the SGD of each minibatch; 0 trains in this process. Worthwhile for large networks. Results
    are reproducible for a given number."""
    learner_threads: int = setting(1, resume="close", gt=0, le=1024)
    """CPU threads of SGD; more than one is worthwhile from about a million parameters. Results are reproducible for a
    given number."""
    device: Literal["auto", "cpu", "cuda"] = setting("cpu", resume="close")
    """Device of SGD; auto: a GPU if there is one. Actors always use the CPU."""
    precision: Literal["float32", "bfloat16"] = setting("float32", resume="close")
    """Arithmetic of layers in SGD; bfloat16 is for CNNs. Weights, losses, outputs and acting stay float32."""
    micro_batch_size: int | None = setting(None, resume="close", gt=0)
    """Rows of a minibatch that pass through the network at once, for minibatches that do not fit into memory; their
    gradients are summed; none: all rows."""
    learner_cpus: float = free(1.0, gt=0)
    """Logical CPUs that Ray reserves for each learner."""
    learner_gpus: float = free(0.0, ge=0)
    """GPUs that Ray reserves for each learner."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Length, folder and checkpoints of the run."""

    total_timesteps: int = setting(500_000, resume="raised", gt=0)
    """Env steps to train for, summed over all environments; 1e6 is accepted."""
    seed: int = setting(1, ge=0)
    """Seed of every random number of the run."""
    name: str = setting("ppo", min_length=1)
    """Name of the experiment, used in the name of the run's folder."""
    run_dir: Path | None = free(None)
    """Folder of the run. Default: runs/ENV__NAME__sSEED__TIME."""
    init_from: Path | None = constant(None)
    """Start a new run with the weights of this run or checkpoint, also of another task or network, where names and
    shapes of parameters agree. The log lists them. Statistics of observations are taken over if the observations are
    alike; optimizer and counters start again. A branch of a resumed run takes over the optimizer and all statistics,
    too, and needs the same shapes."""
    checkpoint_interval_s: float = free(60.0, ge=0)
    """Seconds between checkpoints; 0: one in each iteration. One is always written at the end."""
    keep_checkpoints: int | str = free(NEWEST_CHECKPOINTS)
    """Number of newest checkpoints to keep, besides the best one. every=100: the newest 3, and one of each 100th
    iteration, which is written then; `dppo verify` computes the iterations between two checkpoints again."""
    eval_every: int | None = free(None, gt=0)
    """Env steps between evaluations of the policy, in episodes of its own, and one after the last iteration. The
    checkpoint of the best evaluation is kept as the best one. none: never."""
    eval_episodes: int = free(EVAL_EPISODES, gt=0)
    """Episodes of an evaluation; their seeds are the same each time."""
    eval_stochastic: bool = free(False)
    """Sample actions in evaluations, as in training, instead of taking the most likely ones."""
    eval_env_kwargs: dict[str, Any] = free({})
    """Keyword arguments of the environment in evaluations, in addition to env_kwargs, as JSON."""
    eval_actors: int = free(1, gt=0)
    """Ray actors for evaluations, beside those that collect; training goes on meanwhile. Without Ray, evaluations take
    turns with training; with env_threads, as many episodes are played at once as there are samplers."""
    eval_timeout_s: float = free(1800.0, gt=0)
    """Timeout in seconds for an episode of an evaluation; after a longer one, the rest of that evaluation is left out.
    An actor that is late, or in one step for the longest of segment_timeout_s, start_timeout_s, reset_timeout_s and
    step_timeout_s, is replaced, and plays the episode once more."""
    baseline: str | Callable[..., Any] | None = free(None)
    """Your own controller, to compare the policy with: module:controller, a function action = f(obs), or a class with
    reset and act; in Python also the function or class itself. It plays the episodes of the evaluations once, and each
    evaluation reports the difference of the returns with its 95 % interval."""
    never_worse: bool = free(False)
    """Deploy a policy only if an evaluation shows at 95 % that it is better than the baseline. best.json, load_policy,
    `dppo eval` and `dppo export` then use the best such policy of the run, and without one the baseline."""
    record_episodes: str = free("all")
    """Training episodes to record, as seed and actions, so that `dppo replay` plays them again: all; every=100, each
    100th; best, each with a higher return than all before it; none. Beyond 64 MB, the oldest are deleted."""
    trace_hashes: bool = free(False)
    """Write checksums of each iteration (observations, actions, rewards, advantages, gradients, weights) to
    trace.jsonl. `dppo diff RUN RUN` names the first iteration, sampler, step and quantity in which two runs differ."""
    numerics: Literal["portable", "strict", "native"] = setting("portable", resume="close")
    """portable: equal results on x86-64 machines with AVX2, except for convolutions, which differ with AVX-512; strict:
    equal convolutions, too, at two thirds of the speed; native: the code that NumPy and torch choose by the CPU."""
    track: tuple[str, ...] = free(())
    """Experiment trackers to send settings and metrics to: wandb, Weights & Biases; mlflow. They are configured by
    their own environment variables, such as WANDB_PROJECT and MLFLOW_TRACKING_URI."""
    progress: Literal["auto", "live", "plain", "off"] = free("auto")
    """A live panel, plain lines or nothing; auto: the panel on a terminal, otherwise lines."""

    @property
    def kept_checkpoints(self) -> tuple[int, int]:
        """Return how many of the newest to keep, and n if each n-th iteration is kept, too, else 0.

        Raises ConfigError for another form.
        """
        if isinstance(self.keep_checkpoints, int) and self.keep_checkpoints > 0:
            return self.keep_checkpoints, 0
        every = _every(str(self.keep_checkpoints))
        if every is None:
            raise ConfigError(
                f"keep_checkpoints={self.keep_checkpoints}: must be a number of at least 1, or one such as every=100.",
                setting="keep_checkpoints",
            )
        return NEWEST_CHECKPOINTS, every

    @property
    def baseline_name(self) -> str | None:
        """The import path of the baseline; None without one."""
        if self.baseline is None:
            return None
        return import_path(self.baseline)

    @property
    def recorded_every(self) -> int | None:
        """Return n if each n-th episode is recorded; 0 if none is, or the best are; None if the setting is invalid."""
        if self.record_episodes == "all":
            return 1
        if self.record_episodes in ("best", "none"):
            return 0
        return _every(self.record_episodes)


def _every(text: str) -> int | None:
    """Return the number of iterations in a text such as `every=100`; None for a text of another form."""
    match = re.fullmatch(r"every=([1-9]\d{0,17})", text)
    return None if match is None else int(match[1])
