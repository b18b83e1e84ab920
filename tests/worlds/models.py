"""Users' modules: two keep the contract, and each of the others breaks one part of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dppo


class Plain(nn.Module):
    """Shares its layers between head and value; the deviation depends on the observation."""

    def __init__(self, spaces: dppo.Spaces, head_size: int, units: int = 16) -> None:
        super().__init__()
        inputs = int(torch.Size(spaces.obs.shape).numel())
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(inputs, units), nn.Tanh())
        self.head = nn.Linear(units, head_size)
        self.value = nn.Linear(units, 1)

    def forward(self, obs: Tensor) -> Any:
        hidden = self.body(obs)
        return self.head(hidden), self.value(hidden).squeeze(-1)


class Residual(nn.Module):
    """Has a frozen parameter, a constant buffer, tensors created in forward, and normalized layers."""

    scale: Tensor

    def __init__(self, spaces: dppo.Spaces, head_size: int, blocks: int = 1) -> None:
        super().__init__()
        self.inputs = nn.Linear(int(torch.Size(spaces.obs.shape).numel()), 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(blocks)
        )
        self.outputs = nn.Linear(8, head_size + 1)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 8))

    def forward(self, obs: Tensor) -> Any:
        hidden = self.inputs(obs.flatten(1)) * self.scale + torch.ones(8) * self.frozen
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        outputs = self.outputs(hidden)
        return outputs[:, :-1], outputs[:, -1]


class Broken(Plain):
    """A module that is changed once it is made, or whose outputs are."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.change(head_size)

    def change(self, head_size: int) -> None: ...

    def forward(self, obs: Tensor) -> Any:
        return self.outputs(*super().forward(obs))

    def outputs(self, head: Tensor, values: Tensor) -> Any:
        return head, values


def not_a_class(spaces: dppo.Spaces, head_size: int) -> nn.Module:
    return Plain(spaces, head_size)


class NotAModule:
    """Looks like a module, but is not one."""


class Raises(Plain):
    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        raise RuntimeError("no such layer")


class RaisesForward(Plain):
    def forward(self, obs: Tensor) -> Any:
        raise RuntimeError("shapes do not fit")


class ChangesObs(Plain):
    def forward(self, obs: Tensor) -> Any:
        return super().forward(obs.div_(255))


class WideHead(Plain):
    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size + 1)


class ColumnOfValues(Broken):
    def outputs(self, head: Tensor, values: Tensor) -> Any:
        return head, values[:, None]


class SqueezesAll(Plain):
    """Correct for three rows, but not for one."""

    def forward(self, obs: Tensor) -> Any:
        hidden = self.body(obs)
        return self.head(hidden), self.value(hidden).squeeze()


class HeadOnly(Broken):
    def outputs(self, head: Tensor, values: Tensor) -> Any:
        return head


class Doubles(Broken):
    def outputs(self, head: Tensor, values: Tensor) -> Any:
        return head, values.double()


class Infinite(Broken):
    def outputs(self, head: Tensor, values: Tensor) -> Any:
        return head / 0.0, values


class Normalized(Broken):
    def change(self, head_size: int) -> None:
        self.norm = nn.BatchNorm1d(head_size, momentum=0.1)

    def outputs(self, head: Tensor, values: Tensor) -> Any:
        return self.norm(head), values


class Centred(Broken):
    def outputs(self, head: Tensor, values: Tensor) -> Any:
        return head - head.mean(dim=0), values


class Drops(Broken):
    def outputs(self, head: Tensor, values: Tensor) -> Any:
        # of few, two passes may drop the same by chance
        inputs = torch.arange(1, 65, dtype=head.dtype).sqrt()
        return head + nn.functional.dropout(inputs).sum(), values


class NoCritic(Broken):
    def outputs(self, head: Tensor, values: Tensor) -> Any:
        return head, torch.zeros_like(values)


class Empty(nn.Module):
    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()


class Mixed(Broken):
    def change(self, head_size: int) -> None:
        self.value.double()


class Elsewhere(Broken):
    def change(self, head_size: int) -> None:
        self.value.to("meta")


class Lazy(Broken):
    def change(self, head_size: int) -> None:
        self.value = nn.LazyLinear(1)


class RandomBuffer(Broken):
    features: Tensor

    def change(self, head_size: int) -> None:
        self.register_buffer("features", torch.randn(3))


class RandomAttribute(Plain):
    """Random Fourier features, neither a buffer nor a parameter."""

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.features = 3 * torch.randn(4)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(torch.cos(obs * self.features))
