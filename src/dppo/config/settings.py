"""All settings in one flat record, and the numbers that follow from them. Not checked: `Config` is."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppo.config.parts import PPO, Actors, Env, Learners, Network, Run, Sampling


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings(Env, Sampling, PPO, Network, Actors, Learners, Run):
    """Every setting as an attribute; sizes that follow from others are properties, never settings."""

    @property
    def minibatches_per_epoch(self) -> int:
        """Minibatches that an epoch is cut into."""
        return self.minibatches_of(self.batch_size)

    @property
    def minibatch_rows(self) -> int:
        """Rows of the largest minibatch."""
        return math.ceil(self.batch_size / self.minibatches_per_epoch)

    @property
    def rows_of_a_learner(self) -> int:
        """Rows of the largest minibatch that one learner computes."""
        return math.ceil(self.minibatch_rows / max(1, self.num_learners))

    @property
    def iterations(self) -> int:
        """Iterations of the run."""
        return self.iterations_of(self.batch_size)

    def learning_rate_at(self, iteration: int) -> float:
        """Return Adam's step size in an iteration, 0 <= iteration < iterations, where it does not adapt to the KL."""
        return self.learning_rate_after(iteration / self.iterations)
