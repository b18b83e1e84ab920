"""One evaluation of a run: its episodes, and their metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import fmean, pstdev

from dppo.ppo.exchange.records import Episode


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


def metrics_of(episodes: list[Episode], info_keys: tuple[str, ...]) -> dict[str, float]:
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
