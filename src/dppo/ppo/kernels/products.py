"""Matrix products of torch tensors by NumPy's BLAS.

torch's MKL chooses its order of sums by the vendor of the CPU, unless it is limited to SSE2, which takes two to three
times as long. NumPy's OpenBLAS computes the same bits on every CPU with AVX2 that it is asked to treat as a Haswell
(see `dppo.numerics`), in the time of MKL.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

MIN_SHARED_WORK = 10**7
"""Fewest multiplications that are shared among threads.

One thread takes a third of a millisecond for them; handing work over to other threads takes 0.05 ms.
"""


def multiply(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    """Write `a` [n, k] times `b` [k, m] into `out` [n, m], and return `out`; autograd does not record the product."""
    if not out.is_cpu:
        return torch.mm(a, b, out=out)
    if not out.is_contiguous():
        # np.dot writes into contiguous arrays only
        result = product(a.numpy(), b.numpy())
        return out.copy_(torch.from_numpy(result))
    product(a.numpy(), b.numpy(), out.numpy())
    return out


def tanh_(x: Tensor) -> Tensor:
    """Replace `x` by its tanh, in a third of torch's time, and return `x`; autograd does not record the operation."""
    if not x.is_cpu:
        return x.tanh_()
    array = x.numpy()
    np.tanh(array, out=array)
    return x


def product(a: np.ndarray, b: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
    """Return `a` [n, k] times `b` [k, m]; share the rows of a large product among as many threads as torch uses.

    OpenBLAS is not left to do so: its threads would wait in a busy loop, and keep torch's threads from working.
    """
    multiplications = len(a) * b.size
    num_threads = torch.get_num_threads() if multiplications >= MIN_SHARED_WORK else 1
    if num_threads == 1:
        return np.dot(a, b, out)
    return _shared_product(a, b, out, num_threads)


def _shared_product(
    a: np.ndarray, b: np.ndarray, out: np.ndarray | None, num_threads: int
) -> np.ndarray:
    if out is None:
        out = np.empty((len(a), b.shape[1]), a.dtype)
    pool = _thread_pool(num_threads)
    parts = zip(np.array_split(a, num_threads), np.array_split(out, num_threads), strict=True)
    jobs = [pool.submit(np.dot, rows, b, out_rows) for rows, out_rows in parts]
    for job in jobs:
        job.result()
    return out


@cache
def _thread_pool(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads)
