"""Matrix products of torch tensors by NumPy's BLAS.

torch's MKL chooses its order of sums by the vendor of the CPU, unless it is limited to SSE2, which takes two to three
times as long. NumPy's OpenBLAS computes the same bits on every CPU with AVX2 that it is asked to treat as a Haswell
(see `dppo.numerics`), in the time of MKL.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

WORTH_SHARING = 10**7  # multiplications, which take a thread a third of a millisecond; handing them over takes 0.05 ms
VIEWS = "_views_of_weights"  # attribute of a layer: address of the weights; the weights [m, k] and the bias as arrays


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


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return inputs [..., k] times weight [m, k] transposed, plus bias [m]; differentiable, as `F.linear`."""
    if not alike(inputs, weight):
        return F.linear(inputs, weight, bias)
    rows = inputs if inputs.dim() == 2 else inputs.reshape(-1, inputs.shape[-1])
    outputs = _linear(rows, weight, bias, weight.numpy(force=True), None if bias is None else bias.numpy(force=True))
    return outputs if inputs.dim() == 2 else outputs.view(*inputs.shape[:-1], len(weight))


def alike(inputs: Tensor, weight: Tensor) -> bool:
    """Return whether NumPy can multiply these."""
    same = inputs.is_cpu and inputs.dtype == weight.dtype in (torch.float32, torch.float64)
    return same and not torch.is_autocast_enabled("cpu")


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, w: np.ndarray, b: np.ndarray | None) -> Tensor:
    """Return x [n, k] times weight [m, k] transposed, plus bias; `w` and `b` are these weights and this bias."""
    if torch.is_grad_enabled() and (
        # the bias alone learns where a user has frozen the weights
        weight.requires_grad or x.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _Linear.apply(x, weight, bias, w, b)  # type: ignore[no-untyped-call]
    return torch.from_numpy(affine(x.numpy(force=True), w.T, b))


class _Linear(Function):
    """y = x W^T + b: dL/dx = dL/dy W, dL/dW = (dL/dy)^T x, dL/db = sum(dL/dy)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, w: np.ndarray, b: np.ndarray | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.arrays = rows, _ = x.numpy(), w
        return torch.from_numpy(affine(rows, w.T, b))

    @staticmethod
    def backward(ctx: Any, by_y: Tensor) -> Any:
        x, weight = ctx.saved_tensors  # raises if one has been modified since
        of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
        by_bias = by_y.sum(dim=0) if of_bias else None
        if torch.is_grad_enabled():  # a network of a user takes the gradient of a gradient
            return by_y @ weight, by_y.t() @ x, by_bias, None, None
        by_rows, (rows, w) = by_y.numpy(), ctx.arrays
        by_x = torch.from_numpy(product(by_rows, w)) if of_x else None
        by_weight = torch.from_numpy(product(by_rows.T, rows)) if of_weight else None
        return by_x, by_weight, by_bias, None, None


def affine(a: np.ndarray, b: np.ndarray, plus: np.ndarray | None) -> np.ndarray:
    """Return a [n, k] times b [k, m], plus a row [m]."""
    sums = product(a, b)
    if plus is not None:
        sums += plus
    return sums


def views_of(layer: nn.Linear) -> tuple[np.ndarray, Any]:
    """Return weights [m, k] and bias [m], or None, as arrays, which the layer keeps.

    Making them takes as long as the product for a step of a few environments.
    """
    own = layer.__dict__
    weight, bias = own["_parameters"]["weight"], own["_parameters"]["bias"]
    address, w, b = own.get(VIEWS, (0, None, None))
    if address != weight.data_ptr():
        w, b = weight.numpy(force=True), None if bias is None else bias.numpy(force=True)
        own[VIEWS] = weight.data_ptr(), w, b
    return w, b


def layer_forward(layer: nn.Linear, inputs: Tensor) -> Tensor:
    """Compute a linear layer, in place of `nn.Linear.forward`."""
    parameters = layer.__dict__["_parameters"]
    weight: Tensor | None = parameters.get("weight")
    if weight is None or inputs.dim() != 2 or not alike(inputs, weight):  # None: torch's parametrizations compute it
        return linear(inputs, layer.weight, layer.bias)
    return _linear(inputs, weight, parameters["bias"], *views_of(layer))
