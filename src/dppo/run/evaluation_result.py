"""The result of an evaluation: its metrics, and what they show."""

import time
from dataclasses import dataclass
from statistics import fmean, pstdev

from dppo.config import Config
from dppo.policies.bounds import ElementAtBound, element_at_bound
from dppo.ppo.exchange.records import Episode, success_rate
from dppo.records.differences import Difference
from dppo.run.baseline import Baseline
from dppo.run.open_evaluation import OpenEvaluation
from dppo.spaces.actions import Actions, boxes


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
    rate = success_rate(episodes)
    if rate is not None:
        row["eval/success_rate"] = rate
    return row
