"""The network with memory for a single array of numbers: as plain data, and in NumPy for actors."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from dppo.ppo.distributions import Distribution, distribution_of
from dppo.ppo.networks.default.mlp import StackedLayers
from dppo.ppo.networks.memory.cells import STATES, numpy_cells
from dppo.ppo.networks.network import ActingNetwork, LearningNetwork, NetworkSpec, Outputs
from dppo.ppo.networks.torch_module import ModuleSpec
from dppo.spaces.spaces import Spaces

if TYPE_CHECKING:
    from torch import Tensor

MEMORY_NETWORK = "dppo.ppo.networks.memory.memory_network:MemoryNetwork"
GATES = {"gru": 3, "lstm": 4}


@dataclass(frozen=True, slots=True)
class MemoryMLPSpec(NetworkSpec):
    """Hidden layers, a GRU or an LSTM, then policy and value: `MemoryNetwork`, which acts without torch."""

    obs_shape: tuple[int, ...]
    distribution: Distribution
    hidden_sizes: tuple[int, ...]
    activation: str
    shared: bool
    memory: str
    memory_size: int
    dtype: str
    state_dependent_std: bool
    spaces: Spaces = field(compare=False, repr=False)

    @staticmethod
    def of(spaces: Spaces, dtype: str, kwargs: dict[str, Any]) -> MemoryMLPSpec:
        """Return the network for these spaces; `kwargs` are those of `MemoryNetwork`."""
        own_std = kwargs.get("state_dependent_std", False)
        return MemoryMLPSpec(
            spaces.obs.shape,
            distribution_of(spaces.actions, state_dependent_std=own_std),
            tuple(kwargs["hidden_sizes"]),
            kwargs["activation"],
            kwargs["shared"],
            kwargs["memory"],
            kwargs["memory_size"],
            dtype,
            own_std,
            spaces,
        )

    @property
    def state_size(self) -> int:
        """Return S, the size of one environment's state."""
        return len(self.trunks) * STATES[self.memory] * self.memory_size

    @property
    def trunks(self) -> tuple[str, ...]:
        """Return the prefixes of the names of the policy's and of the value's own layers."""
        return ("",) if self.shared else ("", "value_")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes in the order of `MemoryNetwork`'s parameters."""
        free, units = self.distribution.free_size, self.memory_size
        shapes: dict[str, tuple[int, ...]] = {"log_std": (free,)} if free else {}
        sizes = (math.prod(self.obs_shape), *self.hidden_sizes)
        for trunk in self.trunks:
            for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
                shapes[f"{trunk}body.hidden.{2 * layer}.weight"] = outputs, inputs  # activations count too
                shapes[f"{trunk}body.hidden.{2 * layer}.bias"] = (outputs,)
        gates = GATES[self.memory] * units
        for trunk in self.trunks:
            for name, shape in (("weight_ih", (gates, sizes[-1])), ("weight_hh", (gates, units))):
                shapes[f"{trunk}memory.{name}"] = shape
            shapes |= {f"{trunk}memory.{name}": (gates,) for name in ("bias_ih", "bias_hh")}
        for name, outputs in (("policy", self.distribution.head_size - free), ("value", 1)):
            shapes |= {f"{name}.weight": (outputs, units), f"{name}.bias": (outputs,)}
        return shapes

    def acting(self) -> ActingNetwork:
        """Build the network for an actor."""
        return NumpyMemoryMLP(self)

    def learning(
        self, seed: int, *, device: str = "cpu", zeros_like: Callable[[Tensor], Tensor] | None = None
    ) -> LearningNetwork:
        """Build the network for a trainer; autograd computes the gradient, but for that of the recurrence."""
        twin = ModuleSpec.of(self.spaces, MEMORY_NETWORK, self._kwargs(), self.dtype)
        assert list(twin.shapes().items()) == list(self.shapes().items()), "module and spec differ"
        return twin.learning(seed, device=device, zeros_like=zeros_like)

    def _kwargs(self) -> dict[str, Any]:
        return {
            "hidden_sizes": list(self.hidden_sizes),
            "activation": self.activation,
            "shared": self.shared,
            "memory": self.memory,
            "memory_size": self.memory_size,
            **({"state_dependent_std": True} if self.state_dependent_std else {}),
        }

    def as_json(self) -> dict[str, Any]:
        """Return the arguments of `MemoryNetwork`, and the dtype."""
        return {"memory_mlp": self._kwargs(), "dtype": self.dtype}


class NumpyMemoryMLP:
    """The network in NumPy, for the reasons of `NumpyMLP`.

    Separate trunks are stacked, so that one product computes two layers, and one step two cells. Each group of E rows
    has a product of its own.
    """

    def __init__(self, spec: MemoryMLPSpec) -> None:
        self._spec = spec
        self._dims = len(spec.obs_shape)

    def load(self, weights: np.ndarray) -> None:
        """Copy `weights` [P]."""
        named, trunks = self._spec.unflatten(weights), self._spec.trunks
        prefixes = [f"{trunk}body.hidden." for trunk in trunks]
        self._hidden = StackedLayers(named, prefixes, len(self._spec.hidden_sizes), self._spec.activation == "relu")
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cells = [{name: named[f"{trunk}memory.{name}"] for name in names} for trunk in trunks]
        self._cells = numpy_cells(self._spec.memory, cells)
        self._policy_head = named["policy.weight"].T.copy(), named["policy.bias"].copy()
        self._value_head = named["value.weight"][0].copy(), named["value.bias"].copy()
        self._log_std = named["log_std"].copy() if "log_std" in named else None

    def step(self, obs: np.ndarray, state: np.ndarray | None = None) -> Outputs:
        """Return head, values and state [..., E, S] of `obs` [..., E, *O] and the `state` before."""
        assert state is not None, "a network with memory needs its state"
        rows = obs.shape[: obs.ndim - self._dims]
        h = self._hidden.outputs(obs, rows)
        trunks = len(self._spec.trunks)
        before = state.reshape(*rows, trunks, -1).swapaxes(-2, -3)
        h, after = self._cells.step(h, before)
        head = h[..., 0, :, :] @ self._policy_head[0]
        head += self._policy_head[1]
        values = h[..., -1, :, :] @ self._value_head[0]
        values += self._value_head[1]
        if self._log_std is not None:
            free = np.broadcast_to(self._log_std, (*rows, len(self._log_std)))
            head = np.concatenate([head, free], axis=-1)
        return Outputs(head, values, after.swapaxes(-2, -3).reshape(state.shape))
