"""What observations and actions look like, as plain data: environments say it, the model is built from it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class DiscreteActions:
    """One of n choices, numbered from `start` in the environment and from 0 everywhere else."""

    n: int
    start: int = 0


@dataclass(frozen=True, slots=True)
class BoxActions:
    """A vector of real numbers; what is given to the environment is clipped to [low, high]."""

    low: np.ndarray
    """[*A] of the space's dtype."""
    high: np.ndarray
    """[*A]"""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.low.shape

    @property
    def size(self) -> int:
        return int(self.low.size)


@dataclass(frozen=True, slots=True)
class Spaces:
    """Observation and action space of an environment."""

    obs_shape: tuple[int, ...]
    obs_dtype: str
    """Of the environment, e.g. "float64"; floats travel as float32."""
    actions: DiscreteActions | BoxActions
    deterministic: bool = True
    """False where the environment's spec says `nondeterministic`: then a replay cannot be trusted."""
