"""The metrics of one iteration, for metrics.jsonl, TensorBoard and the panel; the times among them."""

import math
import time
from collections.abc import Callable, Collection, Sequence
from statistics import fmean, pstdev

from dppo.engine.collector import Collected
from dppo.log import logger
from dppo.ppo.exchange.records import Episode, success_rate
from dppo.run.learner import Iteration, PPOLearner


class TrainingTimes:
    """Measures a run. Waiting for an evaluation is no training, and left out."""

    def __init__(self) -> None:
        """Begin with the call of `train`."""
        self.called_at = time.monotonic()
        self._began = self.called_at
        self._iteration_ended = self.called_at
        self._steps_before = 0

    def begin(self, steps_before: int) -> None:
        """Begin to measure: the first segments are requested now, after `steps_before` env steps of earlier calls."""
        self._steps_before = steps_before
        self._began = time.monotonic()
        self._iteration_ended = self._began

    def end_iteration(self, ended: float) -> float:
        """Return the seconds that the iteration took which has ended at the time `ended`."""
        iteration_s = ended - self._iteration_ended
        self._iteration_ended = ended
        return iteration_s

    def leave_out(self, seconds: float) -> None:
        """Leave out a pause after the last iteration."""
        self._began += seconds
        self._iteration_ended += seconds

    @property
    def training_s(self) -> float:
        """Seconds of training until the end of the last iteration."""
        return self._iteration_ended - self._began

    @property
    def wall_s(self) -> float:
        """Seconds from the call of `train` until the end of the last iteration."""
        return self._iteration_ended - self.called_at

    def steps_per_s(self, global_step: int) -> float:
        """Return the env steps per second of training in this call; NaN before its first iteration has ended."""
        if self.training_s > 0:
            return (global_step - self._steps_before) / self.training_s
        return math.nan


RowMaker = Callable[[Iteration, PPOLearner, TrainingTimes], dict[str, float]]
"""The type of `iteration_row`."""
MAX_ACTORS = 64  # whose memory is in a row


def row_maker(info_keys: Sequence[str]) -> RowMaker:
    if info_keys:
        return RowsWithInfo(info_keys)
    return iteration_row


def iteration_row(
    iteration: Iteration, learner: PPOLearner, times: TrainingTimes
) -> dict[str, float]:
    """Return one flat row of metrics, which docs/METRICS.md describes."""
    iteration_s = times.end_iteration(iteration.ended)
    collected = iteration.collected
    recent = learner.recent
    steps = sum(report.steps for report in collected.reports)
    row: dict[str, float] = {
        "iteration": iteration.number,
        "global_step": learner.global_step,
        "time/wall_s": times.wall_s,
        "time/training_s": times.training_s,
        "charts/SPS": times.steps_per_s(learner.global_step),
        "charts/episodes": learner.episodes,
        "charts/SPS_iteration": steps / iteration_s,
        "charts/learning_rate": iteration.update.learning_rate,
        "charts/policy_version": iteration.number,
    }
    if recent:
        row["charts/recent_episodes"] = len(recent)
        row["charts/episodic_return"] = mean_return(recent)
        row["charts/episodic_return_std"] = pstdev(episode.episode_return for episode in recent)
        row["charts/episodic_length"] = fmean(episode.length for episode in recent)
        rate = success_rate(recent)
        if rate is not None:
            row["charts/success_rate"] = rate
    for name, value in iteration.update.figures.items():
        row[f"losses/{name}"] = value
    row |= _shares(iteration, iteration_s)
    env_s = sum(report.env_s for report in collected.reports)
    row["perf/env_step_ms"] = 1e3 * env_s / max(1, steps)
    timings = collected.timings.values()
    row["replay/steps"] = sum(timing.replayed_steps for timing in timings)
    row["replay/s"] = sum(timing.replay_s for timing in timings)
    if collected.actors:
        row |= _actor_columns(collected)
    for name, count in learner.env_faults.counts.items():
        row[f"faults/{name}"] = count
    return row | learner.incident_metrics()


def _actor_columns(collected: Collected) -> dict[str, float]:
    memory = {actor_id: timing.memory / 1e9 for actor_id, timing in collected.timings.items()}
    columns: dict[str, float] = {
        "actors/alive": collected.actors,
        "actors/memory_gb": max(memory.values()),
    }
    for actor_id, gigabytes in list(memory.items())[:MAX_ACTORS]:
        if gigabytes:
            columns[f"actors/memory_gb/{actor_id}"] = gigabytes
    return columns


class RowsWithInfo:
    """Make rows that also have the numbers that `info_keys` names, merged in the order of samplers."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._keys = keys
        self._missing_keys = set(keys)

    def __call__(
        self, iteration: Iteration, learner: PPOLearner, times: TrainingTimes
    ) -> dict[str, float]:
        """Return `iteration_row`; log once which keys are missing when the first episodes have ended."""
        row = iteration_row(iteration, learner, times)
        reports = iteration.collected.reports
        for key in self._keys:
            measured = [report.info[key] for report in reports if key in report.info]
            if measured:
                steps = sum(info.steps for info in measured)
                row[f"info/{key}"] = sum(info.total for info in measured) / steps
                row[f"info/{key}_min"] = min(info.least for info in measured)
                row[f"info/{key}_max"] = max(info.largest for info in measured)
                self._missing_keys.discard(key)
        episodes = [episode for report in reports for episode in report.episodes]
        if self._missing_keys and episodes:
            missing = " ".join(sorted(self._missing_keys))
            keys = ", ".join(sorted(episodes[-1].info)) or "none"
            logger.warning(
                "info_keys=%s: no number of this name in any info so far; the last info had %s",
                missing,
                keys,
            )
            self._missing_keys = set()
        return row


def mean_return(recent: Collection[Episode]) -> float:
    if recent:
        return fmean(episode.episode_return for episode in recent)
    return math.nan


def _shares(iteration: Iteration, iteration_s: float) -> dict[str, float]:
    """Return the time of each phase of an iteration, and its share.

    `env` and `act` are means over actors. `wait` is the rest of the collection: waiting for actors slower than the
    mean, for actors that host more samplers, and for Ray. `other` is neither collection nor update. With overlap, the
    part of `env` and `act` that lies before this iteration is left out.
    """
    collected = iteration.collected
    timings = collected.timings.values()
    totals_s = [timing.total_s for timing in timings]
    shown_s = min(collected.collect_s, iteration_s - iteration.update_s)
    share = 1.0
    if sum(totals_s):
        share = max(0.0, 1 - (collected.collect_s - shown_s) / fmean(totals_s))
    env_s = share * fmean(timing.env_s for timing in timings)
    act_s = share * fmean(totals_s) - env_s
    wait_s = max(0.0, shown_s - env_s - act_s - collected.transfer_s)
    split = {
        "env": env_s,
        "act": act_s,
        "wait": wait_s,
        "transfer": collected.transfer_s,
        "update": iteration.update_s,
    }
    split["other"] = max(0.0, iteration_s - sum(split.values()))
    total = sum(split.values())
    return {
        **{f"perf/{name}_frac": value / total for name, value in split.items()},
        **{f"perf/{name}_s": value for name, value in split.items()},
        "perf/iteration_s": iteration_s,
        "perf/collect_s": collected.collect_s,
        "perf/slowest_actor_s": max(totals_s),
    }
