"""PopArt: values in units of the deviation of their targets."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from dppo.errors import ConfigError
from dppo.ppo.exchange.scales import VALUE_TARGETS, Moments, ValueScale, moments_of_targets
from dppo.ppo.learning.batch import Batch, zero_batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.parallel import Parallel, moments_of_all
from dppo.ppo.networks.network import NetworkSpec

LAST_LAYER = re.compile(r"value(?:\.(\d+))?\.(weight|bias)")


class PopArt:
    """Standardize targets by all targets so far, and correct the last layer so that no value changes.

        w' = w s / s'        b' = (s b + m - m') / s'        with mean m, deviation s before and m', s' after

    Source: van Hasselt et al., "Learning values across many orders of magnitude" (arXiv:1602.07714), proposition 1.
    Deviation: moments are those of all targets, not of the recent ones, as in Andrychowicz et al. (arXiv:2006.05990).
    """

    def __init__(self, model: PPOModel) -> None:
        """Begin without any target; raise ConfigError if the module has no linear layer called `value`."""
        self._model = model
        self._weight, self._bias = last_layer(model.spec)
        self._moments = Moments.empty(())
        self._check_last_layer()

    def _check_last_layer(self) -> None:
        """Raise ConfigError if values are not what the last layer returns: its correction would change them."""
        weights = self._model.parameters.weights.data
        unchanged = weights.clone()
        batch = zero_batch(self._model.spec, 1, 1).to(weights.device)
        values_before = self._model.values(batch.obs, batch.recurrent)
        weights[self._weight] *= 2
        weights[self._bias] = 2 * weights[self._bias] + 1
        values_after = self._model.values(batch.obs, batch.recurrent)
        weights.copy_(unchanged)
        if not torch.allclose(values_after, 2 * values_before + 1, rtol=1e-2, atol=1e-2):
            raise ConfigError(
                "norm_value=True: the network changes what its layer `value` returns, so that values would jump with "
                "their unit. Return the numbers of that layer as they are, or use `norm_value=False`."
            )

    @property
    def scale(self) -> ValueScale:
        """The unit of the network's values."""
        return ValueScale.of(self._moments)

    def learn(self, batch: Batch, parallel: Parallel) -> Batch:
        """Count the targets of `batch` on all ranks, change the unit, and return the batch with values in it."""
        (moments,) = moments_of_all(batch.returns.double()[None], batch.weights, parallel)
        count, mean, m2 = moments.tolist()
        old_scale = self.scale
        self._moments = self._moments.merge(Moments(count, np.array(mean), np.array(m2)))
        new_scale = self.scale
        with torch.no_grad():
            flat = self._model.parameters.weights
            flat[self._weight] *= old_scale.std / new_scale.std
            flat[self._bias] *= old_scale.std / new_scale.std
            flat[self._bias] += (old_scale.mean - new_scale.mean) / new_scale.std
        values = new_scale.standardize(batch.values)
        returns = new_scale.standardize(batch.returns)
        return replace(batch, values=values, returns=returns)

    def state(self) -> dict[str, np.ndarray]:
        """Return the moments as a named array, which is part of the trainer's state."""
        moments = self._moments
        numbers = [moments.count, float(moments.mean), float(moments.m2)]
        return {VALUE_TARGETS: np.array(numbers)}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore the result of `state`; the weights belong to it already."""
        self._moments = moments_of_targets(state)


def last_layer(spec: NetworkSpec) -> tuple[slice, slice]:
    """Return the places of weights and bias of the last layer of values in the flat vector.

    It is the linear layer called `value`, or the last one of a sequence of that name. Raise ConfigError without one.
    """
    value: Any = getattr(spec.module(0), "value", None)
    layers = list(value) if isinstance(value, nn.Sequential) else [value]
    while layers and isinstance(layers[-1], nn.Flatten | nn.Identity):
        layers.pop()
    places = spec.unflatten(np.arange(spec.num_parameters))
    names = value_layer(places)
    is_linear = bool(layers) and isinstance(layers[-1], nn.Linear)
    if not is_linear or set(names) != {"weight", "bias"}:
        raise ConfigError(
            "norm_value=True: the network has no linear layer with one output and a bias that is called `value`, or "
            "that ends a Sequential of that name, to correct when the unit of values changes. Let values come from "
            "one, or use `norm_value=False`."
        )
    weight = places[names["weight"]].flat
    bias = places[names["bias"]].flat
    return slice(weight[0], weight[-1] + 1), slice(bias[0], bias[-1] + 1)


def value_layer(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Return the names of `weight` and `bias` of the last layer of values among named arrays; fewer without one."""
    layers: dict[int, dict[str, str]] = {}
    for name, array in arrays.items():
        match = LAST_LAYER.fullmatch(name)
        if match and len(array) == 1:
            index, kind = match.groups(default=0)
            layers.setdefault(int(index), {})[str(kind)] = name
    return layers[max(layers)] if layers else {}
