"""The built-in networks as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.simple import distribution_of
from dppo.ppo.networks.layers import CELL_PARAMETERS, NUM_GATES, Layers, ParameterNames
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.spaces import Spaces

if TYPE_CHECKING:
    from torch import nn

    from dppo.ppo.networks.mlp import MLP

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class BuiltInSpec(NetworkSpec):
    """Two MLPs for a single array of numbers, one for the policy and one for the value (details 13 and 26).

    `EncoderNetwork` for other observations, and where the layers are shared, are normalized or have memory. The free
    part of the head, `log_std` of a Gaussian, is one parameter vector for all observations.
    """

    spaces: Spaces = field(compare=False, repr=False)
    layers: Layers
    dtype: str

    @property
    @override
    def state_size(self) -> int:
        return self.layers.state_size

    @cached_property
    @override
    def distribution(self) -> Distribution:
        return distribution_of(
            self.spaces.actions, state_dependent_std=self.layers.state_dependent_std
        )

    @cached_property
    def acts_in_numpy(self) -> bool:
        """True if an actor needs no torch: for two MLPs, or a memory behind plain layers that read numbers."""
        has_two_trunks = not self.layers.shared
        has_memory = self.layers.memory != "none"
        return (
            self.spaces.is_vector and not self.layers.layer_norm and (has_memory or has_two_trunks)
        )

    @property
    def is_mlp(self) -> bool:
        """True if the network is an `MLP`, whose gradient is written by hand."""
        return self.acts_in_numpy and self.layers.memory == "none"

    @property
    def parameter_names(self) -> ParameterNames:
        """Names of the modules with parameters, of a network that acts in NumPy."""
        if self.is_mlp:
            # its last layers belong to the same sequences as the hidden ones
            last = 2 * len(self.layers.hidden_sizes)
            return ParameterNames(("policy", "value"), (), f"policy.{last}", f"value.{last}")
        trunks = self.layers.trunks
        hidden = tuple(f"{trunk}body.hidden" for trunk in trunks)
        cells = tuple(f"{trunk}memory" for trunk in trunks)
        return ParameterNames(hidden, cells, "policy", "value")

    @override
    def module(self, seed: int) -> nn.Module:
        from dppo.ppo.networks.parameters import initialized

        if self.is_mlp:
            return self.mlp(seed)
        return initialized(self._encoder_network, seed, self.dtype)

    def mlp(self, seed: int) -> MLP:
        """Build the default network on the CPU with weights drawn from `seed` alone, in float32 for every dtype."""
        import torch

        from dppo.ppo.networks.mlp import MLP

        generator = torch.Generator().manual_seed(seed)
        sizes = (self._num_inputs, *self.layers.hidden_sizes)
        distribution = self.distribution
        mlp = MLP(
            sizes, self.layers.activation, distribution.head_size, distribution.free_size, generator
        )
        return mlp.to(getattr(torch, self.dtype))

    def _encoder_network(self) -> nn.Module:
        from dppo.ppo.networks.encoders import EncoderNetwork

        return EncoderNetwork(self.spaces, self.distribution.head_size, **asdict(self.layers))

    @property
    def _num_inputs(self) -> int:
        return math.prod(self.spaces.obs.shape)

    @cached_property
    @override
    def shapes(self) -> Shapes:
        if not self.acts_in_numpy:
            import torch

            from dppo.ppo.networks.parameters import shapes_of

            with torch.device("meta"):  # allocates nothing: the layers may be too large
                return shapes_of(self._encoder_network())
        if self.is_mlp:
            return self._mlp_shapes()
        return self._memory_shapes()

    def _mlp_shapes(self) -> Shapes:
        shapes: Shapes = {}
        for trunk, num_outputs in (("policy", self._num_bound), ("value", 1)):
            shapes |= _linear_shapes(
                trunk, (self._num_inputs, *self.layers.hidden_sizes, num_outputs)
            )
        return shapes | self._log_std_shapes()

    def _memory_shapes(self) -> Shapes:
        names = self.parameter_names
        units = self.layers.memory_size
        gates = NUM_GATES[self.layers.memory] * units
        sizes = (self._num_inputs, *self.layers.hidden_sizes)
        shapes = self._log_std_shapes()
        for trunk in names.hidden:
            shapes |= _linear_shapes(trunk, sizes)
        for cell in names.cells:
            cell_shapes = ((gates, sizes[-1]), (gates, units), (gates,), (gates,))
            shapes |= {
                f"{cell}.{name}": shape
                for name, shape in zip(CELL_PARAMETERS, cell_shapes, strict=True)
            }
        for layer, num_outputs in ((names.policy, self._num_bound), (names.value, 1)):
            shapes |= {f"{layer}.weight": (num_outputs, units), f"{layer}.bias": (num_outputs,)}
        return shapes

    @property
    def _num_bound(self) -> int:
        """Parameters of the distribution that depend on the observation."""
        return self.distribution.head_size - self.distribution.free_size

    def _log_std_shapes(self) -> Shapes:
        free_size = self.distribution.free_size
        return {"log_std": (free_size,)} if free_size else {}

    @override
    def as_json(self) -> dict[str, Any]:
        layers = self.layers
        if not self.is_mlp:
            return {"layers": asdict(layers), "dtype": self.dtype}
        described: dict[str, Any] = {
            "hidden_sizes": list(layers.hidden_sizes),
            "activation": layers.activation,
            "dtype": self.dtype,
        }
        if layers.state_dependent_std:
            described["state_dependent_std"] = True
        return described


def _linear_shapes(sequence: str, sizes: tuple[int, ...]) -> Shapes:
    """Return names and shapes of linear layers, numbered as torch does: the activations between them count, too."""
    shapes: Shapes = {}
    for number, (inputs, outputs) in enumerate(pairwise(sizes)):
        shapes[f"{sequence}.{2 * number}.weight"] = (outputs, inputs)
        shapes[f"{sequence}.{2 * number}.bias"] = (outputs,)
    return shapes
