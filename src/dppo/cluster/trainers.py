"""Where SGD runs: LocalTrainer in this process, RayTrainers on several learners; PPOLearner does not know which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from dppo import streams
from dppo.assemble import build_trainer
from dppo.config import Config
from dppo.ppo.architecture import ModelSpec
from dppo.ppo.batch import make_batch
from dppo.ppo.normalizer import Statistics
from dppo.ppo.segment import Incident, Segment
from dppo.spaces import Spaces
from dppo.streams import Stream


class Trainers(Protocol):
    """One trainer, wherever it runs and of however many ranks."""

    spec: ModelSpec

    def update(self, segments: Sequence[Any], statistics: Statistics, iteration: int) -> dict[str, float]:
        """One PPO update on the segments of `iteration` (0, 1, ...); figures by name.

        Args:
            segments: in sampler order; or references to them, where ranks fetch them themselves.
            statistics: those of observations as they were when acted on; of returns, the newest.
        """

    def weights(self) -> np.ndarray:
        """All weights [P]; no later update changes them."""

    def state(self) -> dict[str, np.ndarray]:
        """The optimiser's state; no later update changes it."""

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these weights and this optimiser state."""

    def take_incidents(self) -> list[Incident]:
        """What went wrong and was dealt with since the last call."""

    def close(self) -> None:
        """Stop; give back what was taken."""


def make_trainers(
    config: Config, spaces: Spaces, notify: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Trainers:
    """The trainers for `config.num_learners`; 0 does not import Ray.

    Args:
        check: called now and then while learners start; may raise, to give up.
    """
    if config.num_learners == 0:
        return LocalTrainer(config, spaces)
    from dppo.cluster.ray_trainers import RayTrainers

    trainers = RayTrainers(config, spaces, notify, check)
    if config.num_learners > 1:
        try:
            notify(worth_in_words(config, trainers.spec, *trainers.worth(config.minibatch_rows)))
        except BaseException:
            trainers.close()
            raise
    return trainers


def worth_in_words(config: Config, spec: ModelSpec, alone_ms: float, shared_ms: float, summing_ms: float) -> str:
    """Whether several learners pay, from what was measured."""
    facts = (
        f"{config.num_learners} learners, model of {spec.num_parameters:,} parameters: the gradient of a minibatch of "
        f"{config.minibatch_rows:,} rows takes {shared_ms:.1f} ms, {summing_ms:.1f} ms of it for the sum; "
        f"one learner takes {alone_ms:.1f} ms"
    )
    if shared_ms < 0.95 * alone_ms:
        return f"{facts}. They are {alone_ms / shared_ms:.1f} times as fast."
    return f"{facts}. Several learners do not pay here; --num-learners 0 is faster."


class LocalTrainer:
    """Trains in this process."""

    def __init__(self, config: Config, spaces: Spaces) -> None:
        self._config = config
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(config.learner_threads)
        self._trainer = build_trainer(config, spaces)
        self.spec = self._trainer.model.spec

    def update(self, segments: Sequence[Segment], statistics: Statistics, iteration: int) -> dict[str, float]:
        """One PPO update on the segments of `iteration` (0, 1, ...), which were collected under `statistics`."""
        config = self._config
        batch = make_batch(segments, statistics, gamma=config.gamma, gae_lambda=config.gae_lambda)
        order = streams.generator(config.seed, Stream.MINIBATCHES, iteration)
        return self._trainer.update(batch, config.learning_rate_at(iteration), order)

    def weights(self) -> np.ndarray:
        """A copy of all weights [P]."""
        return self._trainer.weights()

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the optimiser's state."""
        return self._trainer.state()

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these weights and this optimiser state."""
        self._trainer.load(weights, state)

    def take_incidents(self) -> list[Incident]:
        """Nothing befalls a trainer in this process that would not end the run."""
        return []

    def close(self) -> None:
        torch.set_num_threads(self._threads_before)
