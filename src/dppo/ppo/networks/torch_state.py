"""Context managers for process-wide settings of torch."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Make `dtype` the default of new tensors, whatever an environment in this process has set."""
    return nullcontext() if torch.get_default_dtype() == dtype else _default(dtype)


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def exact_on(threads: int) -> AbstractContextManager[None]:
    """Use so many threads in the calling thread, and full float32 products, whatever an environment has set."""
    undisturbed = torch.get_num_threads() == threads and matmul_precision() == "highest"
    return nullcontext() if undisturbed else _reset_to(threads)


@contextmanager
def _reset_to(threads: int) -> Iterator[None]:
    threads_before, precision_before = torch.get_num_threads(), matmul_precision()
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:  # an environment in this process must compute as it would in one of its own
        torch.set_num_threads(threads_before)
        if precision_before is not None:
            torch.set_float32_matmul_precision(precision_before)


def matmul_precision() -> str | None:
    """Return torch's precision of float32 products; None if it was set for one backend alone, and has no name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None
