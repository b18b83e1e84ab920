"""One evaluation of a run: its episodes, and their metrics."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from dppo.config import Config
from dppo.errors import ConfigError, DppoError, EnvironmentFault
from dppo.policies.bounds import ElementAtBound, element_at_bound
from dppo.ppo.exchange.records import Episode
from dppo.records.differences import Difference
from dppo.run.baseline import Baseline
from dppo.spaces.actions import Actions, boxes


@dataclass(slots=True)
class OpenEvaluation:
    """An evaluation that is not over."""

    name: str
    """Name in messages, such as "evaluation after 2,048 steps"."""
    global_step: int = 0
    is_played: bool = False
    """True once all of its episodes have been played or left out."""
    began: float = field(default_factory=time.monotonic)
    played: dict[int, Episode | None] = field(default_factory=dict)
    """Episodes by index; None for an episode that failed."""

    def episodes(self) -> list[Episode]:
        """The episodes that have not failed, in their order."""
        return [episode for _, episode in sorted(self.played.items()) if episode is not None]

    def check_kwargs(self, eval_env_kwargs: Mapping[str, Any], error: DppoError) -> None:
        """Raise ConfigError if no episode was played, at last for this error of a constructor with these arguments."""
        if not (eval_env_kwargs and self.is_played) or self.episodes():
            return
        if isinstance(error, EnvironmentFault) and error.in_constructor:
            raise ConfigError(
                f"eval_env_kwargs={eval_env_kwargs}: {error.message}. Resume the run with another value."
            )


@dataclass(frozen=True, slots=True)
class EvaluationResult:
    """The result of an evaluation that is over."""

    metrics: dict[str, float]
    difference: Difference | None = None
    """Difference from the baseline; None without one."""
    element_at_bound: ElementAtBound | None = None
    """None for sampled or discrete actions."""

    @property
    def reports_element(self) -> bool:
        """True if that element is often at a bound, unless the policy is no worse than the baseline."""
        if self.element_at_bound is None or self.metrics.get("eval/baseline_difference", -1) >= 0:
            return False
        return self.element_at_bound.is_frequent


def result_of(
    number: int,
    evaluation: OpenEvaluation,
    baseline: Baseline | None,
    config: Config,
    actions: Actions,
) -> EvaluationResult:
    """Return the result of the evaluation after iteration `number`, which is over; its episodes may all have failed."""
    episodes = evaluation.episodes()
    metrics: dict[str, float] = {
        "eval/iteration": number,
        "eval/global_step": evaluation.global_step,
        "eval/episodes": len(episodes),
        "eval/s": time.monotonic() - evaluation.began,
    }
    if not episodes:
        return EvaluationResult(metrics)
    metrics |= _metrics_of(episodes, config.info_keys)
    difference = None
    if baseline is not None:
        difference = baseline.difference(episodes)
        metrics |= baseline.metrics(difference)
    element = None
    if any(boxes(actions)):
        element = element_at_bound(actions, episodes)
    if element is not None:
        metrics["eval/at_bound_frac"] = element.share
    return EvaluationResult(metrics, difference, element)


def _metrics_of(episodes: list[Episode], info_keys: tuple[str, ...]) -> dict[str, float]:
    returns = [episode.episode_return for episode in episodes]
    row = {
        "eval/episodic_return": fmean(returns),
        "eval/return_std": pstdev(returns),
        "eval/return_min": min(returns),
        "eval/return_max": max(returns),
        "eval/episodic_length": fmean(episode.length for episode in episodes),
    }
    for key in info_keys:
        infos = [episode.measured[key] for episode in episodes if key in episode.measured]
        if infos:
            row[f"eval/info/{key}_sum"] = fmean(info.total for info in infos)
            row[f"eval/info/{key}"] = fmean(info.mean for info in infos)
            row[f"eval/info/{key}_last"] = fmean(info.last for info in infos)
    successes = [episode.success for episode in episodes if episode.success is not None]
    if successes:
        row["eval/success_rate"] = fmean(successes)
    return row
