"""PopArt: the network learns values in units of their targets' deviation, without a jump when that unit changes."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch

from dppo.errors import ConfigError
from dppo.ppo.exchange.normalizer import VALUE_TARGETS, Moments, ValueScale, moments_of_targets
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.parallel import Parallel, moments_of_all, row_moments
from dppo.ppo.networks.network import NetworkSpec

LAST_LAYER = re.compile(r"value(?:\.(\d+))?\.(weight|bias)")


class PopArt:
    """Standardize targets by all targets seen so far, and correct the last layer so that no value changes.

        w' = w s / s'        b' = (s b + m - m') / s'        with mean m, deviation s before and m', s' after

    Source: van Hasselt et al., "Learning values across many orders of magnitude" (arXiv:1602.07714), proposition 1.
    Deviation: moments are those of all targets, not of the recent ones, as in Andrychowicz et al. (arXiv:2006.05990).
    """

    def __init__(self, model: PPOModel) -> None:
        """Begin without any target; raise ConfigError if the module has no linear layer called `value`."""
        self._model = model
        self._weight, self._bias = last_layer(model.spec)
        self._moments = Moments.empty(())

    @property
    def scale(self) -> ValueScale:
        """Return the unit of the network's values."""
        return ValueScale.of(self._moments)

    def learn(self, batch: Batch, parallel: Parallel) -> Batch:
        """Count the targets of `batch` on all ranks, change the unit, and return the batch with values in it."""
        weights = None if batch.weights is None else batch.weights.double().unsqueeze(0)
        own = row_moments(batch.returns.double().unsqueeze(0), weights)
        count, mean, m2 = moments_of_all(own, parallel)[0].tolist()
        before = self.scale
        self._moments = self._moments.merge(Moments(count, np.array(mean), np.array(m2)))
        after = self.scale
        with torch.no_grad():
            flat = self._model.parameters.weights
            flat[self._weight] *= before.std / after.std
            flat[self._bias] *= before.std / after.std
            flat[self._bias] += (before.mean - after.mean) / after.std
        return replace(batch, values=after.standardize(batch.values), returns=after.standardize(batch.returns))

    def state(self) -> dict[str, np.ndarray]:
        """Return the moments as a named array, which is part of the trainer's state."""
        moments = self._moments
        return {VALUE_TARGETS: np.array([moments.count, float(moments.mean), float(moments.m2)])}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `state`; the weights belong to it already."""
        self._moments = moments_of_targets(state) or Moments.empty(())


def last_layer(spec: NetworkSpec) -> tuple[slice, slice]:
    """Return where weights and bias of the last layer of values are in the flat vector.

    It is the linear layer called `value`, or the last one of a sequence of that name. Raise ConfigError without one.
    """
    found: dict[int, dict[str, slice]] = {}
    ends = accumulate(map(math.prod, spec.shapes.values()))
    for (name, shape), end in zip(spec.shapes.items(), ends, strict=True):
        match = LAST_LAYER.fullmatch(name)
        if match and shape[0] == 1:
            found.setdefault(int(match[1] or 0), {})[match[2]] = slice(end - math.prod(shape), end)
    last = found[max(found)] if found else {}
    if set(last) != {"weight", "bias"}:
        raise ConfigError(
            "norm_value=True: the network has no linear layer called `value` with one output and a bias, to correct "
            "when the unit of values changes. Rename your module's last layer of values, or use `norm_value=False`."
        )
    return last["weight"], last["bias"]
