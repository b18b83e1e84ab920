"""Scales with which observations and values are normalized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.ppo.exchange.moments import ROUNDING, Moments
from dppo.ppo.exchange.read_only import ReadOnly

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float, Shaped

CLIP = 10.0  # normalized observations and rewards are clipped to +-10 (details 29 and 31)
MIN_VALUE_STD = 1e-6  # as in arXiv:2006.05990
VALUE_TARGETS = "value_targets"  # name of their moments in the trainer's state


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
    def of_state(state: Mapping[str, np.ndarray]) -> ValueScale | None:
        """Return the scale of a trainer with this state; None if it normalizes no values, or has had no targets yet."""
        targets = moments_of_targets(state)
        return ValueScale.of(targets) if targets.count else None

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
