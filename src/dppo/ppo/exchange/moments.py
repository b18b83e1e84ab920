"""Moments of samples, and their merging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Shaped

EPSILON = 1e-8  # added to a variance, so that a constant can be divided by its standard deviation
# standard deviations below this share of the mean come from rounding, and are no signal
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class Moments:
    """Count, mean and sum of squared deviations of samples, element-wise, in float64."""

    count: float
    mean: np.ndarray
    """[*O]"""
    m2: np.ndarray
    """[*O], the sum of (x - mean)^2."""

    @staticmethod
    def empty(shape: tuple[int, ...]) -> Moments:
        """Return the moments of no samples of `shape`."""
        return Moments(0.0, np.zeros(shape), np.zeros(shape))

    @staticmethod
    def of(samples: Shaped[np.ndarray, " n *O"]) -> Moments:
        if len(samples) == 0:
            return Moments.empty(samples.shape[1:])
        samples = samples.astype(np.float64)
        mean = samples.mean(axis=0)
        return Moments(float(len(samples)), mean, np.square(samples - mean).sum(axis=0))

    def merge(self, other: Moments) -> Moments:
        """Return the moments of both sets of samples together.

            mean = mean_a + delta n_b / n        M2 = M2_a + M2_b + delta^2 n_a n_b / n

        Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
        (1979), eq. 2.1. Not associative in floating point, so the learner always merges in sampler order.
        """
        if other.count == 0:
            return self
        if self.count == 0:
            return other
        count = self.count + other.count
        delta = other.mean - self.mean
        mean = self.mean + delta * (other.count / count)
        m2 = self.m2 + other.m2 + np.square(delta) * (self.count * other.count / count)
        return Moments(count, mean, m2)

    def mean_and_std(self) -> tuple[np.ndarray, np.ndarray]:
        """Return mean and (population) standard deviation; zero and one if there are no samples."""
        if self.count == 0:
            return np.zeros_like(self.mean), np.ones_like(self.mean)
        variance = self.m2 / self.count
        return np.asarray(self.mean), np.asarray(np.sqrt(variance + _epsilon(self.mean, variance)))


def _epsilon(mean: np.ndarray, variance: np.ndarray) -> float:
    """Return the number to add to variances [*O]: EPSILON, or an equally small share of the largest where all are tiny.

    Otherwise it would swallow observations in amperes and rewards in joules of a chip. A single tiny element beside
    ordinary ones is noise more often than a signal; the incident `small_observations` reports it.
    """
    is_signal = variance > np.square(ROUNDING * mean)
    largest = float(np.max(variance, where=is_signal, initial=0.0))
    if 0.0 < largest < EPSILON:
        return EPSILON * largest
    return EPSILON
