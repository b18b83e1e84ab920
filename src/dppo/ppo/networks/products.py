"""Matrix products of torch tensors by NumPy's BLAS; linear layers, and chains of them, that compute with these.

torch's MKL chooses its order of sums by the vendor of the CPU, unless it is limited to SSE2, which takes two to three
times as long. NumPy's OpenBLAS computes the same bits on every CPU with AVX2 that it is asked to treat as a Haswell
(see `dppo.numerics`), in the time of MKL. A chain, the layers of an MLP as one step, saves the time that torch spends
between small layers.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

WORTH_SHARING = 10**7  # multiplications, which take a thread a third of a millisecond; handing them over takes 0.05 ms
VIEWS = "_views_of_weights"  # attribute of a layer: address of the weights; the weights [m, k] and the bias as arrays
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# In place, on an array: NumPy's tanh takes a third of the time of torch's. And the gradient by that of the output, and
# by the output.
ACTIVATIONS: dict[Any, tuple[Callable[..., np.ndarray], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.Tanh: (np.tanh, torch.ops.aten.tanh_backward),
    nn.ReLU: (partial(np.maximum, 0), partial(torch.ops.aten.threshold_backward, threshold=0)),
}
Arrays = Sequence[tuple[np.ndarray, Any]]  # weights [m, k] and bias [m], or None, of each layer
Activations = Sequence[type[nn.Module] | None]  # behind each layer
Forward = Callable[[Tensor], Tensor]


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write the product of `a` [n, k] and `b` [k, m] into `out` [n, m], and return it; no gradient follows it."""
    if not out.is_cpu:
        return torch.mm(a, b, out=out)
    if not out.is_contiguous():
        return out.copy_(torch.from_numpy(product(a.numpy(), b.numpy())))
    product(a.numpy(), b.numpy(), out.numpy())
    return out


def tanh_(x: Tensor) -> Tensor:
    """Write tanh over `x`, in a third of the time of torch's, and return it; no gradient follows it."""
    if not x.is_cpu:
        return x.tanh_()
    array = x.numpy()
    np.tanh(array, out=array)
    return x


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return `a` [n, k] times `b` [k, m]; each of torch's threads computes some rows if they are many.

    Threads of OpenBLAS would wait in a busy loop, and so keep those of torch from work.
    """
    threads = 1 if len(a) * b.size < WORTH_SHARING else torch.get_num_threads()
    if threads == 1:
        return np.dot(a, b, out)
    whole = np.empty((len(a), b.shape[1]), a.dtype) if out is None else out
    parts = zip(np.array_split(a, threads), np.array_split(whole, threads), strict=True)
    for done in [_pool(threads).submit(np.dot, rows, b, part) for rows, part in parts]:
        done.result()
    return whole


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def use_in(module: nn.Module) -> None:
    """Let the linear layers of `module` compute with `product`; subclasses keep a `forward` of their own."""
    for part, forward in forwards_of(module):
        if forward is not None:
            part.__dict__["forward"] = forward


def forwards_of(module: nn.Module) -> list[tuple[nn.Module, Forward | None]]:
    """Return each part of `module`, and its `forward_of` before anything is changed: parts may be shared."""
    return [(part, forward_of(part)) for part in module.modules()]


def forward_of(module: nn.Module) -> Forward | None:
    """Return a forward pass with `product`, to be used in place of the module's own.

    None if the module has a forward pass of its own, or is no linear layer and no chain of them.
    """
    if "forward" in module.__dict__:  # set by the user
        return None
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return partial(layer_forward, module)
    if type(module) is not nn.Sequential:
        return None
    layers: list[nn.Linear] = []
    activations: list[type[nn.Module] | None] = []
    for part in module:
        if "forward" in part.__dict__ or any(getattr(part, hooks) for hooks in HOOKS):
            return None
        if type(part) is nn.Linear and part.bias is not None:
            layers.append(part)
            activations.append(None)
        elif type(part) in ACTIVATIONS and layers and activations[-1] is None:
            activations[-1] = type(part)
        else:
            return None
    return partial(_chain_forward, module, layers, activations) if layers else None


def layer_forward(layer: nn.Linear, input: Tensor) -> Tensor:
    """Compute a linear layer, in place of `nn.Linear.forward`, with its names."""
    parameters = layer.__dict__["_parameters"]
    weight: Tensor | None = parameters.get("weight")
    parametrized = weight is None or "bias" not in parameters  # torch computes them
    if weight is None or parametrized or input.dim() != 2 or not alike(input, weight):
        return linear(input, layer.weight, layer.bias)
    bias, (w, b) = parameters["bias"], _views_of(layer)
    learns = input.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    if learns and torch.is_grad_enabled():
        return _Layers.apply(input, ((w, b),), (None,), weight, bias)  # type: ignore[no-untyped-call]
    return torch.from_numpy(_affine(input.numpy(force=True), w, b))


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs [..., k] times weight [m, k] transposed, plus bias [m]; differentiable, as `F.linear`."""
    if not alike(inputs, weight):
        return F.linear(inputs, weight, bias)
    rows = inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1])
    arrays = weight.numpy(force=True), None if bias is None else bias.numpy(force=True)
    outputs = _forward(rows, (arrays,), (None,), (weight, bias))
    return outputs if inputs.dim() == 2 else outputs.view(*inputs.shape[:-1], len(weight))


