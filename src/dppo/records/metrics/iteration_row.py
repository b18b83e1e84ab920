"""The metrics of one iteration, for metrics.jsonl, TensorBoard and the panel."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from dppo.ppo.exchange.records import Episode, SegmentReport, Timings, Update


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run after an iteration."""

    iteration: int
    """1, 2, ..."""
    global_step: int
    episodes: int
    recent: Collection[Episode]
    """The last 100 episodes at most."""
    incidents: Mapping[str, int]
    """Counts by kind."""


@dataclass(frozen=True, slots=True)
class Seconds:
    """Durations, in seconds."""

    wall_s: float
    """Since the call of `train`."""
    training_s: float
    """Since the first request for segments."""
    iteration_s: float
    collect_s: float
    transfer_s: float
    """Part of `collect_s` spent on sending the policy and receiving segments."""
    update_s: float
    replay_s: float
    """Time spent on replaying episodes to rebuild samplers, summed over actors."""


def iteration_row(
    progress: Progress,
    seconds: Seconds,
    reports: Sequence[SegmentReport],
    timings: Sequence[Timings],
    update: Update,
    *,
    steps_since_start: int,
    actors_alive: int,
    replayed_steps: int,
) -> dict[str, float]:
    """Return one flat row of metrics. Times are in seconds; docs/METRICS.md describes the keys.

    Args:
        timings: one for each actor that took part.
        steps_since_start: env steps made in this call of `train`.
        replayed_steps: env steps repeated to rebuild samplers; no other metric includes them.
    """
    steps = sum(report.steps for report in reports)
    row: dict[str, float] = {
        "iteration": progress.iteration,
        "global_step": progress.global_step,
        "time/wall_s": seconds.wall_s,
        "time/training_s": seconds.training_s,
        "charts/episodes": progress.episodes,
        "charts/SPS": steps_since_start / seconds.training_s,
        "charts/SPS_iteration": steps / seconds.iteration_s,
        "charts/learning_rate": update.learning_rate,
        "charts/policy_version": progress.iteration,
        "actors/alive": actors_alive,
    }
    if progress.recent:
        row["charts/episodic_return"] = mean_return(progress.recent)
        row["charts/episodic_length"] = fmean(episode.length for episode in progress.recent)
        successes = [episode.success for episode in progress.recent if episode.success is not None]
        if successes:
            row["charts/success_rate"] = fmean(successes)
    row |= {f"losses/{name}": value for name, value in update.figures.items()}
    row |= _time_split(seconds, steps, timings)
    row |= {"replay/steps": replayed_steps, "replay/s": seconds.replay_s}
    row |= {f"incidents/{kind}": count for kind, count in progress.incidents.items()}
    return row


def mean_return(recent: Collection[Episode]) -> float:
    """Return the mean return of these episodes; nan if there are none."""
    return fmean(episode.episode_return for episode in recent) if recent else math.nan


def _time_split(seconds: Seconds, steps: int, timings: Sequence[Timings]) -> dict[str, float]:
    """Return the shares of an iteration of `steps` env steps that its phases took.

    `env` and `act` are means over actors. `wait` is the rest of the collection: waiting for actors slower than the
    mean, for actors that host more samplers, and for Ray. `other` is neither collection nor update. With overlap, the
    part of `env` and `act` that lies before this iteration is left out.
    """
    busy = [timing.total_s for timing in timings]
    env_s = sum(timing.env_s for timing in timings)
    collect_s = min(seconds.collect_s, seconds.iteration_s - seconds.update_s)
    hidden_s = seconds.collect_s - collect_s
    shown = max(0.0, 1 - hidden_s / fmean(busy)) if sum(busy) else 1.0
    env_share_s, act_s = shown * env_s / len(busy), shown * (sum(busy) - env_s) / len(busy)
    split = {
        "env": env_share_s,
        "act": act_s,
        "wait": max(0.0, collect_s - env_share_s - act_s - seconds.transfer_s),
        "transfer": seconds.transfer_s,
        "update": seconds.update_s,
    }
    split["other"] = max(0.0, seconds.iteration_s - sum(split.values()))
    total = sum(split.values())
    return (
        {f"perf/{name}_frac": value / total for name, value in split.items()}
        | {f"perf/{name}_s": value for name, value in split.items()}
        | {
            "perf/iteration_s": seconds.iteration_s,
            "perf/collect_s": seconds.collect_s,
            "perf/slowest_actor_s": max(busy),
            "perf/env_step_ms": 1e3 * env_s / max(1, steps),
        }
    )
