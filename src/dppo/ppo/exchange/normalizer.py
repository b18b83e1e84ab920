"""Running moments of observations, returns and value targets; the scales and inputs that are normalized with them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.spaces.spaces import Spaces, holds_float64, is_image, leaves

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float, Shaped

CLIP = 10.0  # normalized observations and rewards are clipped to +-10 (details 29 and 31)
EPSILON = 1e-8  # added to a variance, so that a constant can be divided by its deviation
SMALLEST_STD = 1e-6  # of value targets, as in arXiv:2006.05990
ROUNDING = 1e-6  # deviations below this share of the mean come from rounding, and are no signal
VALUE_TARGETS = "value_targets"  # name of their moments in the trainer's state


class ReadOnly:
    """Base of frozen dataclasses with slots whose arrays are read-only too, also after unpickling."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Make the arrays read-only, those in a tuple too; existing views of them stay writeable."""
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
        """Return the moments of no samples of `shape`."""
        return Moments(0.0, np.zeros(shape), np.zeros(shape))

    @staticmethod
    def of(samples: Shaped[np.ndarray, " n *O"]) -> Moments:
        """Return the moments of `samples` over their first axis."""
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
    """Return what to add to variances [*O]: EPSILON, or as small a share of the largest one where all are tiny.

    Otherwise it would swallow observations in amperes and rewards in joules of a chip. A single tiny element beside
    ordinary ones is noise more often than a signal; `small_numbers` reports it.
    """
    signal = variance > np.square(ROUNDING * mean)
    largest = float(np.max(variance, where=signal, initial=0.0))
    return EPSILON * largest if 0.0 < largest < EPSILON else EPSILON


@dataclass(frozen=True, slots=True)
class Statistics:
    """Moments of observations and of discounted returns; None for a normalizer that is off.

    Those of observations do not change within an iteration: a segment and the update that uses it are normalized alike,
    which keeps the first probability ratio at one.
    """

    obs: Moments | None = None
    returns: Moments | None = None
    obs_names: tuple[str, ...] | None = None
    """Names of the leaves that `obs` measures, of several; None: all that hold floats."""

    def merged(self, seen: list[Statistics]) -> Statistics:
        """Return these statistics merged with those of an iteration's segments, in the order given."""
        obs, returns = self.obs, self.returns
        for one in seen:
            obs = obs.merge(one.obs) if obs is not None and one.obs is not None else obs
            returns = returns.merge(one.returns) if returns is not None and one.returns is not None else returns
        return replace(self, obs=obs, returns=returns)

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the statistics as named arrays, for a checkpoint."""
        return {
            f"{name}.{part}": np.asarray(getattr(moments, part))
            for name in ("obs", "returns")
            if (moments := getattr(self, name)) is not None
            for part in Moments.__slots__
        }

    def loaded(self, arrays: dict[str, np.ndarray]) -> Statistics:
        """Return the statistics stored in `arrays`, for the normalizers that are on here; ValueError if they misfit."""
        read: dict[str, Any] = {}
        for name in ("obs", "returns"):
            if (own := getattr(self, name)) is not None:
                count, mean, m2 = (np.asarray(arrays[f"{name}.{part}"], np.float64) for part in Moments.__slots__)
                if {mean.shape, m2.shape} != {own.mean.shape} or not count >= 0 or (m2 < 0).any():
                    raise ValueError(f"{name} has statistics of {count} samples of shape {mean.shape}")
                read[name] = Moments(float(count), mean, m2)
        return replace(self, **read)

    def obs_scale(self) -> ObsScale | None:
        """Return the scale of observations; None if they are not normalized."""
        return None if self.obs is None else ObsScale(*self.obs.mean_and_std(), self.obs_names)

    def reward_scale(self) -> float | None:
        """Return the divisor of rewards: the standard deviation of the discounted return (detail 30)."""
        return None if self.returns is None else float(self.returns.mean_and_std()[1])


@dataclass(frozen=True, slots=True)
class ObsScale(ReadOnly):
    """Mean and standard deviation for normalizing observations."""

    mean: Float[np.ndarray, "*O"]
    std: Float[np.ndarray, "*O"]
    names: tuple[str, ...] | None = None
    """Names of the leaves that `mean` and `std` hold side by side, of several; None: all that hold floats."""

    def astype(self, dtype: str | np.dtype) -> ObsScale:
        """Return a copy in `dtype`."""
        return replace(self, mean=self.mean.astype(dtype), std=self.std.astype(dtype))

    def normalize(self, obs: Shaped[np.ndarray, "*rows"], dtype: str | np.dtype) -> Float[np.ndarray, "*rows"]:
        """Standardize `obs` [..., *O] in the dtype of this scale, clip it to +-10, and return it in `dtype`."""
        standardized = (obs.astype(self.mean.dtype) - self.mean) / self.std
        return np.clip(standardized, -CLIP, CLIP).astype(dtype, copy=False)


@dataclass(frozen=True, slots=True)
class ValueScale:
    """Mean and standard deviation of the targets of values: a network that is 0.5 estimates mean + 0.5 std."""

    mean: float = 0.0
    std: float = 1.0

    @staticmethod
    def of(targets: Moments) -> ValueScale:
        """Return the scale of targets with these moments of scalars."""
        if targets.count == 0:
            return ValueScale()
        mean, std = float(targets.mean), float(np.sqrt(targets.m2 / targets.count))
        return ValueScale(mean, std if std > ROUNDING * abs(mean) else max(SMALLEST_STD, std))

    @staticmethod
    def of_state(state: Mapping[str, np.ndarray]) -> ValueScale | None:
        """Return the scale of a trainer with this state; None if it normalizes no values."""
        return ValueScale.of(moments_of_targets(state)) if VALUE_TARGETS in state else None

    def restore(self, standardized: Any) -> Any:
        """Return values in units of rewards; `standardized` is an array or a tensor, whose dtype stays."""
        return standardized * self.std + self.mean

    def standardize(self, values: Any) -> Any:
        """Return what the network should be for these values, as an array or a tensor of the same dtype."""
        return (values - self.mean) / self.std


def moments_of_targets(state: Mapping[str, np.ndarray]) -> Moments:
    """Return the moments of value targets in a trainer's state; those of none if it has none."""
    count, mean, m2 = state.get(VALUE_TARGETS, np.zeros(3))
    return Moments(float(count), np.asarray(mean), np.asarray(m2))


