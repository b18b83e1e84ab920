"""ValueScale: the unit in which a network estimates values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dppo.ppo.exchange.normalizer import Moments
from dppo.ppo.networks.network import Outputs

SMALLEST_STD = 1e-6  # of arXiv:2006.05990
STATE = "value_targets"  # name of the moments in the trainer's state


@dataclass(frozen=True, slots=True)
class ValueScale:
    """Mean and standard deviation of the targets of values: a network that is 0.5 estimates mean + 0.5 std."""

    mean: float = 0.0
    std: float = 1.0

    @staticmethod
    def of(moments: Moments) -> ValueScale:
        """Return the scale of targets with these moments of scalars."""
        if moments.count == 0:
            return ValueScale()
        return ValueScale(float(moments.mean), max(SMALLEST_STD, float(np.sqrt(moments.m2 / moments.count))))

    def restore(self, standardized: Any) -> Any:
        """Return values in units of rewards; `standardized` is an array or a tensor, whose dtype stays."""
        return standardized * self.std + self.mean

    def standardize(self, values: Any) -> Any:
        """Return what the network should be for these values, as an array or a tensor of the same dtype."""
        return (values - self.mean) / self.std

    @staticmethod
    def of_state(state: Mapping[str, np.ndarray]) -> ValueScale | None:
        """Return the scale of a trainer with this state; None if it normalises no values."""
        moments = moments_in(state)
        return None if moments is None else ValueScale.of(moments)


def moments_in(state: Mapping[str, np.ndarray]) -> Moments | None:
    """Return the moments of value targets in a trainer's state; None if there are none."""
    if STATE not in state:
        return None
    count, mean, m2 = state[STATE]
    return Moments(float(count), np.asarray(mean), np.asarray(m2))


def restoring(step: Callable[..., Outputs], scale: ValueScale | None) -> Callable[..., Outputs]:
    """Return the function `step` of an acting network with its values in units of rewards."""
    if scale is None:
        return step

    def restored(*args: Any) -> Outputs:
        outputs = step(*args)
        return outputs._replace(values=scale.restore(outputs.values))

    return restored
