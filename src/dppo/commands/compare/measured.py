"""The runs of a comparison: their times and speed-ups, and the bounds of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from dppo.config import Config
from dppo.records.result import Result


@dataclass(frozen=True, slots=True)
class Cycle:
    """The parts of the mean iteration of a synchronous run, in seconds, and their sum, which is its lower bound.

        bound_s = exchange_s + collect_s + update_s                         (C = w + M + x + u)

    All parts are measured in the run itself. The first iteration, which makes the environments, is left out.
    """

    steps: int
    """Env steps of one iteration."""
    env_step_ms: float
    """Mean duration of an env step in the simulator."""
    exchange_s: float
    """w + x: sending weights and receiving segments, as far as this does not overlap with the slowest actor."""
    collect_s: float
    """M: time of the slowest actor in its environments and policy."""
    work_s: float
    """The same, summed over all actors."""
    update_s: float
    """u: the update."""
    iteration_s: float
    """Duration of the whole iteration."""

    @property
    def bound_s(self) -> float:
        """The shortest possible iteration."""
        return self.exchange_s + self.collect_s + self.update_s

    @property
    def bound_steps_per_s(self) -> float:
        """The highest possible number of env steps per second."""
        return self.steps / self.bound_s

    @property
    def efficiency(self) -> float:
        """Bound as a share of the iteration; above 1 it is noise."""
        return self.bound_s / self.iteration_s

    @property
    def overhead(self) -> float:
        """Share of the iteration that is neither the work of the slowest actor nor the update; includes w + x."""
        return 1 - (self.collect_s + self.update_s) / self.iteration_s

    def as_json(self) -> dict[str, float | bool]:
        """Return the cycle as it is written to compare.json."""
        computed = ("bound_s", "bound_steps_per_s", "efficiency", "overhead")
        return (
            asdict(self)
            | {name: getattr(self, name) for name in computed}
            | {"efficiency_is_noise": self.efficiency > 1}
        )


def measure_cycle(rows: Sequence[dict[str, Any]], steps: int, hosts: int = 1) -> Cycle:
    """Return the mean iteration of one run, or of several with the same settings.

    Args:
        rows: their metrics.
        steps: env steps per iteration.
        hosts: processes that collect.
    """
    settled = [row for row in rows if row["iteration"] > 1] or list(rows)

    def mean(*names: str) -> float:
        return fmean(sum(row[f"perf/{name}"] for name in names) for row in settled)

    def exchange_s(row: dict[str, Any]) -> float:
        beside = max(0.0, float(row["perf/collect_s"] - row["perf/slowest_actor_s"]))
        return min(float(row["perf/transfer_s"]), beside)

    return Cycle(
        steps=steps,
        env_step_ms=mean("env_step_ms"),
        exchange_s=fmean(map(exchange_s, settled)),
        collect_s=mean("slowest_actor_s"),
        work_s=hosts * mean("env_s", "act_s"),
        update_s=mean("update_s"),
        iteration_s=mean("iteration_s"),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One finished training."""

    config: Config
    result: Result
    rows: list[dict[str, Any]]
    """The rows of metrics.jsonl."""

    @property
    def startup_s(self) -> float:
        """Seconds before and after training: Ray, environments, files."""
        return self.result.wall_s - self.result.training_s

    def curve(self) -> dict[str, list[float]]:
        """Return the mean return of the last 100 episodes over training time and over env steps."""
        columns = {
            "wall_s": "time/training_s",
            "global_step": "global_step",
            "episodic_return": "charts/episodic_return",
        }
        known = [row for row in self.rows if row.get("charts/episodic_return") is not None]
        return {name: [row[column] for row in known] for name, column in columns.items()}

    def time_to(self, target: float | None) -> float | None:
        """Return the seconds of training until the mean return reached `target`; None if it never did."""
        curve = self.curve()
        pairs = zip(curve["wall_s"], curve["episodic_return"], strict=True)
        return next((when for when, value in pairs if target is not None and value >= target), None)

    def as_json(self, target: float | None) -> dict[str, Any]:
        """Return the run as it is written to compare.json."""
        names = ("wall_s", "training_s", "global_step", "weights_sha256", "incidents")
        return {
            "num_actors": self.config.num_actors,
            "seed": self.config.seed,
            "run_dir": str(self.result.run_dir),
            **{name: getattr(self.result, name) for name in names},
            "startup_s": self.startup_s,
            "time_to_target_s": self.time_to(target),
            "cycle": Group((self,)).cycle.as_json(),
            "curve": self.curve(),
        }


