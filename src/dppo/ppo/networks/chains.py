"""Chains: the layers of an MLP as one step, in actors and for autograd.

Torch spends more time between the small layers of a network of a user than in them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from dppo.ppo.networks.products import affine, alike, layer_forward, product, views_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
Layers = list[tuple[nn.Linear, type[nn.Module] | None]]  # each with the activation behind it
# In place, on an array: NumPy's tanh takes a third of the time of torch's. And the gradient by that of the output, and
# by the output.
ACTIVATIONS: dict[Any, tuple[Callable[..., np.ndarray], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.Tanh: (np.tanh, torch.ops.aten.tanh_backward),
    nn.ReLU: (partial(np.maximum, 0), partial(torch.ops.aten.threshold_backward, threshold=0)),
}


def use_in(module: nn.Module) -> None:
    """Let the linear layers of `module` compute with `products`; subclasses keep a `forward` of their own."""
    for part in module.modules():
        if (forward := forward_of(part)) is not None:
            part.__dict__["forward"] = forward


def forward_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    """Return a forward pass with the products of `ppo.networks.products`, to be used in place of the module's own.

    None if the module has a forward pass of its own, or is no linear layer and no chain of them.
    """
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return partial(layer_forward, module)
    if type(module) is not nn.Sequential:
        return None
    layers: Layers = []
    for part in module:
        if any(getattr(part, hooks) for hooks in HOOKS):
            return None
        if type(part) is nn.Linear and part.bias is not None:
            layers.append((part, None))
        elif type(part) in ACTIVATIONS and layers and layers[-1][1] is None:
            layers[-1] = (layers[-1][0], type(part))
        else:
            return None
    return _Chain(module, layers) if layers else None


class _Chain:
    """The forward pass of an `nn.Sequential` of linear layers and activations."""

    def __init__(self, module: nn.Sequential, layers: Layers) -> None:
        self._module, self.layers = module, layers
        self._parameters = [one for layer, _ in layers for one in (layer.weight, layer.bias)]

    def __call__(self, inputs: Tensor) -> Tensor:
        if inputs.dim() != 2 or not alike(inputs, self._parameters[0]):
            return nn.Sequential.forward(self._module, inputs)  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled():
            for parameter in (inputs, *self._parameters):
                if parameter.requires_grad:
                    return _ChainFunction.apply(inputs, self, *self._parameters)  # type: ignore[no-untyped-call]
        return torch.from_numpy(self.outputs(inputs)[-1])

    def outputs(self, inputs: Tensor) -> list[np.ndarray]:
        """Return the outputs of all layers, behind the inputs."""
        rows = inputs.numpy(force=True)
        outputs = [rows]
        for layer, activation in self.layers:
            weights, bias = views_of(layer)
            rows = affine(rows, weights.T, bias)
            if activation is not None:
                ACTIVATIONS[activation][0](rows, out=rows)
            outputs.append(rows)
        return outputs

    def differentiable(self, inputs: Tensor, parameters: Sequence[Tensor]) -> Tensor:
        """Return the outputs of the last layer by torch's operations."""
        for (_, activation), weight, bias in zip(self.layers, parameters[::2], parameters[1::2], strict=True):
            inputs = F.linear(inputs, weight, bias)
            inputs = inputs if activation is None else activation()(inputs)
        return inputs


class _ChainFunction(Function):
    """Backpropagation through a chain: dL/dx = dL/dy W, dL/dW = (dL/dy)^T x, dL/db = sum(dL/dy) in each layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: _Chain, *parameters: Tensor) -> Tensor:
        ctx.chain, ctx.outputs = chain, chain.outputs(x)
        last = torch.from_numpy(ctx.outputs[-1])
        if chain.layers[-1][1] is None:
            ctx.save_for_backward(x, *parameters)
        else:
            ctx.save_for_backward(x, *parameters, last)
        return last

    @staticmethod
    def backward(ctx: Any, by_y: Tensor) -> Any:
        chain, outputs, needs = ctx.chain, ctx.outputs, ctx.needs_input_grad
        x, *parameters = ctx.saved_tensors[: len(needs) - 1]  # raises if one has been modified since
        if torch.is_grad_enabled():  # a network of a user takes the gradient of a gradient
            y = chain.differentiable(x, parameters)
            wanted = [one for one, need in zip((x, *parameters), (needs[0], *needs[2:]), strict=True) if need]
            found = iter(torch.autograd.grad(y, wanted, by_y, create_graph=True))
            by_x, *grads = (next(found) if need else None for need in (needs[0], *needs[2:]))
            return by_x, None, *grads
        gradients: list[Tensor] = []
        for number in reversed(range(len(chain.layers))):
            layer, activation = chain.layers[number]
            if activation is not None:
                by_y = ACTIVATIONS[activation][1](by_y, torch.from_numpy(outputs[number + 1]))
            rows = by_y.numpy()
            gradients[:0] = torch.from_numpy(product(rows.T, outputs[number])), by_y.sum(dim=0)
            if number or needs[0]:
                by_y = torch.from_numpy(product(rows, views_of(layer)[0]))
        return by_y if needs[0] else None, None, *gradients
