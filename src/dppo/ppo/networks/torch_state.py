"""Context managers for process-wide settings of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make `dtype` the default of new tensors, whatever an environment in this process has set."""
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def exact_on(threads: int) -> Iterator[None]:
    """Use so many threads in the calling thread, and full float32 products, whatever an environment has set."""
    threads_before, precision_before = torch.get_num_threads(), matmul_precision()
    if threads_before != threads:
        torch.set_num_threads(threads)
    if precision_before != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:  # an environment in this process must compute as it would in one of its own
        if threads_before != threads:
            torch.set_num_threads(threads_before)
        if precision_before not in ("highest", None):
            torch.set_float32_matmul_precision(precision_before)


def matmul_precision() -> str | None:
    """Return torch's precision of float32 products; None if it was set for one backend alone, and has no name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
