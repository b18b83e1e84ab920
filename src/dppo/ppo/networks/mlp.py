"""The default network as a plain torch module: two MLPs, one for the policy and one for the value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU}


class MLP(nn.Module):
    """Map observations [rows, *O] to head [rows, H] and values [rows] in two separate trunks (details 13 and 26).

    Initial weights are orthogonal, biases and `log_std` are zero (details 2 and 24). `kernels.mlp` trains it.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str,
        head_size: int,
        free_size: int,
        generator: torch.Generator,
    ) -> None:
        """Draw the weights in float32 from `generator`, first those of the policy.

        Args:
            sizes: numbers of inputs and of the units of each hidden layer.
            head_size: H, of which the last `free_size` are the parameter `log_std`, the same for all observations.
        """
        super().__init__()
        self.policy = _trunk([*sizes, head_size - free_size], activation, 0.01, generator)
        self.value = _trunk([*sizes, 1], activation, 1.0, generator)
        self.log_std = (
            nn.Parameter(torch.zeros(free_size, dtype=torch.float32)) if free_size else None
        )

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the head [rows, H] and the values [rows]."""
        rows = obs.reshape(obs.shape[0], -1)
        return self.head(rows), self.value(rows).squeeze(1)

    def head(self, rows: Tensor) -> Tensor:
        """Compute the head [rows, H] alone, for observations [rows, inputs]."""
        outputs: Tensor = self.policy(rows)
        if self.log_std is None:
            return outputs
        return torch.cat([outputs, self.log_std.expand(outputs.shape[0], -1)], dim=1)


def _trunk(
    sizes: Sequence[int], activation: str, last_gain: float, generator: torch.Generator
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        # As by `skip_init`, for which torch imports a second of modules.
        layer = nn.Linear(inputs, outputs, device="meta", dtype=torch.float32)
        layer.weight = nn.Parameter(torch.empty(outputs, inputs, device="cpu", dtype=torch.float32))
        layer.bias = nn.Parameter(torch.zeros(outputs, device="cpu", dtype=torch.float32))
        is_last = len(layers) == 2 * (len(sizes) - 2)
        nn.init.orthogonal_(
            layer.weight, last_gain if is_last else math.sqrt(2), generator=generator
        )
        layers += [layer, ACTIVATIONS[activation]()]
    return nn.Sequential(*layers[:-1])
