"""The figures of one iteration, as they go into metrics.jsonl, TensorBoard and the panel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean

from dppo.learner import Iteration, PPOLearner


def iteration_row(
    iteration: Iteration,
    learner: PPOLearner,
    *,
    hosting: list[list[int]],
    iteration_s: float,
    wall_s: float,
    training_s: float,
    steps_since_start: int,
    learning_rate: float,
    actors_alive: int,
) -> dict[str, float]:
    """One flat row; times in seconds, keys as in docs/METRICS.md."""
    steps = sum(report.steps for report in iteration.collected.reports)
    row: dict[str, float] = {
        "iteration": iteration.number,
        "global_step": learner.global_step,
        "time/wall_s": wall_s,
        "time/training_s": training_s,
        "charts/episodes": learner.episodes,
        "charts/SPS": steps_since_start / training_s,
        "charts/SPS_iteration": steps / iteration_s,
        "charts/learning_rate": learning_rate,
        "charts/policy_version": iteration.number,
        "actors/alive": actors_alive,
    }
    if learner.recent:
        row["charts/episodic_return"] = mean_return(learner)
        row["charts/episodic_length"] = fmean(episode.length for episode in learner.recent)
        successes = [episode.success for episode in learner.recent if episode.success is not None]
        if successes:
            row["charts/success_rate"] = fmean(successes)
    row |= {f"losses/{name}": value for name, value in iteration.losses.items()}
    row |= time_split(iteration, hosting, iteration_s)
    row |= {f"incidents/{kind}": count for kind, count in learner.incidents.items()}
    return row


def mean_return(learner: PPOLearner) -> float:
    """Mean return of the last (at most 100) episodes; nan before the first."""
    return fmean(episode.episode_return for episode in learner.recent) if learner.recent else math.nan


def time_split(iteration: Iteration, hosting: list[list[int]], iteration_s: float) -> dict[str, float]:
    """Where the time of an iteration went.

    `env` and `act` are those of the mean actor. `wait` is the rest of the collection: for actors slower than the mean,
    for samplers that share an actor unevenly, and for Ray. `other` is neither collection nor update.
    """
    collected = iteration.collected
    timings = {report.sampler_id: report.timings for report in collected.reports}

    def per_actor(name: str) -> list[float]:
        return [sum(getattr(timings[sampler], name) for sampler in samplers) for samplers in hosting]

    busy, env_s = per_actor("total_s"), fmean(per_actor("env_s"))
    act_s = fmean(busy) - env_s
    wait_s = max(0.0, collected.collect_s - env_s - act_s - collected.transfer_s)
    seconds = {
        "env": env_s,
        "act": act_s,
        "wait": wait_s,
        "transfer": collected.transfer_s,
        "update": iteration.update_s,
    }
    seconds["other"] = max(0.0, iteration_s - sum(seconds.values()))
    total = sum(seconds.values())
    return (
        {f"perf/{name}_frac": value / total for name, value in seconds.items()}
        | {f"perf/{name}_s": value for name, value in seconds.items()}
        | {
            "perf/iteration_s": iteration_s,
            "perf/collect_s": collected.collect_s,
            "perf/slowest_actor_s": max(busy),
            "perf/env_step_ms": 1e3
            * _total(t.env_s for t in timings.values())
            / sum(r.steps for r in collected.reports),
        }
    )


def _total(values: Iterable[float]) -> float:
    return sum(values)
