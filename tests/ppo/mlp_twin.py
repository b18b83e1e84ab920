"""The default network as a plain torch module, trained by autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.mlp_torch import initial_weights

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


class MLP(nn.Module):
    """Map observations to head and value in two separate trunks (details 13 and 26)."""

    def __init__(self, spec: BuiltInSpec) -> None:
        """Allocate the parameters without initializing them."""
        super().__init__()
        self.spec = spec
        self.policy = self._trunk(spec.distribution.head_size - spec.distribution.free_size)
        self.value = self._trunk(1)
        self.log_std = None
        if spec.distribution.free_size:
            self.log_std = nn.Parameter(torch.empty(spec.distribution.free_size, dtype=torch.float32))

    def _trunk(self, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        inputs = math.prod(self.spec.spaces.obs.shape)
        for units in self.spec.layers.hidden_sizes:
            layers += [
                nn.Linear(inputs, units, device="meta", dtype=torch.float32),
                ACTIVATIONS[self.spec.layers.activation](),
            ]
            inputs = units
        layers.append(nn.Linear(inputs, outputs, device="meta", dtype=torch.float32))
        # nn.Linear on "meta" does not draw initial weights from the global generator.
        return nn.Sequential(*layers).to_empty(device="cpu")

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return head [rows, H] and values [rows] of observations [rows, *O]."""
        flat = obs.reshape(len(obs), -1)
        head = self.policy(flat)
        if self.log_std is not None:
            head = torch.cat([head, self.log_std.expand(len(head), -1)], dim=1)
        return head, self.value(flat).squeeze(1)

    def ordered_parameters(self) -> list[nn.Parameter]:
        """Return all parameters in the order of `BuiltInSpec.shapes`, which differs from that of `named_parameters`."""
        named = dict(self.named_parameters())
        expected = self.spec.shapes
        assert {name: tuple(p.shape) for name, p in named.items()} == expected, "module and spec differ"
        return [named[name] for name in expected]


def initial_mlp(spec: BuiltInSpec, seed: int) -> MLP:
    """Return the module with the initial weights of training."""
    mlp = MLP(spec).to(getattr(torch, spec.dtype))
    mlp.load_state_dict(initial_weights(spec, seed))
    return mlp
