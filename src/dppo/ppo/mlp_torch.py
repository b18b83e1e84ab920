"""The default network in torch: a module, and a gradient written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dppo.ppo.flat import FlatParameters
from dppo.ppo.mlp import MLPSpec

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU}


class MLP(nn.Module):
    """Map observations to head and value in two separate trunks (details 13 and 26)."""

    def __init__(self, spec: MLPSpec) -> None:
        """Allocate the parameters without initialising them."""
        super().__init__()
        self.spec = spec
        self.policy = self._trunk(spec.policy_outputs)
        self.value = self._trunk(1)
        self.log_std = None
        if spec.distribution.free_size:
            self.log_std = nn.Parameter(torch.empty(spec.distribution.free_size, dtype=torch.float32))

    def _trunk(self, outputs: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        inputs = self.spec.obs_size
        for units in self.spec.hidden_sizes:
            layers += [
                nn.Linear(inputs, units, device="meta", dtype=torch.float32),
                ACTIVATIONS[self.spec.activation](),
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
        """Return all parameters in the order of `MLPSpec.shapes`, which differs from that of `named_parameters`."""
        named = dict(self.named_parameters())
        expected = self.spec.shapes()
        assert {name: tuple(p.shape) for name, p in named.items()} == expected, "module and spec differ"
        return [named[name] for name in expected]


def initial_mlp(spec: MLPSpec, seed: int) -> MLP:
    """Return a network with orthogonal weights drawn from `seed` alone, and zero biases (detail 2).

    The weights are drawn in float32 for every dtype. torch's global generator is neither used nor changed.
    """
    mlp = MLP(spec)
    generator = torch.Generator().manual_seed(seed)
    for trunk, head_gain in ((mlp.policy, 0.01), (mlp.value, 1.0)):
        linears = _linears(trunk)
        for layer in linears:
            gain = head_gain if layer is linears[-1] else math.sqrt(2)
            nn.init.orthogonal_(layer.weight, gain, generator=generator)
            nn.init.zeros_(layer.bias)
    if mlp.log_std is not None:
        nn.init.zeros_(mlp.log_std)  # detail 24
    return mlp.to(getattr(torch, spec.dtype))


class Residuals(NamedTuple):
    """Inputs of each trunk's linear layers in one forward pass."""

    policy: list[Tensor]
    value: list[Tensor]


class HandwrittenMLP:
    """Train with a hand-written gradient: equal to that of autograd at half the cost, which is mostly bookkeeping."""

    def __init__(self, mlp: MLP, zeros_like: Callable[[Tensor], Tensor] | None = None) -> None:
        self.parameters = FlatParameters(mlp.ordered_parameters(), zeros_like)
        self._mlp = mlp
        self._policy, self._value = list(mlp.policy), list(mlp.value)
        self._outputs = mlp.spec.policy_outputs
        self._tanh = mlp.spec.activation == "tanh"
        self._space = _Workspace()

    @torch.no_grad()
    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor, Residuals]:
        """Return head [rows, H], values [rows] and the layers' inputs; the next call overwrites all of them."""
        flat = obs if obs.dim() == 2 else obs.reshape(len(obs), -1)
        head, policy = self._through("policy", self._policy, flat)
        values, value = self._through("value", self._value, flat)
        log_std = self._mlp.log_std
        if log_std is not None:
            whole = self._space.take("head", head, self._outputs + len(log_std))
            whole[:, : self._outputs] = head
            whole[:, self._outputs :] = log_std
            head = whole
        return head, values.squeeze(1), Residuals(policy, value)

    @torch.no_grad()
    def backward(self, residuals: Residuals, by_head: Tensor, by_values: Tensor, *, accumulate: bool) -> None:
        """Compute the gradient of every parameter from those of head [rows, H] and values [rows]."""
        log_std = self._mlp.log_std
        self._back(self._policy, residuals.policy, by_head[:, : self._outputs], accumulate)
        self._back(self._value, residuals.value, by_values.unsqueeze(1), accumulate)
        if log_std is not None:
            _sum_rows(by_head[:, self._outputs :], log_std, accumulate)

    def _through(self, name: str, layers: list[nn.Module], x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return a trunk's output and the inputs of its linear layers."""
        inputs: list[Tensor] = []
        for layer in layers:
            if isinstance(layer, nn.Linear):
                inputs.append(x)
                space = self._space.take((name, len(inputs)), x, layer.out_features)
                x = torch.addmm(layer.bias, x, layer.weight.t(), out=space)
            else:
                x = x.tanh_() if self._tanh else x.relu_()
        return x, inputs

    def _back(self, layers: list[nn.Module], inputs: list[Tensor], by_output: Tensor, accumulate: bool) -> None:
        """Backpropagate through a trunk, from the last linear layer y = W x + b to the first.

        dL/dW = dL/dy^T x        dL/db = sum(dL/dy)        dL/dx = dL/dy W
        x = tanh(z): dL/dz = dL/dx (1 - x^2)        x = relu(z): dL/dz = dL/dx where x > 0
        """
        linears = [layer for layer in layers if isinstance(layer, nn.Linear)]
        turn = "odd"
        for layer, x in zip(reversed(linears), reversed(inputs), strict=True):
            assert layer.weight.grad is not None
            layer.weight.grad.addmm_(by_output.t(), x, beta=int(accumulate))  # beta=0 does not read the old contents
            _sum_rows(by_output, layer.bias, accumulate)
            if layer is not linears[0]:
                # Two buffers in turn: one is read while the other is written.
                turn = "even" if turn == "odd" else "odd"
                by_input = torch.mm(by_output, layer.weight, out=self._space.take(turn, x, layer.in_features))
                if self._tanh:
                    by_output = by_input.addcmul_(by_input, x.square_(), value=-1)
                else:
                    by_output = by_input.mul_(x > 0)


def _sum_rows(by_rows: Tensor, parameter: nn.Parameter, accumulate: bool) -> None:
    """Store the sum over rows [rows, n] as the gradient of `parameter` [n], or add it to the stored one."""
    assert parameter.grad is not None
    if accumulate:
        parameter.grad += by_rows.sum(dim=0)
    else:
        torch.sum(by_rows, dim=0, out=parameter.grad)


def _linears(trunk: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in trunk if isinstance(layer, nn.Linear)]


class _Workspace:
    """Buffers that all minibatches share.

    With wide layers, buffers allocated for each minibatch would be returned to the system and mapped again page by
    page, which costs time.
    """

    def __init__(self) -> None:
        self._by_rows: dict[int, dict[Hashable, Tensor]] = {}

    def take(self, use: Hashable, like: Tensor, columns: int) -> Tensor:
        """Return a buffer [rows of `like`, `columns`] of its dtype, uninitialised; the same one for the same `use`."""
        rows = len(like)
        if rows not in self._by_rows:
            if len(self._by_rows) == 2:  # minibatches have at most two sizes, which differ by one row
                self._by_rows.clear()
            self._by_rows[rows] = {}
        spaces = self._by_rows[rows]
        space = spaces.get((use, columns))
        if space is None:
            space = spaces[use, columns] = like.new_empty((rows, columns))
        return space
