"""Modes of torch, which code of users in this process may have changed: set for a while, and restored."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch


def _precision() -> str:
    """Return the precision of float32 products; "" if it was set for one backend alone, for which torch has no name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


MODES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype),
    # A context of autocast around the bfloat16 context would keep the weights that the first minibatch has cast.
    "autocast": (
        partial(torch.is_autocast_enabled, "cpu"),
        partial(torch.set_autocast_enabled, "cpu"),
    ),
    "onednn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "deterministic": (
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1]),
    ),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "precision": (_precision, lambda name: torch.set_float32_matmul_precision(name or "highest")),
}
"""How to get each mode, and how to set it."""


@contextmanager
def modes(**values: Any) -> Iterator[None]:
    """Set modes, and restore what they were before.

    Only those that change are set: torch imports its compiler for deterministic algorithms, which takes two seconds.
    """
    before = {name: MODES[name][0]() for name in values}
    try:
        _put(values)
        yield
    finally:
        _put(before)


def _put(values: dict[str, Any]) -> None:
    for name, value in values.items():
        get, put = MODES[name]
        if get() != value:
            put(value)


@contextmanager
def torch_as_usual() -> Iterator[None]:
    """Context in which torch takes gradients, in float32, with oneDNN: whatever code of a user has set meanwhile."""
    with (
        torch.inference_mode(mode=False),
        torch.enable_grad(),
        modes(dtype=torch.float32, autocast=False, onednn=True, deterministic=(False, False)),
    ):
        yield


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Make `dtype` the default of new tensors, and the CPU their device; oneDNN is on, autocast and inference mode off.

    An actor enters this context in each step, so the context does nothing if all modes have these values already.
    """
    # A default device is an entry of this stack. Asking torch for the device itself would take 3 us.
    has_default_device = torch._C._len_torch_function_stack() > 0
    if (
        has_default_device
        or not torch._C._get_mkldnn_enabled()
        or torch.is_autocast_enabled("cpu")
        or torch.is_inference_mode_enabled()
    ):
        return _defaults(dtype)
    return nullcontext() if torch.get_default_dtype() == dtype else modes(dtype=dtype)


@contextmanager
def _defaults(dtype: torch.dtype) -> Iterator[None]:
    with (
        torch.inference_mode(mode=False),
        torch.device("cpu"),
        modes(dtype=dtype, autocast=False, onednn=True),
    ):
        yield


def exact_on(num_threads: int) -> AbstractContextManager[None]:
    """Use `num_threads` threads for operations of this thread, and float32 products of full precision."""
    if torch.get_num_threads() == num_threads and _precision() == "highest":
        return nullcontext()
    return modes(threads=num_threads, precision="highest")


def autocast_dtype_on(device: torch.device) -> torch.dtype | None:
    """Return the precision in which layers run on `device` under autocast; None without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
