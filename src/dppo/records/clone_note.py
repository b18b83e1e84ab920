"""CloneNote: an observer that warns of a clone that is worse than the controller it was cloned from."""

import math
from statistics import fmean, stdev
from typing import NamedTuple

from dppo.config import Config
from dppo.errors import counted
from dppo.invocation import as_setting_and_flag
from dppo.log import logger
from dppo.ppo.exchange.records import Episode
from dppo.records.metrics.reading import Row
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

    Those episodes have noise and other seeds, so a clone that acts as the controller is at least as good. A run that
    was resumed in between says nothing.
    """

    def __init__(self, config: Config, resumed_at: int) -> None:
        """Prepare for a run of `config`, whose `prior` collects the first iterations; `resumed_at` are finished."""
        self._config = config
        self._iteration = config.collected_by_prior
        self._is_collecting = resumed_at < self._iteration
        self._returns: list[float] = []

    def on_episode(self, episode: Episode) -> None:
        if self._is_collecting:
            self._returns.append(episode.episode_return)

    def on_iteration(self, row: Row) -> None:
        self._is_collecting = row["iteration"] < self._iteration
        if row.get("eval/iteration") != self._iteration or len(self._returns) < 2:
            return
        controller = _Returns(fmean(self._returns), stdev(self._returns), len(self._returns))
        clone = _Returns(row["eval/episodic_return"], row["eval/return_std"], row["eval/episodes"])
        if clone.episodes >= 2 and _is_worse(clone, controller):
            logger.warning("%s", self._text(clone, controller))

    def _text(self, clone: _Returns, controller: _Returns) -> str:
        config = self._config
        advice = "Add it to the observation"
        if config.algo == "ppo" and not config.has_memory:
            advice += f", or give the policy a memory ({as_setting_and_flag('memory', 'lstm')})"
        longer = longer_prior(config)
        if longer:
            advice += f". Otherwise collect more of its env steps: {longer}"
        episodes = counted(round(clone.episodes), "episode")
        return (
            f"the clone is worse than its controller: a mean return of {clone.mean:.4g} in {episodes}, and "
            f"{config.prior_name} with noise has {controller.mean:.4g} in {controller.episodes:.0f}. Does the "
            f"controller use what the observation lacks, such as an integral? {advice}"
        )


def longer_prior(config: Config) -> str:
    """Return `prior_steps` of twice as many env steps; "" if the run has too few for them."""
    iterations = config.collected_by_prior
    if 2 * iterations + config.lag >= config.iterations:
        return ""
    steps = iterations * config.batch_size
    return f"{as_setting_and_flag('prior_steps', 2 * steps)} instead of {steps}"


def _is_worse(clone: _Returns, controller: _Returns) -> bool:
    difference = controller.mean - clone.mean
    error = math.sqrt(clone.variance_of_mean + controller.variance_of_mean)
    size = max(abs(clone.mean), abs(controller.mean))
    return difference > max(CERTAIN * error, CLEAR * size)
