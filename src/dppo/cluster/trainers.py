"""Where SGD runs: behind `update`, `weights`, `state`, `load` and `close`, the learner does not know."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from dppo import streams
from dppo.assemble import build_trainer
from dppo.config import Config
from dppo.ppo.batch import make_batch
from dppo.ppo.normalizer import Statistics
from dppo.ppo.segment import Segment
from dppo.spaces import Spaces
from dppo.streams import Stream


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

    def close(self) -> None:
        torch.set_num_threads(self._threads_before)
