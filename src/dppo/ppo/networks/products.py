"""Matrix products of torch tensors by NumPy's BLAS.

torch's MKL chooses its order of sums by the vendor of the CPU, unless it is limited to SSE2, which takes two to three
times as long. NumPy's OpenBLAS computes the same bits on every CPU with AVX2 that it is asked to treat as a Haswell
(see `dppo.numerics`), in the time of MKL.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

WORTH_SHARING = 10**7  # multiplications, which take a thread a third of a millisecond; handing them over takes 0.05 ms
FEW = 256  # rows of a step
VIEWS = "_views_of_weights"  # attribute of a layer: address of the weights; the weights [k, m] and the bias as arrays


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write the product of `a` [n, k] and `b` [k, m] into `out` [n, m], and return it; no gradient follows it."""
    if not out.is_cpu:
        return torch.mm(a, b, out=out)
    if not out.is_contiguous():
        return out.copy_(torch.from_numpy(_product(a.numpy(), b.numpy())))
    _product(a.numpy(), b.numpy(), out.numpy())
    return out


def _product(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return `a` [n, k] times `b` [k, m]; each of torch's threads computes some rows if they are many.

    Threads of OpenBLAS would wait in a busy loop, and so keep those of torch from work.
    """
    threads = 1 if len(a) * b.size < WORTH_SHARING else torch.get_num_threads()
    if threads == 1:
        product: np.ndarray = np.dot(a, b, out)
        return product
    product = np.empty((len(a), b.shape[1]), a.dtype) if out is None else out
    parts = zip(np.array_split(a, threads), np.array_split(product, threads), strict=True)
    for done in [_pool(threads).submit(np.dot, rows, b, part) for rows, part in parts]:
        done.result()
    return product


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs [..., k] times weight [m, k] transposed, plus bias [m]; differentiable, as `F.linear`."""
    if not _alike(inputs, weight):
        return F.linear(inputs, weight, bias)
    rows = inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1])
    if torch.is_grad_enabled() and _learns(rows, weight, bias):
        outputs: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    else:
        outputs = _affine(
            rows.numpy(force=True), weight.numpy(force=True).T, None if bias is None else bias.numpy(force=True)
        )
    return outputs if inputs.dim() == 2 else outputs.view(*inputs.shape[:-1], len(weight))


def _learns(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Return whether a gradient is wanted; of the bias alone where a user has frozen the weights."""
    return weight.requires_grad or inputs.requires_grad or (bias is not None and bias.requires_grad)


def _alike(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether NumPy can multiply these."""
    alike = inputs.is_cpu and inputs.dtype == weight.dtype in (torch.float32, torch.float64)
    return alike and not torch.is_autocast_enabled("cpu")


class _Linear(Function):
    """y = x W^T + b: dL/dx = dL/dy W, dL/dW = (dL/dy)^T x, dL/db = sum(dL/dy)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _affine(x.numpy(), weight.numpy().T, None if bias is None else bias.numpy())

    @staticmethod
    def backward(ctx: Any, by_y: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        by_bias = by_y.sum(dim=0) if of_bias else None
        if torch.is_grad_enabled():  # a network of a user takes the gradient of a gradient
            return by_y @ weight, by_y.t() @ x, by_bias
        rows = by_y.numpy()
        by_x = _affine(rows, weight.numpy(), None) if of_x else None
        return by_x, _affine(rows.T, x.numpy(), None) if of_weight else None, by_bias


def _affine(a: np.ndarray, b: np.ndarray, plus: np.ndarray | None) -> Tensor:
    """Return a [n, k] times b [k, m], plus a row [m]."""
    product = _product(a, b)
    if plus is not None:
        product += plus
    return torch.from_numpy(product)


def layer_forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Compute a linear layer, in place of `nn.Linear.forward`.

    An actor's step of a few environments keeps views of its weights, because making them takes as long as the product.
    """
    weight: Tensor = layer.weight
    if _learns(inputs, weight, layer.bias) or inputs.dim() != 2 or len(inputs) > FEW or not _alike(inputs, weight):
        return linear(inputs, weight, layer.bias)
    address, transposed, bias = layer.__dict__.get(VIEWS, (0, None, None))
    if address != weight.data_ptr():
        bias = None if layer.bias is None else layer.bias.numpy(force=True)
        transposed = weight.numpy(force=True).T
        layer.__dict__[VIEWS] = weight.data_ptr(), transposed, bias
    return _affine(inputs.numpy(), transposed, bias)


def use_in(module: nn.Module) -> None:
    """Let the linear layers of `module` compute with `linear`; subclasses keep a `forward` of their own."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
            layer.__dict__["forward"] = partial(layer_forward, layer)
