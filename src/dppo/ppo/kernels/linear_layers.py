"""Linear layers, and chains of them, that multiply by `products`.

A chain, the layers of an MLP as one step, saves the time that torch spends between small layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from dppo.ppo.kernels.products import product

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
VIEWS = "_views_of_weights"
"""Attribute of a layer: the addresses of its parameters, and the `LayerArrays` made from these."""

Forward = Callable[[Tensor], Tensor]
ActivationTypes = Sequence[type[nn.Module] | None]
"""The activation behind each layer of a chain; None without one."""


class LayerArrays(NamedTuple):
    """The parameters of a linear layer as arrays that share its memory."""

    weight: np.ndarray
    """[m, k]"""
    bias: np.ndarray | None
    """[m]"""

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None) -> LayerArrays:
        return LayerArrays(
            weight.numpy(force=True), None if bias is None else bias.numpy(force=True)
        )


class Activation(NamedTuple):
    """An activation function and its derivative."""

    apply: Callable[..., np.ndarray]
    """Called with an array and `out`; NumPy's tanh takes a third of the time of torch's."""
    gradient: Callable[[Tensor, Tensor], Tensor]
    """Gradient of the inputs, given the gradient of the outputs and the outputs."""


ACTIVATIONS: dict[Any, Activation] = {
    nn.Tanh: Activation(np.tanh, torch.ops.aten.tanh_backward),
    nn.ReLU: Activation(
        partial(np.maximum, 0), partial(torch.ops.aten.threshold_backward, threshold=0)
    ),
}


def use_in(module: nn.Module) -> None:
    """Let the linear layers of `module` compute with `product`; subclasses keep a `forward` of their own."""
    for part, forward in forwards_of(module):
        if forward is not None:
            part.__dict__["forward"] = forward


def forwards_of(module: nn.Module) -> list[tuple[nn.Module, Forward | None]]:
    """Return each part of `module` with its `forward_of`, all found before any part is changed: parts may be shared."""
    return [(part, forward_of(part)) for part in module.modules()]


def forward_of(module: nn.Module) -> Forward | None:
    """Return a forward pass that multiplies by `product`, in place of the module's own.

    None if the module has a forward pass of its own, or is neither a linear layer nor a chain of them.
    """
    if "forward" in module.__dict__:  # set by the user
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return partial(layer_forward, module)
    if type(module) is nn.Sequential:
        return _chain_forward_of(module)
    return None


def _chain_forward_of(module: nn.Sequential) -> Forward | None:
    layers: list[nn.Linear] = []
    activations: list[type[nn.Module] | None] = []
    for part in module:
        if "forward" in part.__dict__ or has_hooks(part):
            return None
        if type(part) is nn.Linear and part.bias is not None:
            layers.append(part)
            activations.append(None)
        elif type(part) in ACTIVATIONS and layers and activations[-1] is None:
            activations[-1] = type(part)
        else:
            return None
    if not layers:
        return None
    return partial(_chain_forward, module, layers, activations)


def has_hooks(module: nn.Module) -> bool:
    """Return whether torch calls hooks before or behind the forward pass of `module`."""
    return any(getattr(module, hooks) for hooks in HOOKS)


def layer_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """Compute a linear layer in place of `nn.Linear.forward`; `input` has the same name there."""
    parameters = layer.__dict__["_parameters"]
    weight: Tensor | None = parameters.get("weight")
    is_parametrized = weight is None or "bias" not in parameters  # torch computes them
    if (
        weight is None
        or is_parametrized
        or input.dim() != 2
        or not numpy_can_multiply(input, weight)
    ):
        return linear(input, layer.weight, layer.bias)
    bias: Tensor | None = parameters["bias"]
    return _chain(input, (_arrays_of(layer),), (None,), (weight, bias))


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs [..., k] times weight [m, k] transposed, plus bias [m]; differentiable, as `F.linear`."""
    if not numpy_can_multiply(inputs, weight):
        return F.linear(inputs, weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    outputs = _chain(rows, (LayerArrays.of(weight, bias),), (None,), (weight, bias))
    return outputs.view(*inputs.shape[:-1], len(weight))


def numpy_can_multiply(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether both are on the CPU, of one dtype that NumPy has, and outside of autocast and torch.func."""
    is_plain = inputs.is_cpu and inputs.dtype == weight.dtype in (torch.float32, torch.float64)
    return (
        is_plain
        and not torch.is_autocast_enabled("cpu")
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _chain_forward(
    module: nn.Sequential, layers: list[nn.Linear], activations: ActivationTypes, input: Tensor
) -> Tensor:
    """Compute a sequence of linear layers and activations, in place of `nn.Sequential.forward`."""
    parameters: list[Tensor] = []
    for layer in layers:
        # `torch.func.functional_call` may have replaced them for this call
        layer_parameters = layer.__dict__["_parameters"]
        parameters += [layer_parameters["weight"], layer_parameters["bias"]]
    if input.dim() != 2 or not numpy_can_multiply(input, parameters[0]):
        return nn.Sequential.forward(module, input)  # type: ignore[no-untyped-call]
    return _chain(input, [_arrays_of(layer) for layer in layers], activations, parameters)


def _arrays_of(layer: nn.Linear) -> LayerArrays:
    """Return the parameters of a layer as arrays, which the layer keeps until its parameters move.

    Making them takes as long as the product for a step of a few environments.
    """
    attributes = layer.__dict__
    weight = attributes["_parameters"]["weight"]
    bias = attributes["_parameters"]["bias"]
    address = (weight.data_ptr(), weight.stride(), None if bias is None else bias.data_ptr())
    stored_address, arrays = attributes.get(VIEWS, (None, None))
    if stored_address != address:
        arrays = LayerArrays.of(weight, bias)
        attributes[VIEWS] = address, arrays
    return arrays


def _chain(
    x: Tensor,
    arrays: Sequence[LayerArrays],
    activations: ActivationTypes,
    parameters: Sequence[Tensor | None],
) -> Tensor:
    """Return the outputs of the last layer for `x` [n, k]; `parameters` are weight and bias of each layer."""
    if torch.is_grad_enabled():
        # only the biases learn where a user has frozen the weights
        for tensor in (x, *parameters):
            if tensor is not None and tensor.requires_grad:
                return _Chain.apply(x, arrays, activations, *parameters)  # type: ignore[no-untyped-call]
    return torch.from_numpy(_outputs(x.numpy(force=True), arrays, activations)[-1])


def _outputs(
    rows: np.ndarray, arrays: Sequence[LayerArrays], activations: ActivationTypes
) -> list[np.ndarray]:
    """Return the inputs `rows`, and the outputs of every layer behind its activation."""
    outputs = [rows]
    for layer, activation in zip(arrays, activations, strict=True):
        rows = _affine(rows, layer)
        if activation is not None:
            ACTIVATIONS[activation].apply(rows, out=rows)
        outputs.append(rows)
    return outputs


def _affine(rows: np.ndarray, layer: LayerArrays) -> np.ndarray:
    sums = product(rows, layer.weight.T)
    if layer.bias is not None:
        sums += layer.bias
    return sums


class _Chain(Function):
    """y = activation(x W^T + b), layer by layer.

    With dL/dy before the activation: dL/dW = (dL/dy)^T x, dL/db = sum(dL/dy), dL/dx = dL/dy W.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        arrays: Sequence[LayerArrays],
        activations: ActivationTypes,
        *parameters: Tensor | None,
    ) -> Tensor:
        ctx.arrays = arrays
        ctx.activations = activations
        ctx.biases = parameters[1::2]
        ctx.outputs = _outputs(x.numpy(), arrays, activations)
        y = torch.from_numpy(ctx.outputs[-1])
        ctx.save_for_backward(x, *parameters[::2], None if activations[-1] is None else y)
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> Any:
        x, *weights, _ = ctx.saved_tensors  # raises if one has been modified since
        needs_x, _, _, *needs_parameter = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a user's network takes the gradient of a gradient
            parameters = [
                parameter for pair in zip(weights, ctx.biases, strict=True) for parameter in pair
            ]
            y = _differentiable(x, parameters, ctx.activations)
            grad_x, *gradients = _gradients(
                y, grad_y, [x, *parameters], [needs_x, *needs_parameter]
            )
            return grad_x, None, None, *gradients
        gradients = [None] * len(needs_parameter)
        for number in reversed(range(len(ctx.arrays))):
            activation = ctx.activations[number]
            if activation is not None:
                grad_y = ACTIVATIONS[activation].gradient(
                    grad_y, torch.from_numpy(ctx.outputs[number + 1])
                )
            rows = grad_y.numpy()
            if needs_parameter[2 * number]:
                gradients[2 * number] = torch.from_numpy(product(rows.T, ctx.outputs[number]))
            if needs_parameter[2 * number + 1]:
                gradients[2 * number + 1] = grad_y.sum(dim=0)
            if number > 0 or needs_x:
                grad_y = torch.from_numpy(product(rows, ctx.arrays[number].weight))
        return grad_y if needs_x else None, None, None, *gradients


def _differentiable(
    x: Tensor, parameters: Sequence[Tensor | None], activations: ActivationTypes
) -> Tensor:
    """Compute a chain by torch's operations; `parameters` are weight and bias of each layer."""
    y = x
    for weight, bias, activation in zip(
        parameters[::2], parameters[1::2], activations, strict=True
    ):
        assert weight is not None
        y = F.linear(y, weight, bias)
        if activation is not None:
            y = activation()(y)
    return y


def _gradients(
    y: Tensor, grad_y: Tensor, inputs: Sequence[Tensor | None], needed: Sequence[bool]
) -> list[Tensor | None]:
    """Return the gradient of each input that is needed, with a graph of its own, and None for the others."""
    chosen = [tensor for tensor, is_needed in zip(inputs, needed, strict=True) if is_needed]
    computed = iter(torch.autograd.grad(y, chosen, grad_y, create_graph=True))  # type: ignore[arg-type]
    return [next(computed) if is_needed else None for is_needed in needed]
