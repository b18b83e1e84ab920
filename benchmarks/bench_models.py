"""A custom network equal to the default one: two trunks of two layers of 64 tanh units, orthogonal weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    import dppo


class TwoTrunks(nn.Module):
    """Separate trunks for policy and value, as in the default network of `dppo`."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()
        inputs = math.prod(spaces.obs.shape)
        self.policy = trunk(inputs, head_size, gain=0.01)
        self.value = trunk(inputs, 1, gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head [n, H] and the values [n]."""
        flat = obs.flatten(1)
        return self.policy(flat), self.value(flat).squeeze(1)


def trunk(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Return an MLP of 2x64 tanh units with orthogonal weights and zero biases."""

    def linear(rows: int, columns: int, scale: float) -> nn.Linear:
        layer = nn.Linear(rows, columns)
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
        return layer

    layers: list[Any] = [linear(inputs, 64, math.sqrt(2)), nn.Tanh(), linear(64, 64, math.sqrt(2)), nn.Tanh()]
    return nn.Sequential(*layers, linear(64, outputs, gain))
