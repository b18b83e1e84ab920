"""All settings in one flat record, and the sizes that follow from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from dppo.config.parts import PPO, Actors, Env, Learners, Network, Run, Sampling

USUAL_SEQUENCE = 16  # steps of a sequence, where num_steps is a multiple of it


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a run that follow from its settings."""

    iterations: int
    """The last may exceed `total_timesteps` by less than one batch."""
    sequence_length: int
    """L, the steps of the sequences that minibatches consist of; 1 without memory."""
    minibatches_per_epoch: int
    """They leave no row out, and differ by at most one sequence."""
    minibatch_rows: int
    """Rows of the largest minibatch."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FlatSettings(Env, Sampling, PPO, Network, Actors, Learners, Run):
    """Every setting as an attribute, with the sizes derived from them; `Config` adds the checks."""

    @cached_property
    def sizes(self) -> Sizes:
        """Return the sizes that follow from these settings."""
        length = self.sequence_length or 1
        if self.model is None and self.memory == "none":
            length = 1
        elif self.model is None and self.sequence_length is None:
            length = max(steps for steps in range(1, USUAL_SEQUENCE + 1) if self.num_steps % steps == 0)
        sequences = max(1, self.batch_size // length)
        most = math.ceil(sequences / 4) if self.minibatch_size is None else max(1, self.minibatch_size // length)
        minibatches = math.ceil(sequences / most)
        rows = math.ceil(sequences / minibatches) * length
        return Sizes(math.ceil(self.total_timesteps / self.batch_size), length, minibatches, rows)

    @property
    def iterations(self) -> int:
        """Return the number of iterations of the run."""
        return self.sizes.iterations

    @property
    def minibatches_per_epoch(self) -> int:
        """Return the number of minibatches of an epoch."""
        return self.sizes.minibatches_per_epoch

    @property
    def minibatch_rows(self) -> int:
        """Return the rows of the largest minibatch."""
        return self.sizes.minibatch_rows
