"""The default network, two separate multilayer perceptrons: as plain data, and in NumPy for actors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from typing_extensions import override

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.joint import distribution_of
from dppo.ppo.networks.network import ActingNetwork, NetworkSpec, Outputs, shapes_of_layers
from dppo.spaces.spaces import Spaces


@dataclass(frozen=True)
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

    state_size = 0

    @staticmethod
    def of(
        spaces: Spaces, hidden_sizes: tuple[int, ...], activation: str, dtype: str, *, state_dependent_std: bool = False
    ) -> MLPSpec:
        """Return the network for these spaces."""
        distribution = distribution_of(spaces.actions, state_dependent_std=state_dependent_std)
        return MLPSpec(spaces.obs.shape, distribution, hidden_sizes, activation, dtype, state_dependent_std)

    @property
    def policy_outputs(self) -> int:
        """Return the number of outputs of the policy trunk."""
        return self.distribution.head_size - self.distribution.free_size

    @cached_property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for trunk, outputs in (("policy", self.policy_outputs), ("value", 1)):
            shapes |= shapes_of_layers(trunk, (math.prod(self.obs_shape), *self.hidden_sizes, outputs))
        if self.distribution.free_size:
            shapes["log_std"] = (self.distribution.free_size,)
        return shapes

    @override
    def as_json(self) -> dict[str, Any]:
        described = {"hidden_sizes": list(self.hidden_sizes), "activation": self.activation, "dtype": self.dtype}
        return described | {"state_dependent_std": True} if self.state_dependent_std else described


class NumpyMLP(ActingNetwork):
    """The network in NumPy.

    For few rows this takes a quarter of torch's time. An actor without torch starts in a fifth of the time and needs a
    third of the memory.
    """

    def __init__(self, spec: MLPSpec) -> None:
        self._spec = spec
        self._dims = len(spec.obs_shape)

    @override
    def load(self, weights: np.ndarray) -> None:
        named = self._spec.unflatten(weights)
        last = 2 * len(self._spec.hidden_sizes)
        self._hidden = StackedLayers(named, ("policy.", "value."), last, self._spec.activation)
        self._outputs = LastLayers(named, f"policy.{last}", f"value.{last}")

    @override
    def step(self, obs: np.ndarray, state: None = None) -> Outputs:
        """Return head and values of `obs` [..., E, *O].

        Each group of E rows has a matrix product of its own: larger ones would change the last bits.
        """
        rows = obs.shape[: obs.ndim - self._dims]
        return Outputs(*self._outputs.of(self._hidden.outputs(obs, rows)))


class StackedLayers:
    """Hidden layers of K trunks of equal sizes, stacked [K, inputs, units]: one product computes K layers."""

    def __init__(self, named: dict[str, np.ndarray], trunks: Sequence[str], end: int, activation: str) -> None:
        """Copy the layers of `trunks`, prefixes of names, that are numbered 0, 2, ... below `end`."""

        def stacked(name: str) -> np.ndarray:
            return np.stack([np.atleast_2d(named[trunk + name].T) for trunk in trunks])

        self._relu = activation == "relu"
        self._layers = [(stacked(f"{number}.weight"), stacked(f"{number}.bias")) for number in range(0, end, 2)]

    def outputs(self, obs: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
        """Return the outputs [..., K, E, units] of observations with the leading axes `rows` = [..., E]."""
        h = obs.reshape(*rows[:-1], 1, rows[-1], -1)  # [..., 1, E, inputs], broadcast over the trunks
        for weight, bias in self._layers:
            h = h @ weight
            h += bias
            h = np.maximum(h, 0, out=h) if self._relu else np.tanh(h, out=h)
        return h


class LastLayers:
    """The last layers of policy and value, and the free part of the head."""

    def __init__(self, named: dict[str, np.ndarray], policy: str, value: str) -> None:
        self._policy = named[f"{policy}.weight"].T.copy(), named[f"{policy}.bias"].copy()
        self._value = named[f"{value}.weight"][0].copy(), named[f"{value}.bias"].copy()
        self._log_std = named["log_std"].copy() if "log_std" in named else None

    def of(self, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return head [..., E, H] and values [..., E] of the trunks' outputs [..., K, E, units]."""
        policy, value = (h[0], h[-1]) if h.ndim == 3 else (h[..., 0, :, :], h[..., -1, :, :])
        head = policy @ self._policy[0]
        head += self._policy[1]
        values = value @ self._value[0]
        values += self._value[1]
        if self._log_std is None:
            return head, values
        whole = np.empty((*values.shape, head.shape[-1] + len(self._log_std)), head.dtype)
        whole[..., : head.shape[-1]] = head
        whole[..., head.shape[-1] :] = self._log_std
        return whole, values
