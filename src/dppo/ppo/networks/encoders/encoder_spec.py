"""The built-in network of encoders, hidden layers and memory, as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.joint import distribution_of
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import NetworkSpec, shapes_of_layers
from dppo.spaces.spaces import Spaces

if TYPE_CHECKING:
    from torch import nn

GATES = {"gru": 3, "lstm": 4}


@dataclass(frozen=True)
class EncoderSpec(NetworkSpec):
    """`EncoderNetwork`. With memory, for a single array of numbers, it acts without torch."""

    obs_shape: tuple[int, ...]
    distribution: Distribution
    layers: Layers
    dtype: str
    spaces: Spaces = field(compare=False, repr=False)

    @staticmethod
    def of(spaces: Spaces, layers: Layers, dtype: str) -> EncoderSpec:
        """Return the network for these spaces."""
        distribution = distribution_of(spaces.actions, state_dependent_std=layers.state_dependent_std)
        return EncoderSpec(spaces.obs.shape, distribution, layers, dtype, spaces)

    @property
    @override
    def state_size(self) -> int:
        return self.layers.state_size

    @property
    def acts_in_numpy(self) -> bool:
        """Return whether an actor needs no torch: a memory behind plain hidden layers that read numbers."""
        return self.layers.memory != "none" and self.spaces.is_vector and not self.layers.layer_norm

    def module(self, seed: int) -> nn.Module:
        """Build the module on the CPU with weights drawn from `seed`; imports torch."""
        from dppo.ppo.networks.parameters import drawn

        return drawn(self._made, seed, self.dtype)

    def _made(self) -> nn.Module:
        from dppo.ppo.networks.encoders.encoder_network import EncoderNetwork

        return EncoderNetwork(self.spaces, self.distribution.head_size, **asdict(self.layers))

    @cached_property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        if not self.acts_in_numpy:
            import torch

            from dppo.ppo.networks.parameters import shapes_of

            with torch.device("meta"):  # allocates nothing: the layers may be too large
                return shapes_of(self._made())
        layers, free = self.layers, self.distribution.free_size
        units, gates = layers.memory_size, GATES[layers.memory] * layers.memory_size
        shapes: dict[str, tuple[int, ...]] = {"log_std": (free,)} if free else {}
        sizes = (math.prod(self.obs_shape), *layers.hidden_sizes)
        for trunk in layers.trunks:
            shapes |= shapes_of_layers(f"{trunk}body.hidden", sizes)
        for trunk in layers.trunks:
            shapes |= {f"{trunk}memory.weight_ih": (gates, sizes[-1]), f"{trunk}memory.weight_hh": (gates, units)}
            shapes |= {f"{trunk}memory.{name}": (gates,) for name in ("bias_ih", "bias_hh")}
        for name, outputs in (("policy", self.distribution.head_size - free), ("value", 1)):
            shapes |= {f"{name}.weight": (outputs, units), f"{name}.bias": (outputs,)}
        return shapes

    @override
    def as_json(self) -> dict[str, Any]:
        return {"layers": asdict(self.layers), "dtype": self.dtype}
