"""The runs of a comparison: their times and speed-ups, and the bounds of both."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np

from dppo.config import Config
from dppo.records.plots import Curve
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
    bound_s: float
    bound_steps_per_s: float
    """The highest possible number of env steps per second."""
    efficiency: float
    """Bound as a share of the iteration."""
    efficiency_is_noise: bool
    """True if it is above 1: no iteration can be shorter than its bound."""
    overhead: float
    """Share of the iteration that is neither the work of the slowest actor nor the update; includes w + x."""


def measure_cycle(rows: Sequence[dict[str, Any]], steps: int, hosts: int = 1) -> Cycle:
    """Return the mean iteration of one run, or of several with equal settings, with `hosts` processes or threads."""
    settled = [row for row in rows if row["iteration"] > 1] or list(rows)

    def mean(*names: str) -> float:
        return fmean(sum(row[f"perf/{name}"] for name in names) for row in settled)

    exchange_s = fmean(
        min(row["perf/transfer_s"], max(0.0, row["perf/collect_s"] - row["perf/slowest_actor_s"])) for row in settled
    )
    collect_s, update_s, iteration_s = mean("slowest_actor_s"), mean("update_s"), mean("iteration_s")
    bound_s = exchange_s + collect_s + update_s
    return Cycle(
        steps=steps,
        env_step_ms=mean("env_step_ms"),
        exchange_s=exchange_s,
        collect_s=collect_s,
        work_s=hosts * mean("env_s", "act_s"),
        update_s=update_s,
        iteration_s=iteration_s,
        bound_s=bound_s,
        bound_steps_per_s=steps / bound_s,
        efficiency=bound_s / iteration_s,
        efficiency_is_noise=bound_s > iteration_s,
        overhead=1 - (collect_s + update_s) / iteration_s,
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

    def curve(self) -> Curve:
        """Return the mean return of the last 100 episodes over training time and over env steps."""
        known = [row for row in self.rows if row.get("charts/episodic_return") is not None]
        columns = ("time/training_s", "global_step", "charts/episodic_return")
        return Curve(*(np.array([row[column] for row in known]) for column in columns))

    def as_json(self, target: float | None) -> dict[str, Any]:
        """Return the run as it is written to compare.json."""
        cycle = group_of([self], None).cycle
        names = ("wall_s", "training_s", "global_step", "weights_sha256", "incidents")
        return {
            "num_actors": self.config.num_actors,
            "seed": self.config.seed,
            "run_dir": str(self.result.run_dir),
            **{name: getattr(self.result, name) for name in names},
            "startup_s": self.startup_s,
            "time_to_target_s": self.curve().time_to(target),
            "cycle": asdict(cycle),
            "curve": {name: column.tolist() for name, column in vars(self.curve()).items()},
        }


@dataclass(frozen=True, slots=True)
class Group:
    """The runs with the same number of actors, one for each seed; times are means over them."""

    runs: tuple[Run, ...]
    label: str
    """The name of the group in tables and pictures."""
    startup_s: float
    training_s: float
    steps_per_s: float
    """Env steps per second of training."""
    cycle: Cycle
    speed_up: float
    """Ratio of env steps per second to those of the first group."""
    speed_up_limit: float
    """The largest possible one: the work of the first group divided by the actors, without overhead."""

    @property
    def speed_up_is_noise(self) -> bool:
        """True if the speed-up exceeds its limit: then the load of the machine differed between the runs."""
        return self.speed_up != 1 and self.speed_up > self.speed_up_limit

    def times_to(self, target: float | None) -> list[float]:
        """Return the seconds to `target` of the seeds that reached it."""
        return [when for run in self.runs if (when := run.curve().time_to(target)) is not None]

    def as_json(self, target: float | None) -> dict[str, Any]:
        """Return the group as it is written to compare.json."""
        times, config = self.times_to(target), self.runs[0].config
        settings = ("num_actors", "num_samplers", "batch_size", "iterations")
        measured = ("startup_s", "training_s", "steps_per_s", "speed_up", "speed_up_limit", "speed_up_is_noise")
        return {
            "label": self.label,
            **{name: getattr(config, name) for name in settings},
            "seeds": [run.config.seed for run in self.runs],
            **{name: getattr(self, name) for name in measured},
            "time_to_target_s": fmean(times) if times else None,
            "seeds_that_reached_target": len(times),
            "cycle": asdict(self.cycle),
        }


def group_of(runs: Sequence[Run], first: Group | None) -> Group:
    """Return the group of runs that differ in their seeds; speed-ups refer to the group `first`, or to itself."""
    config, results = runs[0].config, [run.result for run in runs]
    actors, hosts = config.most_actors, config.num_samplers if config.env_threads else max(1, config.most_actors)
    steps_per_s = sum(result.global_step for result in results) / sum(result.training_s for result in results)
    cycle = measure_cycle([row for run in runs for row in run.rows], config.batch_size, hosts)
    origin, unit = (cycle, steps_per_s) if first is None else (first.cycle, first.steps_per_s)
    work_s = min(origin.work_s, cycle.work_s) if config.env_threads else origin.work_s  # threads wait for each other
    shortest_s = (work_s / hosts + origin.update_s) / origin.steps  # for an env step
    return Group(
        runs=tuple(runs),
        label="in process" if actors == 0 else "1 actor" if actors == 1 else f"{actors} actors",
        startup_s=fmean(run.startup_s for run in runs),
        training_s=fmean(result.training_s for result in results),
        steps_per_s=steps_per_s,
        cycle=cycle,
        speed_up=steps_per_s / unit,
        speed_up_limit=1 / shortest_s / unit,
    )


def group_by_actors(runs: Sequence[Run]) -> list[Group]:
    """Group runs by their number of actors, in the order in which the numbers first appear."""
    groups: list[Group] = []
    for number in dict.fromkeys(run.config.most_actors for run in runs):
        same = [run for run in runs if run.config.most_actors == number]
        groups.append(group_of(same, groups[0] if groups else None))
    return groups


def differing_seeds(runs: Sequence[Run]) -> dict[int, dict[int, str]]:
    """Return the seeds whose weights differ between numbers of actors, with the hashes by number of actors."""
    hashes: dict[int, dict[int, str]] = {}
    for run in runs:
        hashes.setdefault(run.config.seed, {})[run.config.most_actors] = run.result.weights_sha256
    return {seed: by_actors for seed, by_actors in hashes.items() if len(set(by_actors.values())) > 1}
