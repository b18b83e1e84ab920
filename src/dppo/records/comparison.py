"""What runs with different numbers of actors come to: times, speed-ups, and the bound they are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dppo.config import Config


@dataclass(frozen=True, slots=True)
class Cycle:
    """Where the mean iteration of a synchronous run goes, in seconds, and what it cannot be shorter than.

        bound_s = exchange_s + collect_s + update_s                         (C = w + M + x + u)

    All parts are measured in the run itself. The first iteration, which makes the environments, is left out.
    """

    steps: int
    """Env steps of an iteration."""
    env_step_ms: float
    """Mean time of an env step in the simulator."""
    exchange_s: float
    """w + x: sending weights out and taking segments in, as far as the slowest actor does not hide it."""
    collect_s: float
    """M: the slowest actor's own time in its environments and policy."""
    update_s: float
    """u"""
    iteration_s: float
    """What an iteration took, everything included."""

    @property
    def bound_s(self) -> float:
        return self.exchange_s + self.collect_s + self.update_s

    @property
    def bound_steps_per_s(self) -> float:
        return self.steps / self.bound_s

    @property
    def efficiency(self) -> float:
        """Share of the iteration that the bound explains."""
        return self.bound_s / self.iteration_s

    @property
    def noise(self) -> bool:
        """Whether the efficiency is only noise: no iteration is shorter than its bound."""
        return self.efficiency > 1

    @property
    def overhead(self) -> float:
        """Share of the iteration that is neither the slowest actor's work nor the update: w + x is in it."""
        return 1 - (self.collect_s + self.update_s) / self.iteration_s

    def as_json(self) -> dict[str, float | bool]:
        return {
            "steps": self.steps,
            "env_step_ms": self.env_step_ms,
            "exchange_s": self.exchange_s,
            "collect_s": self.collect_s,
            "update_s": self.update_s,
            "bound_s": self.bound_s,
            "iteration_s": self.iteration_s,
            "bound_steps_per_s": self.bound_steps_per_s,
            "efficiency": self.efficiency,
            "efficiency_is_noise": self.noise,
            "overhead": self.overhead,
        }


def measure_cycle(rows: Sequence[dict[str, Any]], steps: int) -> Cycle:
    """The mean iteration of `steps` env steps, from the metrics rows of one run or of several alike."""
    settled = [row for row in rows if row["iteration"] > 1] or list(rows)

    def not_hidden(row: dict[str, Any]) -> float:
        beside = max(0.0, float(row["perf/collect_s"] - row["perf/slowest_actor_s"]))
        return min(float(row["perf/transfer_s"]), beside)

    return Cycle(
        steps=steps,
        env_step_ms=fmean(row["perf/env_step_ms"] for row in settled),
        exchange_s=fmean(map(not_hidden, settled)),
        collect_s=fmean(row["perf/slowest_actor_s"] for row in settled),
        update_s=fmean(row["perf/update_s"] for row in settled),
        iteration_s=fmean(row["perf/iteration_s"] for row in settled),
    )


@dataclass(frozen=True, slots=True)
class Run:
    """One finished training."""

    config: Config
    run_dir: Path
    wall_s: float
    """From the call to the end."""
    training_s: float
    """From the first request for segments to the last update."""
    global_step: int
    weights_sha256: str
    rows: list[dict[str, Any]]
    """Its metrics.jsonl."""
    incidents: dict[str, int]

    @property
    def startup_s(self) -> float:
        return self.wall_s - self.training_s

    def curve(self) -> dict[str, list[float]]:
        """The mean episode return (of the last 100 episodes) over training time and env steps."""
        known = [row for row in self.rows if row.get("charts/episodic_return") is not None]
        return {
            "wall_s": [row["time/training_s"] for row in known],
            "global_step": [row["global_step"] for row in known],
            "episodic_return": [row["charts/episodic_return"] for row in known],
        }

    def time_to(self, target: float | None) -> float | None:
        """Seconds of training until the mean episode return reached `target`, None where it never did."""
        curve = self.curve()
        pairs = zip(curve["wall_s"], curve["episodic_return"], strict=True)
        return next((when for when, value in pairs if target is not None and value >= target), None)

    def as_json(self, target: float | None) -> dict[str, Any]:
        return {
            "num_actors": self.config.num_actors,
            "seed": self.config.seed,
            "run_dir": str(self.run_dir),
            "wall_s": self.wall_s,
            "startup_s": self.startup_s,
            "training_s": self.training_s,
            "time_to_target_s": self.time_to(target),
            "global_step": self.global_step,
            "weights_sha256": self.weights_sha256,
            "incidents": self.incidents,
            "cycle": measure_cycle(self.rows, self.config.batch_size).as_json(),
            "curve": self.curve(),
        }


@dataclass(frozen=True, slots=True)
class Group:
    """The runs with one number of actors, one for each seed."""

    runs: tuple[Run, ...]

    @property
    def config(self) -> Config:
        return self.runs[0].config

    @property
    def label(self) -> str:
        actors = self.config.num_actors
        return "in process" if actors == 0 else "1 actor" if actors == 1 else f"{actors} actors"

    @property
    def cycle(self) -> Cycle:
        rows = [row for run in self.runs for row in run.rows]
        return measure_cycle(rows, self.config.batch_size)

    @property
    def training_s(self) -> float:
        return fmean(run.training_s for run in self.runs)

    @property
    def startup_s(self) -> float:
        return fmean(run.startup_s for run in self.runs)

    @property
    def steps_per_s(self) -> float:
        return sum(run.global_step for run in self.runs) / sum(run.training_s for run in self.runs)

    def times_to(self, target: float | None) -> list[float]:
        """Of the seeds that reached `target`."""
        return [when for run in self.runs if (when := run.time_to(target)) is not None]

    def as_json(self, first: Group, target: float | None) -> dict[str, Any]:
        times = self.times_to(target)
        return {
            "num_actors": self.config.num_actors,
            "label": self.label,
            "num_samplers": self.config.num_samplers,
            "batch_size": self.config.batch_size,
            "iterations": self.config.iterations,
            "seeds": [run.config.seed for run in self.runs],
            "startup_s": self.startup_s,
            "training_s": self.training_s,
            "time_to_target_s": fmean(times) if times else None,
            "seeds_that_reached_target": len(times),
            "steps_per_s": self.steps_per_s,
            "speed_up": self.steps_per_s / first.steps_per_s,
            "cycle": self.cycle.as_json(),
        }


def group_by_actors(runs: Sequence[Run]) -> list[Group]:
    """In the order in which the numbers of actors first appear."""
    numbers = dict.fromkeys(run.config.num_actors for run in runs)
    return [Group(tuple(run for run in runs if run.config.num_actors == number)) for number in numbers]


def differing_seeds(runs: Sequence[Run]) -> dict[int, dict[int, str]]:
    """Where the promise is broken: for a seed, the weights' hash by number of actors."""
    hashes: dict[int, dict[int, str]] = {}
    for run in runs:
        hashes.setdefault(run.config.seed, {})[run.config.num_actors] = run.weights_sha256
    return {seed: by_actors for seed, by_actors in hashes.items() if len(set(by_actors.values())) > 1}
