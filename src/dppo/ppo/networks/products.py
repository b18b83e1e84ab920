"""Matrix products of torch tensors by NumPy's BLAS.

torch's MKL chooses its order of sums by the vendor of the CPU, unless it is limited to SSE2, which takes two to three
times as long. NumPy's OpenBLAS computes the same bits on every CPU with AVX2 that it is asked to treat as a Haswell
(see `dppo.numerics`), in the time of MKL.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write the product of `a` [n, k] and `b` [k, m] into `out` [n, m], and return it; no gradient follows it."""
    if not out.is_cpu:
        return torch.mm(a, b, out=out)
    if out.is_contiguous():
        np.dot(a.numpy(), b.numpy(), out.numpy())
        return out
    return out.copy_(torch.from_numpy(np.dot(a.numpy(), b.numpy())))


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs [..., k] times weight [m, k] transposed, plus bias [m]; differentiable, as `F.linear`."""
    alike = inputs.is_cpu and inputs.dtype == weight.dtype in (torch.float32, torch.float64)
    if not alike or torch.is_autocast_enabled("cpu"):
        return F.linear(inputs, weight, bias)
    rows = inputs.reshape(-1, inputs.shape[-1])
    if weight.requires_grad or rows.requires_grad:
        product: Tensor = _Product.apply(rows, weight)  # type: ignore[no-untyped-call]
    else:
        product = multiply(rows, weight.t(), rows.new_empty((len(rows), len(weight))))
    if bias is not None:
        product += bias
    return product.view(*inputs.shape[:-1], len(weight))


class _Product(Function):
    """y = x W^T: dL/dx = dL/dy W, dL/dW = (dL/dy)^T x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return multiply(x, weight.t(), x.new_empty((len(x), len(weight))))

    @staticmethod
    def backward(ctx: Any, by_y: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        by_x, by_weight = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a network of a user takes the gradient of a gradient
            return by_y @ weight, by_y.t() @ x
        return (
            multiply(by_y, weight, torch.empty_like(x)) if by_x else None,
            multiply(by_y.t(), x, torch.empty_like(weight)) if by_weight else None,
        )


def layer_forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Compute a linear layer with `linear`, in place of `nn.Linear.forward`."""
    return linear(inputs, layer.weight, layer.bias)


def use_in(module: nn.Module) -> None:
    """Let the linear layers of `module` compute with `linear`; subclasses keep a `forward` of their own."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            layer.__dict__["forward"] = partial(layer_forward, layer)
