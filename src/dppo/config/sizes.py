"""All settings in one flat record, with the sizes derived from them; `Config` adds the checks."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppo.config.parts import PPO, Actors, Env, Learners, Network, Run, Sampling


@dataclass(frozen=True, kw_only=True, repr=False)
class Settings(Env, Sampling, PPO, Network, Actors, Learners, Run):
    """Every setting as an attribute; derived sizes are properties, never settings."""

    @property
    def minibatches_per_epoch(self) -> int:
        """Return the number of minibatches of an epoch."""
        return self.minibatches_of(self.batch_size, self.sequence_steps(self.num_steps))

    @property
    def minibatch_rows(self) -> int:
        """Return the rows of the largest minibatch."""
        steps = self.sequence_steps(self.num_steps)
        return math.ceil(self.batch_size // steps / self.minibatches_per_epoch) * steps

    @property
    def rows_of_a_learner(self) -> int:
        """Return one learner's rows of the largest minibatch."""
        return math.ceil(self.minibatch_rows / max(1, self.num_learners))

    @property
    def iterations(self) -> int:
        """Return the number of iterations of the run."""
        return self.iterations_of(self.batch_size)

    def learning_rate_at(self, iteration: int) -> float:
        """Return Adam's step size in an iteration, 0 <= iteration < iterations, where it does not adapt to the KL."""
        return self.after(iteration / self.iterations).learning_rate
