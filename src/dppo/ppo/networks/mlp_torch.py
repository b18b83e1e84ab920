"""The default network in torch, with a gradient written by hand."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.network import LearningNetwork
from dppo.ppo.networks.parameters import FlatParameters, ZerosLike
from dppo.ppo.networks.products import multiply, tanh_


def initial_weights(spec: BuiltInSpec, seed: int) -> dict[str, Tensor]:
    """Return orthogonal weights drawn from `seed` alone, and zeros for biases and `log_std` (details 2 and 24).

    The weights are drawn in float32 for every dtype. torch's global generator is neither used nor changed.
    """
    generator, last = torch.Generator().manual_seed(seed), 2 * len(spec.layers.hidden_sizes)
    gains = {f"policy.{last}.weight": 0.01, f"value.{last}.weight": 1.0}
    named = {name: torch.zeros(shape, dtype=torch.float32) for name, shape in spec.shapes.items()}
    for name, parameter in named.items():
        if name.endswith("weight"):
            nn.init.orthogonal_(parameter, gains.get(name, math.sqrt(2)), generator=generator)
    return {name: parameter.to(getattr(torch, spec.dtype)) for name, parameter in named.items()}


class _Layer(NamedTuple):
    """A linear layer's parameters and their gradients, as plain tensors: views without a graph."""

    weight: Tensor
    """[outputs, inputs]"""
    transposed: Tensor
    bias: Tensor
    by_weight: Tensor
    by_bias: Tensor

    @staticmethod
    def of(named: dict[str, nn.Parameter], layer: str) -> _Layer:
        weight, bias = named[f"{layer}.weight"], named[f"{layer}.bias"]
        assert weight.grad is not None
        assert bias.grad is not None
        return _Layer(weight.detach(), weight.detach().t(), bias.detach(), weight.grad, bias.grad)


class HandwrittenMLP(LearningNetwork):
    """Train with a hand-written gradient: equal to that of autograd at half the cost, which is mostly bookkeeping."""

    def __init__(
        self, spec: BuiltInSpec, seed: int, *, device: str = "cpu", zeros_like: ZerosLike | None = None
    ) -> None:
        """Draw the initial weights from `seed`; arguments as those of `learning_network`."""
        named = {name: nn.Parameter(weights.to(device)) for name, weights in initial_weights(spec, seed).items()}
        self.parameters = FlatParameters(named.values(), zeros_like)
        numbers = range(0, 2 * len(spec.layers.hidden_sizes) + 1, 2)
        self._trunks = [[_Layer.of(named, f"{trunk}.{number}") for number in numbers] for trunk in ("policy", "value")]
        free = named.get("log_std")
        self._free = None if free is None else free.detach()
        self._by_free = None if free is None else free.grad
        self._outputs = spec.distribution.head_size - spec.distribution.free_size
        self._tanh = spec.layers.activation == "tanh"
        buffers = partial(_Workspace, self.parameters.gradient, self._trunks, self._free)
        self._workspace = lru_cache(maxsize=2)(buffers)  # minibatches have at most two sizes, which differ by one row

    @override
    def forward(self, obs: Tensor, recurrent: None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return head [rows, H], values [rows] and the flat observations; the next call overwrites head and values."""
        flat = obs if obs.dim() == 2 else obs.reshape(len(obs), -1)
        space = self._workspace(len(flat))
        for layers, outputs in zip(self._trunks, space.outputs, strict=True):
            x = flat
            for layer, output in zip(layers, outputs, strict=True):
                x = multiply(x, layer.transposed, output).add_(layer.bias)
                if layer is not layers[-1]:
                    x = tanh_(x) if self._tanh else x.relu_()
        if self._free is not None:
            space.free.copy_(self._free)
        return space.head, space.values, flat

    @override
    def backward(self, residuals: Tensor, by_head: Tensor, by_values: Tensor) -> None:
        space = self._workspace(len(residuals))
        by_outputs = by_head[:, : self._outputs], by_values.unsqueeze(1)
        for layers, outputs, by_output in zip(self._trunks, space.outputs, by_outputs, strict=True):
            self._back(layers, [residuals, *outputs[:-1]], space.by_hidden, by_output)
        if self._by_free is not None:
            torch.sum(by_head[:, self._outputs :], dim=0, out=self._by_free)

    def _back(self, layers: list[_Layer], inputs: list[Tensor], by_hidden: list[Tensor], by_output: Tensor) -> None:
        """Backpropagate through a trunk, from the last linear layer y = W x + b to the first.

        dL/dW = dL/dy^T x        dL/db = sum(dL/dy)        dL/dx = dL/dy W
        x = tanh(z): dL/dz = dL/dx (1 - x^2)        x = relu(z): dL/dz = dL/dx where x > 0
        """
        for number in reversed(range(len(layers))):
            layer, x = layers[number], inputs[number]
            multiply(by_output.t(), x, layer.by_weight)
            torch.sum(by_output, dim=0, out=layer.by_bias)
            if number:
                by_input = multiply(by_output, layer.weight, by_hidden[number - 1])
                if self._tanh:
                    by_output = by_input.addcmul_(by_input, x.square_(), value=-1)
                else:
                    by_output = by_input.mul_(x > 0)


class _Workspace:
    """Buffers for minibatches of one size.

    Buffers of wide layers that are allocated for each minibatch are returned to the system and mapped again by page.
    """

    def __init__(self, like: Tensor, trunks: list[list[_Layer]], free: Tensor | None, rows: int) -> None:
        bound = len(trunks[0][-1].bias)
        self.head = like.new_empty((rows, bound + (0 if free is None else len(free))))
        self.free = self.head[:, bound:]
        """The part of the head that is the same for all observations."""
        self.outputs = [[like.new_empty((rows, len(layer.bias))) for layer in layers] for layers in trunks]
        """Of each linear layer of policy and value; its activation overwrites it."""
        self.outputs[0][-1], self.values = self.head[:, :bound], self.outputs[1][-1].squeeze(1)
        self.by_hidden = [like.new_empty((rows, layer.weight.shape[1])) for layer in trunks[0][1:]]
        """The loss's gradient of the input of each linear layer but the first; of one trunk at a time."""
