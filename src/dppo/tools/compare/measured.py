"""The runs of a comparison: their times and speed-ups, and the bounds of both, as compare.json holds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from dppo.config import Config
from dppo.errors import counted
from dppo.records.metrics.reading import Row, Rows
from dppo.records.observer import Result
from dppo.tools.curves import RETURN, Curve, curve_of

Group = dict[str, Any]
"""Means over runs that differ in their seeds, as compare.json holds them."""
OF_RESULT = ("wall_s", "training_s", "global_step", "weights_sha256", "incidents")
OF_CURVE = ("wall_s", "global_step", "episodic_return")


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One finished training."""

    config: Config
    result: Result
    rows: list[dict[str, float]]
    """The rows of metrics.jsonl."""

    @property
    def startup_s(self) -> float:
        """Seconds before and after training: Ray, environments, files."""
        return self.result.wall_s - self.result.training_s

    def curve(self) -> Curve:
        """Return the mean return of the last 100 episodes over training time and over env steps."""
        return curve_of(self.rows, RETURN)

    def as_json(self, target: float | None) -> dict[str, Any]:
        return {
            "num_actors": self.config.num_actors,
            "seed": self.config.seed,
            "run_dir": str(self.result.run_dir),
            **{name: getattr(self.result, name) for name in OF_RESULT},
            "startup_s": self.startup_s,
            "time_to_target_s": self.curve().time_to(target),
            "cycle": group_of([self])["cycle"],
            "curve": {
                name: column.tolist()
                for name, column in zip(OF_CURVE, self.curve()[:3], strict=True)
            },
        }


def measure_cycle(rows: Rows, steps: int, hosts: int = 1) -> dict[str, Any]:
    """Return the mean iteration of a synchronous run of `steps`, or of several; times are in seconds.

        bound_s = exchange_s + collect_s + update_s                         (C = w + M + x + u)

    All parts of its lower bound are measured in the run itself: w + x, sending weights and receiving segments, as far
    as this does not overlap with the slowest actor; M, the time of that actor in its environments and policy; u, the
    update. `work_s` is M summed over all `hosts`, processes or threads. The first iteration, which makes the
    environments, is left out. No iteration can be shorter than its bound: an efficiency above 1 is noise. `overhead` is
    the share of an iteration that is neither M nor u, so it includes w + x.
    """
    settled = [row for row in rows if row["iteration"] > 1] or list(rows)

    def mean(name: str) -> float:
        return fmean(row[f"perf/{name}"] for row in settled)

    exchange_s = fmean(_exchange_s(row) for row in settled)
    collect_s = mean("slowest_actor_s")
    update_s = mean("update_s")
    iteration_s = mean("iteration_s")
    bound_s = exchange_s + collect_s + update_s
    return {
        "steps": steps,
        "env_step_ms": mean("env_step_ms"),
        "exchange_s": exchange_s,
        "collect_s": collect_s,
        "work_s": hosts * fmean(row["perf/env_s"] + row["perf/act_s"] for row in settled),
        "update_s": update_s,
        "iteration_s": iteration_s,
        "bound_s": bound_s,
        "bound_steps_per_s": steps / bound_s,
        "efficiency": bound_s / iteration_s,
        "efficiency_is_noise": bound_s > iteration_s,
        "overhead": 1 - (collect_s + update_s) / iteration_s,
    }


def _exchange_s(row: Row) -> float:
    """Return the time of sending and receiving in which the slowest actor did not work."""
    not_collecting_s = max(0.0, row["perf/collect_s"] - row["perf/slowest_actor_s"])
    return float(min(row["perf/transfer_s"], not_collecting_s))


def group_of(
    runs: Sequence[MeasuredRun], first: Group | None = None, target: float | None = None
) -> Group:
    """Return the means over runs that differ in their seeds; speed-ups refer to the group `first`, or to itself.

    The largest possible speed-up is the work of the first group divided by the actors, without overhead: if it is
    exceeded, the load of the machine differed between the runs. `time_to_target_s` is a mean of seeds that reached it.
    """
    config = runs[0].config
    results = [run.result for run in runs]
    actors = config.most_actors
    hosts = config.num_samplers if config.env_threads else max(1, actors)
    steps_per_s = sum(result.global_step for result in results) / sum(
        result.training_s for result in results
    )
    cycle = measure_cycle([row for run in runs for row in run.rows], config.batch_size, hosts)
    first_cycle = cycle if first is None else first["cycle"]
    first_steps_per_s = steps_per_s if first is None else first["steps_per_s"]
    work_s = first_cycle["work_s"]
    if config.env_threads:  # threads wait for each other
        work_s = min(work_s, cycle["work_s"])
    shortest_step_s = (work_s / hosts + first_cycle["update_s"]) / first_cycle["steps"]
    speed_up = steps_per_s / first_steps_per_s
    limit = 1 / shortest_step_s / first_steps_per_s
    times = [run.curve().time_to(target) for run in runs]
    times_to_target = [time for time in times if time is not None]
    return {
        "label": counted(actors, "actor") if actors else "in process",
        **{
            name: getattr(config, name)
            for name in ("num_actors", "num_samplers", "batch_size", "iterations")
        },
        "seeds": [run.config.seed for run in runs],
        "startup_s": fmean(run.startup_s for run in runs),
        "training_s": fmean(result.training_s for result in results),
        "steps_per_s": steps_per_s,
        "speed_up": speed_up,
        "speed_up_limit": limit,
        "speed_up_is_noise": speed_up != 1 and speed_up > limit,
        "time_to_target_s": fmean(times_to_target) if times_to_target else None,
        "seeds_that_reached_target": len(times_to_target),
        "cycle": cycle,
    }


def by_actors(runs: Sequence[MeasuredRun]) -> list[list[MeasuredRun]]:
    """Return runs by their number of actors, in the order in which the numbers first appear."""
    numbers = dict.fromkeys(run.config.most_actors for run in runs)
    return [[run for run in runs if run.config.most_actors == number] for number in numbers]


def groups_of(runs: Sequence[MeasuredRun], target: float | None = None) -> list[Group]:
    """The group of each number of actors, as compare.json holds it."""
    groups: list[Group] = []
    for group_runs in by_actors(runs):
        groups.append(group_of(group_runs, groups[0] if groups else None, target))
    return groups


def differing_seeds(runs: Sequence[MeasuredRun]) -> dict[int, dict[int, str]]:
    """Return the seeds whose weights differ between numbers of actors, with the hashes by number of actors."""
    hashes: dict[int, dict[int, str]] = {}
    for run in runs:
        hashes.setdefault(run.config.seed, {})[run.config.most_actors] = run.result.weights_sha256
    return {
        seed: by_number for seed, by_number in hashes.items() if len(set(by_number.values())) > 1
    }
