"""What the model is made of, as plain data: the same for the torch model that learns and the NumPy agent that acts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from dppo.ppo.distributions import Categorical, DiagonalGaussian
from dppo.spaces import BoxActions, DiscreteActions, Spaces


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Two trunks of the same hidden layers, one for the policy, one for the value (details 13 and 26)."""

    obs_size: int
    """Elements of one observation, flattened."""
    actions: DiscreteActions | BoxActions
    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: str

    @staticmethod
    def of(spaces: Spaces, hidden_sizes: tuple[int, ...], activation: str, dtype: str) -> ModelSpec:
        return ModelSpec(math.prod(spaces.obs_shape), spaces.actions, hidden_sizes, activation, dtype)

    @property
    def distribution(self) -> Categorical | DiagonalGaussian:
        if isinstance(self.actions, DiscreteActions):
            return Categorical(self.actions.n)
        return DiagonalGaussian(self.actions.size)

    def shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all parameters, in the order in which they lie in the flat vector."""
        for trunk, outputs in (("policy", self.distribution.head_size), ("value", 1)):
            sizes = (self.obs_size, *self.hidden_sizes, outputs)
            for layer, (inputs, units) in enumerate(pairwise(sizes)):
                yield f"{trunk}.{2 * layer}.weight", (units, inputs)  # torch's numbering: activations lie between
                yield f"{trunk}.{2 * layer}.bias", (units,)
        if isinstance(self.actions, BoxActions):
            yield "log_std", (self.actions.size,)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for _, shape in self.shapes())

    def unflatten(self, weights: np.ndarray) -> dict[str, np.ndarray]:
        """Views of the flat vector `weights` [P], by name.

        Raises:
            ValueError: `weights` has another length than this model.
        """
        if weights.shape != (self.num_parameters,):
            raise ValueError(f"{weights.size:,} weights given to a model of {self.num_parameters:,}.")
        named, start = {}, 0
        for name, shape in self.shapes():
            end = start + math.prod(shape)
            named[name] = weights[start:end].reshape(shape)
            start = end
        return named

    def flatten(self, named: dict[str, np.ndarray]) -> np.ndarray:
        """The flat vector [P] of parameters given by name.

        Raises:
            ValueError: one is missing, left over, or of another shape than in this model.
        """
        expected = dict(self.shapes())
        found = {name: array.shape for name, array in named.items()}
        if found != expected:
            name = next(name for name in {**expected, **found} if expected.get(name) != found.get(name))
            raise ValueError(f"parameter {name} has shape {found.get(name)}, this model wants {expected.get(name)}")
        return np.concatenate([named[name].reshape(-1) for name in expected]).astype(self.dtype, copy=False)