# ------------------------------------------------------------------ inputs of a network: normalized, or as stored


def each_leaf(obs: Any, change: Callable[[Any], Any]) -> Any:
    """Return the result of `change` for an array or tensor, or of each leaf in a dict of them."""
    return {name: change(leaf) for name, leaf in obs.items()} if isinstance(obs, dict) else change(obs)


def network_inputs(
    obs: np.ndarray, of: np.dtype[Any], dtype: str | np.dtype[Any], scale: ObsScale | None
) -> np.ndarray | dict[str, np.ndarray]:
    """Return the inputs of a network in `dtype` for stored observations [..., *O]; of several leaves, each by its name.

    Pixels stay as they are, and so do integers beside other leaves.

    `of`: the dtype of one observation. `scale`: that of `scale_for`; None: numbers are not normalized.
    """
    if of.names is None:
        if is_image(of):
            return obs
        return obs.astype(dtype, copy=False) if scale is None else scale.normalize(obs, dtype)
    inputs = leaves(obs)
    scales = {} if scale is None else leaf_scales(scale, of)
    for name, leaf in inputs.items():
        if name in scales:
            inputs[name] = scales[name].normalize(leaf, dtype)
        elif leaf.dtype.kind == "f":
            inputs[name] = leaf.astype(dtype, copy=False)
    return inputs


def leaf_scales(scale: ObsScale, obs: np.dtype[Any]) -> dict[str, ObsScale]:
    """Return the scale of each normalized leaf by name, in the shape of that leaf."""
    if obs.names is None:
        return {"": scale}
    shapes = {name: leaf.shape for name, leaf in leaves(obs).items()}
    return {
        name: ObsScale(scale.mean[columns].reshape(shapes[name]), scale.std[columns].reshape(shapes[name]))
        for name, columns in _columns(obs, scale.names)
    }


def scale_for(scale: ObsScale | None, obs: np.dtype[Any], dtype: str | np.dtype[Any]) -> ObsScale | None:
    """Return the scale in the dtype in which observations are normalized: float64 if they hold any, else `dtype`."""
    return None if scale is None else scale.astype(np.dtype(np.float64) if holds_float64(obs) else dtype)


def no_statistics(spaces: Spaces, *, obs: bool, returns: bool) -> Statistics:
    """Return the statistics of a new run that normalizes observations, as far as they are floats, and returns."""
    read = spaces.of_network()
    shape = normalized_part(np.zeros(1, read.obs), spaces.normalized).shape[1:]
    continuous = 0 not in shape and (read.obs.names is not None or read.is_vector)
    return Statistics(
        obs=Moments.empty(shape) if obs and continuous else None,
        returns=Moments.empty(()) if returns else None,
        obs_names=spaces.normalized,
    )


def normalized_part(obs: np.ndarray, names: Collection[str] | None = None) -> np.ndarray:
    """Return the normalized part of stored observations [n]: the only leaf [n, *O], or leaves side by side [n, k].

    `names`: of several leaves, those to normalize; None: all that are continuous.
    """
    if obs.dtype.names is None:
        return obs
    named = leaves(obs)
    parts = [named[name].reshape(len(obs), at.stop - at.start) for name, at in _columns(obs.dtype, names)]
    return np.concatenate(parts, axis=1) if parts else np.zeros((len(obs), 0))


def _columns(obs: np.dtype[Any], names: Collection[str] | None) -> Iterator[tuple[str, slice]]:
    """Yield the name of each normalized leaf, and its columns in the normalized part."""
    start = 0
    for name, leaf in leaves(obs).items():
        if leaf.base.kind == "f" and (names is None or name in names):
            end = start + int(np.prod(leaf.shape, dtype=int))
            yield name, slice(start, end)
            start = end
