"""The built-in networks as plain data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.simple import distribution_of
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.spaces import Spaces

if TYPE_CHECKING:
    from torch import nn

GATES = {"gru": 3, "lstm": 4}


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
        return distribution_of(self.spaces.actions, state_dependent_std=self.layers.state_dependent_std)

    @cached_property
    def acts_in_numpy(self) -> bool:
        """Return whether an actor needs no torch: for two MLPs, or a memory behind plain layers that read numbers."""
        of = self.layers
        return self.spaces.is_vector and not of.layer_norm and (of.memory != "none" or not of.shared)

    @property
    def is_mlp(self) -> bool:
        """Return whether it is two MLPs, whose gradient is written by hand."""
        return self.acts_in_numpy and self.layers.memory == "none"

    @override
    def module(self, seed: int) -> nn.Module:
        from dppo.ppo.networks.parameters import drawn

        return drawn(self._made, seed, self.dtype)

    def _made(self) -> nn.Module:
        from dppo.ppo.networks.encoders import EncoderNetwork

        return EncoderNetwork(self.spaces, self.distribution.head_size, **asdict(self.layers))

    @property
    def names(self) -> tuple[Sequence[str], str, str]:
        """Return the names of each trunk of hidden layers, and of the last layers of policy and value, in NumPy."""
        if self.is_mlp:
            last = 2 * len(self.layers.hidden_sizes)
            return ("policy", "value"), f"policy.{last}", f"value.{last}"
        return [f"{trunk}body.hidden" for trunk in self.layers.trunks], "policy", "value"

    @cached_property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        if not self.acts_in_numpy:
            import torch

            from dppo.ppo.networks.parameters import shapes_of

            with torch.device("meta"):  # allocates nothing: the layers may be too large
                return shapes_of(self._made())
        layers, free = self.layers, self.distribution.free_size
        sizes = (math.prod(self.spaces.obs.shape), *layers.hidden_sizes)
        last = {"policy": self.distribution.head_size - free, "value": 1}
        log_std: dict[str, tuple[int, ...]] = {"log_std": (free,)} if free else {}
        if self.is_mlp:
            of_policy, of_value = (_linear(name, (*sizes, outputs)) for name, outputs in last.items())
            return of_policy | of_value | log_std
        units, gates, shapes = layers.memory_size, GATES[layers.memory] * layers.memory_size, log_std
        for trunk in layers.trunks:
            shapes |= _linear(f"{trunk}body.hidden", sizes)
        for trunk in layers.trunks:
            shapes |= {f"{trunk}memory.weight_ih": (gates, sizes[-1]), f"{trunk}memory.weight_hh": (gates, units)}
            shapes |= {f"{trunk}memory.{name}": (gates,) for name in ("bias_ih", "bias_hh")}
        for name, outputs in last.items():
            shapes |= {f"{name}.weight": (outputs, units), f"{name}.bias": (outputs,)}
        return shapes

    @override
    def as_json(self) -> dict[str, Any]:
        of = self.layers
        if not self.is_mlp:
            return {"layers": asdict(of), "dtype": self.dtype}
        described = {"hidden_sizes": list(of.hidden_sizes), "activation": of.activation, "dtype": self.dtype}
        return described | {"state_dependent_std": True} if of.state_dependent_std else described


def _linear(name: str, sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of linear layers, numbered as torch does: the activations between them count, too."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        shapes |= {f"{name}.{2 * layer}.weight": (outputs, inputs), f"{name}.{2 * layer}.bias": (outputs,)}
    return shapes