@dataclass(frozen=True, slots=True)
class Group:
    """The runs with the same number of actors, one for each seed."""

    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        """The settings of the first run; the others differ in their seeds."""
        return self.runs[0].config

    @property
    def label(self) -> str:
        """The name of the group in tables and pictures."""
        actors = self.config.num_actors
        return "in process" if actors == 0 else "1 actor" if actors == 1 else f"{actors} actors"

    @property
    def hosts(self) -> int:
        """Number of processes that collect."""
        return max(1, self.config.num_actors)

    @property
    def cycle(self) -> Cycle:
        """The mean iteration over all runs."""
        rows = [row for run in self.runs for row in run.rows]
        return measure_cycle(rows, self.config.batch_size, self.hosts)

    @property
    def training_s(self) -> float:
        """Mean seconds of training."""
        return fmean(run.result.training_s for run in self.runs)

    @property
    def startup_s(self) -> float:
        """Mean seconds before and after training."""
        return fmean(run.startup_s for run in self.runs)

    @property
    def steps_per_s(self) -> float:
        """Env steps per second of training, over all runs."""
        return sum(run.result.global_step for run in self.runs) / sum(run.result.training_s for run in self.runs)

    def times_to(self, target: float | None) -> list[float]:
        """Return the seconds to `target` of the seeds that reached it."""
        return [when for run in self.runs if (when := run.time_to(target)) is not None]

    def speed_up(self, first: Group) -> float:
        """Return how many times as many env steps per second the group makes as `first`."""
        return self.steps_per_s / first.steps_per_s

    def speed_up_limit(self, first: Group) -> float:
        """Return the largest possible speed-up over `first`: its work divided by the actors, without overhead."""
        cycle, steps = first.cycle, self.config.batch_size
        shortest_s = (cycle.work_s / self.hosts + cycle.update_s) * steps / cycle.steps
        return steps / shortest_s / first.steps_per_s

    def speed_up_is_noise(self, first: Group) -> bool:
        """Return whether the speed-up exceeds its limit: then the load of the machine differed between the runs."""
        return self is not first and self.speed_up(first) > self.speed_up_limit(first)

    def as_json(self, first: Group, target: float | None) -> dict[str, Any]:
        """Return the group as it is written to compare.json.

        Args:
            first: the group that speed-ups refer to.
        """
        times, settings = self.times_to(target), ("num_actors", "num_samplers", "batch_size", "iterations")
        return {
            "label": self.label,
            **{name: getattr(self.config, name) for name in settings},
            "seeds": [run.config.seed for run in self.runs],
            **{name: getattr(self, name) for name in ("startup_s", "training_s", "steps_per_s")},
            "time_to_target_s": fmean(times) if times else None,
            "seeds_that_reached_target": len(times),
            "speed_up": self.speed_up(first),
            "speed_up_limit": self.speed_up_limit(first),
            "speed_up_is_noise": self.speed_up_is_noise(first),
            "cycle": self.cycle.as_json(),
        }


def group_by_actors(runs: Sequence[Run]) -> list[Group]:
    """Group runs by their number of actors, in the order in which the numbers first appear."""
    numbers = dict.fromkeys(run.config.num_actors for run in runs)
    return [Group(tuple(run for run in runs if run.config.num_actors == number)) for number in numbers]


def differing_seeds(runs: Sequence[Run]) -> dict[int, dict[int, str]]:
    """Return the seeds whose weights differ between numbers of actors, with the hashes by number of actors."""
    hashes: dict[int, dict[int, str]] = {}
    for run in runs:
        hashes.setdefault(run.config.seed, {})[run.config.num_actors] = run.result.weights_sha256
    return {seed: by_actors for seed, by_actors in hashes.items() if len(set(by_actors.values())) > 1}