def alike(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether NumPy can multiply these."""
    same = inputs.is_cpu and inputs.dtype == weight.dtype in (torch.float32, torch.float64)
    return same and not torch.is_autocast_enabled("cpu") and torch._C._functorch.peek_interpreter_stack() is None


def _chain_forward(module: nn.Sequential, layers: list[nn.Linear], activations: Activations, input: Tensor) -> Tensor:
    """Compute a sequence of linear layers and activations, in place of `nn.Sequential.forward`."""
    owners = [layer.__dict__["_parameters"] for layer in layers]
    parameters = [one for own in owners for one in (own["weight"], own["bias"])]  # of this call
    if input.dim() != 2 or not alike(input, parameters[0]):
        return nn.Sequential.forward(module, input)  # type: ignore[no-untyped-call]
    return _forward(input, [_views_of(layer) for layer in layers], activations, parameters)


def _views_of(layer: nn.Linear) -> tuple[np.ndarray, Any]:
    """Return weights [m, k] and bias [m], or None, as arrays, which the layer keeps.

    Making them takes as long as the product for a step of a few environments.
    """
    own = layer.__dict__
    weight, bias = own["_parameters"]["weight"], own["_parameters"]["bias"]
    addresses, w, b = own.get(VIEWS, (None, None, None))
    found = weight.data_ptr(), weight.stride(), None if bias is None else bias.data_ptr()
    if addresses != found:
        w, b = weight.numpy(force=True), None if bias is None else bias.numpy(force=True)
        own[VIEWS] = found, w, b
    return w, b


def _forward(x: Tensor, arrays: Arrays, activations: Activations, parameters: Sequence[Tensor | None]) -> Tensor:
    """Return the outputs of the last layer for `x` [n, k]; `parameters` are weight and bias of each layer."""
    if torch.is_grad_enabled():
        for one in (x, *parameters):  # the biases alone learn where a user has frozen the weights
            if one is not None and one.requires_grad:
                return _Layers.apply(x, arrays, activations, *parameters)  # type: ignore[no-untyped-call]
    return torch.from_numpy(_outputs(x.numpy(force=True), arrays, activations)[-1])


def _outputs(rows: np.ndarray, arrays: Arrays, activations: Activations) -> list[np.ndarray]:
    """Return the outputs of all layers, behind the inputs `rows`."""
    outputs = [rows]
    for (weight, bias), activation in zip(arrays, activations, strict=True):
        rows = _affine(rows, weight, bias)
        if activation is not None:
            ACTIVATIONS[activation][0](rows, out=rows)
        outputs.append(rows)
    return outputs


def _affine(rows: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Return rows [n, k] times weight [m, k] transposed, plus bias [m]."""
    sums = product(rows, weight.T)
    if bias is not None:
        sums += bias
    return sums


class _Layers(Function):
    """y = x W^T + b in each layer: dL/dx = dL/dy W, dL/dW = (dL/dy)^T x, dL/db = sum(dL/dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, arrays: Arrays, activations: Activations, *parameters: Tensor | None) -> Tensor:
        ctx.arrays, ctx.activations, ctx.biases = arrays, activations, parameters[1::2]
        ctx.outputs = outputs = _outputs(x.numpy(), arrays, activations)
        last = torch.from_numpy(outputs[-1])
        ctx.save_for_backward(x, *parameters[::2], None if activations[-1] is None else last)
        return last

    @staticmethod
    def backward(ctx: Any, by_y: Tensor) -> Any:
        arrays, outputs, (of_x, _, _, *needed) = ctx.arrays, ctx.outputs, ctx.needs_input_grad
        x, *weights, _ = ctx.saved_tensors  # raises if one has been modified since
        gradients: list[Tensor | None] = [None] * len(needed)
        if torch.is_grad_enabled():  # a network of a user takes the gradient of a gradient
            y, parameters = x, [one for pair in zip(weights, ctx.biases, strict=True) for one in pair]
            for weight, bias, activation in zip(weights, ctx.biases, ctx.activations, strict=True):
                y = F.linear(y, weight, bias) if activation is None else activation()(F.linear(y, weight, bias))
            wanted = [one for one, need in zip((x, *parameters), (of_x, *needed), strict=True) if need]
            found = iter(torch.autograd.grad(y, wanted, by_y, create_graph=True))
            by_x, *gradients = (next(found) if need else None for need in (of_x, *needed))
            return by_x, None, None, *gradients
        for number in reversed(range(len(arrays))):
            if (activation := ctx.activations[number]) is not None:
                by_y = ACTIVATIONS[activation][1](by_y, torch.from_numpy(outputs[number + 1]))
            rows = by_y.numpy()
            if needed[2 * number]:
                gradients[2 * number] = torch.from_numpy(product(rows.T, outputs[number]))
            if needed[2 * number + 1]:
                gradients[2 * number + 1] = by_y.sum(dim=0)
            if number or of_x:
                by_y = torch.from_numpy(product(rows, arrays[number][0]))
        return by_y if of_x else None, None, None, *gradients
