"""CloneNote: an observer that warns of a clone that is worse than the controller it was cloned from."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from dppo.config import Config
from dppo.errors import counted
from dppo.invocation import as_setting_and_flag
from dppo.log import logger
from dppo.records.observer import Observer

CERTAIN = 2.0  # standard errors of the difference
CLEAR = 0.1  # share of the return, below which a difference does not matter


class _Returns(NamedTuple):
    """Returns of several episodes."""

    mean: float
    std: float
    episodes: float

    @property
    def variance_of_mean(self) -> float:
        return self.std**2 / self.episodes


class CloneNote(Observer):
    """Compares the first evaluation, which is that of a clone, with the episodes of its controller.

    Those episodes have noise and other seeds, so a clone that acts as the controller is at least as good.
    """

    def __init__(self, config: Config, rows: Iterable[Mapping[str, float]] = ()) -> None:
        """Start after the earlier `rows` of a resumed run, whose note is not repeated."""
        self._config = config
        self._iteration = config.collected_by_prior
        self._controller: _Returns | None = None
        for row in rows:
            self.note(row)

    def on_iteration(self, row: dict[str, float]) -> None:
        note = self.note(row)
        if note is not None:
            logger.warning("%s", note)

    def note(self, row: Mapping[str, float]) -> str | None:
        """Return the note that is due after `row`, the next one of the run."""
        if row["iteration"] == self._iteration:
            self._controller = _returns(
                row,
                "charts/episodic_return",
                "charts/episodic_return_std",
                "charts/recent_episodes",
            )
        if row.get("eval/iteration") != self._iteration:
            return None
        clone = _returns(row, "eval/episodic_return", "eval/return_std", "eval/episodes")
        if clone is None or self._controller is None or not _is_worse(clone, self._controller):
            return None
        return self._text(clone, self._controller)

    def _text(self, clone: _Returns, controller: _Returns) -> str:
        config = self._config
        steps = self._iteration * config.batch_size
        advice = "Show it to the policy as part of the observation"
        if config.algo == "ppo" and not config.has_memory:
            advice += f", or give the policy a memory ({as_setting_and_flag('memory', 'lstm')})"
        episodes = counted(round(clone.episodes), "episode")
        return (
            f"the clone is worse than its controller: a mean return of {clone.mean:.4g} in {episodes}, and "
            f"{config.prior_name} with noise has {controller.mean:.4g} in {controller.episodes:.0f}. Does the "
            f"controller use what the observation lacks, such as an integral? {advice}. Otherwise collect more of its "
            f"env steps: prior_steps={2 * steps} instead of {steps}"
        )


def _returns(row: Mapping[str, float], mean: str, std: str, episodes: str) -> _Returns | None:
    """Read returns from a row; None if they are of fewer than two episodes."""
    returns = _Returns(*(row.get(name, math.nan) for name in (mean, std, episodes)))
    return returns if returns.episodes >= 2 else None


def _is_worse(clone: _Returns, controller: _Returns) -> bool:
    difference = controller.mean - clone.mean
    error = math.sqrt(clone.variance_of_mean + controller.variance_of_mean)
    size = max(abs(clone.mean), abs(controller.mean))
    return difference > max(CERTAIN * error, CLEAR * size)
