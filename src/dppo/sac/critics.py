"""Critics: several Q functions side by side, with a gradient written by hand.

Shapes: K critics, rows of a minibatch, A components of an action.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dppo.ppo.kernels.products import MIN_SHARED_WORK, multiply
from dppo.ppo.networks.parameters import FlatParameters, ZerosLike

EPSILON = 1e-5  # epsilon of layer norm
LAST_GAIN = 0.1  # initial values are small, beside targets of about one

_normalize = torch.native_layer_norm
_normalize_backward = torch.ops.aten.native_layer_norm_backward
_silu_backward = torch.ops.aten.silu_backward


class _Layer(NamedTuple):
    """A linear layer of each critic, y = x W + b."""

    weights: Tensor
    """[K, inputs, outputs]"""
    biases: Tensor
    """[K, 1, outputs]"""


class _Hidden(NamedTuple):
    """Results of a hidden layer for its backward pass, each [K, rows, ...]."""

    inputs: Tensor
    sums: Tensor
    normalized: Tensor
    means: Tensor
    inverse_deviations: Tensor


class Residuals(NamedTuple):
    """Results of a forward pass for the backward pass."""

    hidden: list[_Hidden]
    last_inputs: Tensor
    """[K, rows, units]"""


class Critics:
    """K networks that map (normalized observation, action) to a value; each has slowly following targets.

    Each hidden layer is linear, layer norm without parameters, and SiLU. Layer norm keeps the values of unseen actions
    from growing without bound (Ball et al., arXiv:2302.02948, section 4.2).
    """

    def __init__(
        self,
        inputs: int,
        sizes: Sequence[int],
        count: int,
        generator: torch.Generator,
        zeros_like: ZerosLike | None = None,
    ) -> None:
        """Draw the weights from `generator`, in float32 on the CPU; the targets begin equal.

        Args:
            inputs: numbers of an observation and an action together.
            sizes: units of each hidden layer.
            count: K.
        """
        drawn = []
        widths = [inputs, *sizes, 1]
        for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
            gain = LAST_GAIN if number == len(sizes) else math.sqrt(2)
            drawn.append(_orthogonal(count, (fan_in, fan_out), gain, generator))
            drawn.append(torch.zeros(count, 1, fan_out))
        self._shapes = [tensor.shape for tensor in drawn]
        self._zeros_like = zeros_like
        self._use([nn.Parameter(tensor) for tensor in drawn])

    def to(self, device: torch.device, dtype: torch.dtype) -> Critics:
        """Move the critics and their targets; return the critics."""
        weights = self.parameters.weights.detach().to(device, dtype)
        self._use([nn.Parameter(part) for part in self._parts(weights)])
        return self

    def _use(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = FlatParameters(parameters, self._zeros_like)
        self.targets = self.parameters.weights.detach().clone()
        self._layers = self._layers_of(self.parameters.weights.detach())
        self._gradients = self._layers_of(self.parameters.gradient)
        self._target_layers = self._layers_of(self.targets)

    def _parts(self, flat: Tensor) -> list[Tensor]:
        pieces = flat.split([shape.numel() for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def _layers_of(self, flat: Tensor) -> list[_Layer]:
        parts = self._parts(flat)
        return [
            _Layer(weights, biases) for weights, biases in zip(parts[::2], parts[1::2], strict=True)
        ]

    def follow(self, tau: float) -> None:
        """Move the targets by a part `tau` of the way to the critics."""
        self.targets.lerp_(self.parameters.weights.detach(), tau)

    def target_values(self, inputs: Tensor) -> Tensor:
        """Compute the values [K, rows] of the targets."""
        return _forward(self._target_layers, inputs)[0]

    def forward(self, inputs: Tensor) -> tuple[Tensor, Residuals]:
        """Return the values [K, rows] of observations with actions [rows, inputs], and residuals."""
        return _forward(self._layers, inputs)

    def backward(self, residuals: Residuals, grad_values: Tensor) -> None:
        """Store the gradient of the parameters, given that of the values [K, rows].

        dL/dW = x^T dL/dy        dL/db = sum(dL/dy)        dL/dx = dL/dy W^T
        """
        last = self._gradients[-1]
        grad_output = grad_values.unsqueeze(2)
        _multiply_each(residuals.last_inputs.mT, grad_output, last.weights)
        torch.sum(grad_output, dim=1, keepdim=True, out=last.biases)
        grad_units = grad_output * self._layers[-1].weights.mT
        for number in reversed(range(len(residuals.hidden))):
            hidden = residuals.hidden[number]
            grad_sums = _hidden_backward(hidden, grad_units)
            _multiply_each(hidden.inputs.mT, grad_sums, self._gradients[number].weights)
            torch.sum(grad_sums, dim=1, keepdim=True, out=self._gradients[number].biases)
            if number > 0:
                grad_units = self._input_gradients(number, grad_sums)

    def action_gradients(self, residuals: Residuals, grad_values: Tensor, size: int) -> Tensor:
        """Return the gradient with respect to the last `size` inputs [rows, size]; the parameters' stays as it is."""
        grad_units = grad_values.unsqueeze(2) * self._layers[-1].weights.mT
        for number in reversed(range(1, len(residuals.hidden))):
            grad_sums = _hidden_backward(residuals.hidden[number], grad_units)
            grad_units = self._input_gradients(number, grad_sums)
        grad_sums = _hidden_backward(residuals.hidden[0], grad_units)
        weights = self._layers[0].weights[:, -size:].mT
        grad_actions = grad_sums.new_empty((*grad_sums.shape[:2], size))
        return _multiply_each(grad_sums, weights, grad_actions).sum(dim=0)

    def _input_gradients(self, number: int, grad_sums: Tensor) -> Tensor:
        """Compute the gradient of the inputs of a layer from that of its sums."""
        weights = self._layers[number].weights
        grad_inputs = grad_sums.new_empty((*grad_sums.shape[:2], weights.shape[1]))
        return _multiply_each(grad_sums, weights.mT, grad_inputs)


