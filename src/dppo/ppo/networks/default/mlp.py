"""The default network, two separate multilayer perceptrons: as plain data, and in NumPy for actors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.ppo.distributions import Distribution, distribution_of
from dppo.ppo.networks.network import ActingNetwork, LearningNetwork, NetworkSpec, Outputs
from dppo.spaces.spaces import Spaces

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MLPSpec(NetworkSpec):
    """Two trunks with hidden layers of equal sizes, one for the policy and one for the value (details 13 and 26).

    The free part of the head, `log_std` of a Gaussian, is one parameter vector for all observations.
    """

    obs_shape: tuple[int, ...]
    distribution: Distribution
    hidden_sizes: tuple[int, ...]
    activation: str
    dtype: str
    state_dependent_std: bool = False

    @staticmethod
    def of(
        spaces: Spaces, hidden_sizes: tuple[int, ...], activation: str, dtype: str, *, state_dependent_std: bool = False
    ) -> MLPSpec:
        """Return the network for these spaces."""
        distribution = distribution_of(spaces.actions, state_dependent_std=state_dependent_std)
        return MLPSpec(spaces.obs.shape, distribution, hidden_sizes, activation, dtype, state_dependent_std)

    @property
    def obs_size(self) -> int:
        """Return the number of elements of one observation."""
        return math.prod(self.obs_shape)

    @property
    def policy_outputs(self) -> int:
        """Return the number of outputs of the policy trunk."""
        return self.distribution.head_size - self.distribution.free_size

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes: the policy trunk, the value trunk, log_std."""
        shapes: dict[str, tuple[int, ...]] = {}
        for trunk, outputs in (("policy", self.policy_outputs), ("value", 1)):
            sizes = (self.obs_size, *self.hidden_sizes, outputs)
            for layer, (inputs, units) in enumerate(pairwise(sizes)):
                shapes[f"{trunk}.{2 * layer}.weight"] = units, inputs  # as torch numbers them: activations count too
                shapes[f"{trunk}.{2 * layer}.bias"] = (units,)
        if self.distribution.free_size:
            shapes["log_std"] = (self.distribution.free_size,)
        return shapes

    def acting(self) -> ActingNetwork:
        """Build the network for an actor."""
        return NumpyMLP(self)

    def learning(
        self, seed: int, *, device: str = "cpu", zeros_like: Callable[[Tensor], Tensor] | None = None
    ) -> LearningNetwork:
        """Build the network for a trainer, with a hand-written gradient."""
        from dppo.ppo.networks.default.mlp_torch import HandwrittenMLP, initial_mlp

        return HandwrittenMLP(initial_mlp(self, seed).to(device), zeros_like)

    def as_json(self) -> dict[str, Any]:
        """Return hidden sizes, activation and dtype, and whether the standard deviation depends on the state."""
        described = {"hidden_sizes": list(self.hidden_sizes), "activation": self.activation, "dtype": self.dtype}
        return described | {"state_dependent_std": True} if self.state_dependent_std else described


class StackedLayers:
    """Hidden layers of K trunks of equal sizes, stacked [K, inputs, units]: one product computes K layers."""

    def __init__(self, named: dict[str, np.ndarray], prefixes: Sequence[str], count: int, relu: bool) -> None:
        """Copy the weights of `count` layers from parameters by name.

        Args:
            prefixes: what the names of each trunk's parameters begin with.
            relu: the activation is relu, otherwise tanh.
        """
        self._relu = relu
        self._layers = [
            (
                np.stack([named[f"{prefix}{2 * layer}.weight"].T for prefix in prefixes]),
                np.stack([named[f"{prefix}{2 * layer}.bias"][None] for prefix in prefixes]),
            )
            for layer in range(count)
        ]

    def outputs(self, obs: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
        """Return the outputs [..., K, E, units] of observations with the leading axes `rows` = [..., E]."""
        h = obs.reshape(*rows[:-1], 1, rows[-1], -1)  # [..., 1, E, inputs], broadcast over the trunks
        for weight, bias in self._layers:
            h = h @ weight
            h += bias
            if self._relu:
                np.maximum(h, 0, out=h)
            else:
                np.tanh(h, out=h)
        return h


class NumpyMLP:
    """The network in NumPy.

    For the few rows of one sampler this takes a quarter of torch's time. An actor that never imports torch also starts
    in a fifth of the time and needs a third of the memory.
    """

    def __init__(self, spec: MLPSpec) -> None:
        self._spec = spec
        self._dims = len(spec.obs_shape)

    def load(self, weights: np.ndarray) -> None:
        """Copy `weights` [P]."""
        named = self._spec.unflatten(weights)
        layers = len(self._spec.hidden_sizes)
        self._hidden = StackedLayers(named, ("policy.", "value."), layers, self._spec.activation == "relu")
        self._policy_head = named[f"policy.{2 * layers}.weight"].T.copy(), named[f"policy.{2 * layers}.bias"].copy()
        self._value_head = named[f"value.{2 * layers}.weight"][0].copy(), named[f"value.{2 * layers}.bias"].copy()
        self._log_std = named["log_std"].copy() if "log_std" in named else None

    def step(self, obs: np.ndarray, state: None = None) -> Outputs:
        """Return head and values of `obs` [..., E, *O].

        Each group of E rows has a matrix product of its own, so that leading axes do not change a single bit; larger
        products would.
        """
        rows = obs.shape[: obs.ndim - self._dims]
        h = self._hidden.outputs(obs, rows)
        policy, value = (h[0], h[-1]) if len(rows) == 1 else (h[..., 0, :, :], h[..., -1, :, :])
        head = policy @ self._policy_head[0]
        head += self._policy_head[1]
        values = value @ self._value_head[0]
        values += self._value_head[1]
        if self._log_std is not None:
            whole = np.empty((*rows, self._spec.distribution.head_size), head.dtype)
            whole[..., : -len(self._log_std)] = head
            whole[..., -len(self._log_std) :] = self._log_std
            head = whole
        return Outputs(head, values)
