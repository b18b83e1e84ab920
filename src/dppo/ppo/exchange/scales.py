"""Moments of observations, returns and targets of values, and the scales that are made from them.

Observations and rewards are normalized by running statistics, which the learner merges from the segments' moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float, Shaped

EPSILON = 1e-8  # added to a variance, so that a constant can be divided by its standard deviation
# standard deviations below this share of the mean come from rounding, and are no signal
ROUNDING = 1e-6
CLIP = 10.0  # normalized observations and rewards are clipped to +-10 (details 29 and 31)
MIN_VALUE_STD = 1e-6  # as in arXiv:2006.05990
VALUE_TARGETS = "value_targets"  # name of their moments in the trainer's state


class ReadOnly:
    """Base of frozen dataclasses with slots whose arrays are read-only too, also after unpickling."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make the arrays read-only, also those in a tuple; existing views of them stay writeable."""
        for name in self.__slots__:
            value = getattr(self, name)
            for array in value if isinstance(value, tuple) else (value,):
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False

    def __reduce__(self) -> tuple[Any, ...]:
        """Make pickle call the constructor, which makes the arrays read-only again."""
        return type(self), tuple(getattr(self, name) for name in self.__slots__)


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
        """Create the moments of zero samples of `shape`."""
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


@dataclass(frozen=True, slots=True)
class ObsScale(ReadOnly):
    """Mean and standard deviation for normalizing observations."""

    mean: Float[np.ndarray, "*O"]
    std: Float[np.ndarray, "*O"]
    names: tuple[str, ...] | None = None
    """Names of the leaves that `mean` and `std` hold side by side, of several; None: all that hold floats."""

    def astype(self, dtype: str | np.dtype) -> ObsScale:
        return replace(self, mean=self.mean.astype(dtype), std=self.std.astype(dtype))

    def normalize(
        self, obs: Shaped[np.ndarray, "*rows"], dtype: str | np.dtype
    ) -> Float[np.ndarray, "*rows"]:
        """Standardize `obs` [..., *O] in the dtype of this scale, clip it to +-10, and return it in `dtype`."""
        standardized = (obs.astype(self.mean.dtype) - self.mean) / self.std
        return np.clip(standardized, -CLIP, CLIP).astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class ValueScale:
    """Mean and standard deviation of the targets of values: an output of 0.5 stands for mean + 0.5 std."""

    mean: float = 0.0
    std: float = 1.0

    @staticmethod
    def of(targets: Moments) -> ValueScale:
        if targets.count == 0:
            return ValueScale()
        mean = float(targets.mean)
        std = float(np.sqrt(targets.m2 / targets.count))
        is_signal = std > ROUNDING * abs(mean)
        return ValueScale(mean, std if is_signal else max(MIN_VALUE_STD, std))

    @staticmethod
    def from_state(state: Mapping[str, np.ndarray]) -> ValueScale | None:
        """Return the scale of a trainer with this state; None if it normalizes no values, or has had no targets yet."""
        targets = moments_of_targets(state)
        if targets.count:
            return ValueScale.of(targets)
        return None

    def figures(self) -> dict[str, float]:
        """Metrics of this scale: mean and deviation of the values, in units of rewards."""
        return {"value_mean": self.mean, "value_std": self.std}

    def restore(self, standardized: Any) -> Any:
        """Return values in units of rewards; `standardized` is an array or a tensor, whose dtype stays."""
        return standardized * self.std + self.mean

    def standardize(self, values: Any) -> Any:
        """Return the network's outputs that stand for these values, as an array or a tensor of the same dtype."""
        return (values - self.mean) / self.std


def moments_of_targets(state: Mapping[str, np.ndarray]) -> Moments:
    """Return the moments of value targets in a trainer's state; moments of no samples if it has none."""
    count, mean, m2 = state.get(VALUE_TARGETS, np.zeros(3))
    return Moments(float(count), np.asarray(mean), np.asarray(m2))


@dataclass(frozen=True, slots=True)
class Statistics:
    """Moments of observations and of discounted returns; None for a normalizer that is off.

    The moments of observations do not change within an iteration: a segment and the update that uses it are normalized
    alike, which keeps the first probability ratio at one.
    """

    obs: Moments | None = None
    returns: Moments | None = None
    obs_names: tuple[str, ...] | None = None
    """Names of the leaves that `obs` measures, of several; None: all that hold floats."""

    def merged(self, segments: list[Statistics]) -> Statistics:
        """Return these statistics merged with those of an iteration's segments, in the order given."""
        obs = self.obs
        returns = self.returns
        for segment in segments:
            if obs is not None and segment.obs is not None:
                obs = obs.merge(segment.obs)
            if returns is not None and segment.returns is not None:
                returns = returns.merge(segment.returns)
        return replace(self, obs=obs, returns=returns)

    def arrays(self) -> dict[str, np.ndarray]:
        """List the statistics as named arrays, for a checkpoint."""
        arrays: dict[str, np.ndarray] = {}
        for name, moments in self._moments().items():
            for part in Moments.__slots__:
                arrays[f"{name}.{part}"] = np.asarray(getattr(moments, part))
        return arrays

    def loaded(self, arrays: dict[str, np.ndarray]) -> Statistics:
        """Return the statistics stored in `arrays`, for the normalizers that are on here; ValueError if they misfit."""
        loaded: dict[str, Any] = {}
        for name, moments in self._moments().items():
            count, mean, m2 = (
                np.asarray(arrays[f"{name}.{part}"], np.float64) for part in Moments.__slots__
            )
            fits = mean.shape == m2.shape == moments.mean.shape
            if not fits or not count >= 0 or (m2 < 0).any():
                raise ValueError(f"{name} has statistics of {count} samples of shape {mean.shape}")
            loaded[name] = Moments(float(count), mean, m2)
        return replace(self, **loaded)

    def _moments(self) -> dict[str, Moments]:
        statistics = {"obs": self.obs, "returns": self.returns}
        return {name: moments for name, moments in statistics.items() if moments is not None}

    def obs_scale(self) -> ObsScale | None:
        """Compute the scale of observations; None if they are not normalized."""
        if self.obs is None:
            return None
        mean, std = self.obs.mean_and_std()
        return ObsScale(mean, std, self.obs_names)

    def reward_scale(self) -> float | None:
        """Return the divisor of rewards: the standard deviation of the discounted return (detail 30)."""
        if self.returns is None:
            return None
        _, std = self.returns.mean_and_std()
        return float(std)