def _forward(layers: list[_Layer], inputs: Tensor) -> tuple[Tensor, Residuals]:
    x = inputs.expand(len(layers[0].weights), -1, -1)
    hidden = []
    for layer in layers[:-1]:
        sums = _affine(layer, x)
        normalized, means, inverse_deviations = _normalize(
            sums, [sums.shape[2]], None, None, EPSILON
        )
        hidden.append(_Hidden(x, sums, normalized, means, inverse_deviations))
        x = F.silu(normalized)
    return _affine(layers[-1], x).squeeze(2), Residuals(hidden, x)


def _hidden_backward(hidden: _Hidden, grad_outputs: Tensor) -> Tensor:
    """Return the gradient of the sums of a hidden layer, given that of its outputs."""
    grad_normalized = _silu_backward(grad_outputs, hidden.normalized)
    grad_sums, _, _ = _normalize_backward(
        grad_normalized,
        hidden.sums,
        [hidden.sums.shape[2]],
        hidden.means,
        hidden.inverse_deviations,
        None,
        None,
        [True, False, False],
    )
    return grad_sums


def _affine(layer: _Layer, x: Tensor) -> Tensor:
    sums = x.new_empty((*x.shape[:2], layer.weights.shape[2]))
    return _multiply_each(x, layer.weights, sums).add_(layer.biases)


def _multiply_each(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write the product of each critic into `out`, and return `out`: by NumPy, see `kernels.products`."""
    if not out.is_cpu:
        return torch.bmm(a, b, out=out)
    if out.numel() * a.shape[2] >= MIN_SHARED_WORK:
        for critic in range(len(out)):
            multiply(a[critic], b[critic], out[critic])
        return out
    np.matmul(a.numpy(), b.numpy(), out.numpy())
    return out


def _orthogonal(
    count: int, shape: tuple[int, int], gain: float, generator: torch.Generator
) -> Tensor:
    weights = torch.empty(count, *shape)
    for matrix in weights:
        nn.init.orthogonal_(matrix, gain, generator=generator)
    return weights
