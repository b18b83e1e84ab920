"""The default network with a gradient written by hand."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from dppo.ppo.kernels.products import multiply, tanh_
from dppo.ppo.networks.mlp import MLP
from dppo.ppo.networks.network import LearningNetwork
from dppo.ppo.networks.parameters import FlatParameters, ZerosLike


class HandwrittenMLP(LearningNetwork):
    """Train an `MLP` with a hand-written gradient.

    The gradient equals that of autograd, with which an update takes twice the time, most of it for bookkeeping.
    """

    def __init__(
        self, mlp: MLP, zeros_like: ZerosLike | None = None, *, values: bool = True
    ) -> None:
        """Train the parameters of `mlp`; `zeros_like` allocates the vector of gradients, as in `FlatParameters`.

        Without `values`, these are zero, and the parameters of their trunk have the gradient zero.
        """
        trunks = (mlp.policy, mlp.value)
        parameters = [parameter for trunk in trunks for parameter in trunk.parameters()]
        if mlp.log_std is not None:
            parameters.append(mlp.log_std)
        self.parameters = FlatParameters(parameters, zeros_like)
        self._trunks = [
            [_Layer.of(part) for part in trunk if isinstance(part, nn.Linear)]
            for trunk in (trunks if values else trunks[:1])
        ]
        self._log_std: Tensor | None = None
        self._grad_log_std: Tensor | None = None
        if mlp.log_std is not None:
            self._log_std = mlp.log_std.detach()
            self._grad_log_std = mlp.log_std.grad
        # Number of columns of the head that depend on the observation: the outputs of the policy's last layer. The
        # columns of log_std follow them.
        policy_layers = self._trunks[0]
        self._bound_size = len(policy_layers[-1].bias)
        self._is_tanh = any(isinstance(part, nn.Tanh) for part in mlp.policy)
        # One workspace for each size of minibatches; they have at most two sizes.
        self._workspace = lru_cache(maxsize=2)(self._new_workspace)

    @override
    def forward(self, obs: Tensor, recurrent: None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return head [rows, H], values [rows] and the flat observations; the next call overwrites head and values."""
        rows = obs.reshape(len(obs), -1)
        workspace = self._workspace(len(rows))
        for layers, outputs in zip(self._trunks, workspace.outputs, strict=True):
            x = rows
            for layer, output in zip(layers, outputs, strict=True):
                x = multiply(x, layer.transposed, output).add_(layer.bias)
                if layer is layers[-1]:
                    break
                if self._is_tanh:
                    tanh_(x)
                else:
                    x.relu_()
        if self._log_std is not None:
            workspace.head[:, self._bound_size :].copy_(self._log_std)
        return workspace.head, workspace.values, rows

    @override
    def backward(self, residuals: Tensor, grad_head: Tensor, grad_values: Tensor) -> None:
        workspace = self._workspace(len(residuals))
        grad_outputs = (grad_head[:, : self._bound_size], grad_values.unsqueeze(1))
        for layers, outputs, grad_output in zip(
            self._trunks, workspace.outputs, grad_outputs[: len(self._trunks)], strict=True
        ):
            self._backpropagate(layers, [residuals, *outputs[:-1]], workspace, grad_output)
        if self._grad_log_std is not None:
            torch.sum(grad_head[:, self._bound_size :], dim=0, out=self._grad_log_std)

    def _backpropagate(
        self, layers: list[_Layer], inputs: list[Tensor], workspace: _Workspace, grad_output: Tensor
    ) -> None:
        """Store the gradients of a trunk, from the last linear layer y = W x + b to the first.

        dL/dW = dL/dy^T x        dL/db = sum(dL/dy)        dL/dx = dL/dy W
        x = tanh(z): dL/dz = dL/dx (1 - x^2)        x = relu(z): dL/dz = dL/dx where x > 0
        """
        for number in reversed(range(len(layers))):
            layer = layers[number]
            x = inputs[number]
            multiply(grad_output.t(), x, layer.grad_weight)
            torch.sum(grad_output, dim=0, out=layer.grad_bias)
            if number == 0:
                break
            grad_input = multiply(grad_output, layer.weight, workspace.grad_hidden[number - 1])
            if self._is_tanh:
                grad_output = grad_input.addcmul_(grad_input, x.square_(), value=-1)
            else:
                grad_output = grad_input.mul_(x > 0)

    def _new_workspace(self, num_rows: int) -> _Workspace:
        like = self.parameters.gradient
        head_size = self._bound_size + (0 if self._log_std is None else len(self._log_std))
        head = like.new_empty((num_rows, head_size))
        outputs = [
            [like.new_empty((num_rows, len(layer.bias))) for layer in layers]
            for layers in self._trunks
        ]
        outputs[0][-1] = head[:, : self._bound_size]
        values = like.new_zeros(num_rows)
        if len(outputs) > 1:
            values = outputs[1][-1].squeeze(1)
        grad_hidden = [
            like.new_empty((num_rows, layer.weight.shape[1])) for layer in self._trunks[0][1:]
        ]
        return _Workspace(head, values, outputs, grad_hidden)


class _Layer(NamedTuple):
    """A linear layer's parameters and their gradients, as views that autograd does not record."""

    weight: Tensor
    """[outputs, inputs]"""
    transposed: Tensor
    bias: Tensor
    grad_weight: Tensor
    grad_bias: Tensor

    @staticmethod
    def of(layer: nn.Linear) -> _Layer:
        assert layer.weight.grad is not None, "FlatParameters have made the gradients"
        assert layer.bias.grad is not None
        weight = layer.weight.detach()
        return _Layer(weight, weight.t(), layer.bias.detach(), layer.weight.grad, layer.bias.grad)


class _Workspace(NamedTuple):
    """Buffers for minibatches of one size.

    If buffers were allocated for each minibatch, those of wide layers would return to the system each time, which then
    maps them again page by page.
    """

    head: Tensor
    """[rows, H]; its last columns are `log_std`, the same for all rows."""
    values: Tensor
    """[rows]"""
    outputs: list[list[Tensor]]
    """Outputs of each linear layer of policy and value; the activation overwrites them."""
    grad_hidden: list[Tensor]
    """The loss's gradient with respect to the inputs of each linear layer but the first, of one trunk at a time."""
