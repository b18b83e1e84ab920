"""Custom networks: one equal to the default, of two trunks of 2x64 tanh units; and the same with two-hot values."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from dppo.spaces.actions import BoxActions

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

    layers: list[Any] = [
        linear(inputs, 64, math.sqrt(2)),
        nn.Tanh(),
        linear(64, 64, math.sqrt(2)),
        nn.Tanh(),
    ]
    return nn.Sequential(*layers, linear(64, outputs, gain))


# about -17 to 17, in units of normalized returns, finer near zero
BINS = torch.linspace(-3.5, 3.5, 101).sinh()
VF_COEF = 0.5  # the default, by which the trainer multiplies the gradient of values


class _Expectation(Function):
    """A value from logits; its gradient is that of the cross-entropy to the target, instead of the squared error.

    dppo's gradient of a value is vf_coef (value - target) / rows, so that the target follows from it.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, bins: Tensor) -> Tensor:
        shares = logits.softmax(dim=1)
        values = shares @ bins
        ctx.save_for_backward(shares, values, bins)
        return values

    @staticmethod
    def backward(ctx: Any, by_values: Tensor) -> tuple[Tensor, None]:
        shares, values, bins = ctx.saved_tensors
        targets = (values - by_values * (len(values) / VF_COEF)).clamp(bins[0], bins[-1])
        above = torch.searchsorted(bins, targets).clamp(1, len(bins) - 1).unsqueeze(1)
        low, high = bins[above - 1], bins[above]
        part = (targets.unsqueeze(1) - low) / (high - low)
        by_logits = shares.scatter_add(1, above, -part).scatter_add(1, above - 1, part - 1)
        return by_logits * (VF_COEF / len(values)) * (by_values != 0).unsqueeze(1), None


class TwoHot(nn.Module):
    """The default network, whose values are the mean of a distribution over 101 bins (two-hot targets).

    Source: Hafner et al., arXiv:2301.04104.
    """

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()
        inputs = math.prod(spaces.obs.shape)
        box = isinstance(spaces.actions, BoxActions)
        self.free = head_size // 2 if box else 0
        self.policy = trunk(inputs, head_size - self.free, gain=0.01)
        self.value = trunk(inputs, len(BINS), gain=0.0)
        if self.free:
            self.log_std = nn.Parameter(torch.full((self.free,), -0.5 if self.free > 1 else 0.0))
        self.register_buffer("bins", BINS.clone())

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head [n, H] and the values [n]."""
        flat = obs.flatten(1)
        head = self.policy(flat)
        values = _Expectation.apply(self.value(flat), self.bins)  # type: ignore[no-untyped-call]
        return (
            torch.cat([head, self.log_std.expand(len(head), -1)], dim=1) if self.free else head
        ), values


class Awkward(nn.Module):
    """For benchmarks/gpu.py: operations that a GPU can compute with another order of sums in each run."""

    scale: Tensor

    def __init__(self, spaces: dppo.Spaces, head_size: int) -> None:
        super().__init__()
        inputs = math.prod(spaces.obs.shape)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, inputs))
        self.first = nn.Linear(inputs, 64)
        self.table = nn.Embedding(8, 64)
        self.norm = nn.LayerNorm(64)
        self.policy = nn.Linear(32, head_size)
        self.value = nn.Linear(32, 1)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the head [n, H] and the values [n]."""
        place = (obs[:, 0].abs() * 3).long().clamp(max=7)
        code = self.norm((self.first(obs * self.scale) + self.table(place)).cumsum(dim=1))
        pooled = nn.functional.adaptive_avg_pool1d(code.unsqueeze(1), 32).squeeze(1).tanh()
        return self.policy(pooled), self.value(pooled).squeeze(1)
