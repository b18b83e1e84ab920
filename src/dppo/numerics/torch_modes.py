"""Set modes of torch for a while, and restore them: a user's code in this process may have changed them."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import RLock
from typing import Any, NamedTuple

import torch


class _Mode(NamedTuple):
    """A mode of torch."""

    get: Callable[[], Any]
    put: Callable[[Any], object]


def _precision() -> str:
    """Return the precision of float32 products; "" if it was set for one backend alone, for which torch has no name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return ""


def _determinism() -> tuple[bool, bool]:
    """Return whether torch uses deterministic algorithms alone, and whether it only warns of others."""
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _put_determinism(mode: tuple[bool, bool]) -> None:
    enabled, warn_only = mode
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def _put_precision(name: str) -> None:
    torch.set_float32_matmul_precision(name or "highest")


MODES = {
    "dtype": _Mode(torch.get_default_dtype, torch.set_default_dtype),
    # A context of autocast around the bfloat16 context would keep the weights that the first minibatch has cast.
    "autocast": _Mode(
        partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")
    ),
    "onednn": _Mode(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    "deterministic": _Mode(_determinism, _put_determinism),
    "threads": _Mode(torch.get_num_threads, torch.set_num_threads),
    "precision": _Mode(_precision, _put_precision),
}


class _Turn:
    """The right to change modes: other threads of samplers would find, and restore, those of the thread that has it."""

    def __init__(self) -> None:
        self.lock = RLock()
        self.num_contexts = 0  # that the thread with the lock has entered


_turn = _Turn()


@contextmanager
def in_turn(**values: Any) -> Iterator[None]:
    """Set modes as `modes` does, in one thread at a time: most of them belong to the whole process."""
    with _turn.lock:
        _turn.num_contexts += 1
        try:
            with modes(**values):
                yield
        finally:
            _turn.num_contexts -= 1


@contextmanager
def modes(**values: Any) -> Iterator[None]:
    """Set modes, and restore what they were before.

    Only those that change are set: torch imports its compiler for deterministic algorithms, which takes two seconds.
    """
    saved_values = {name: MODES[name].get() for name in values}
    try:
        for name, value in values.items():
            if saved_values[name] != value:
                MODES[name].put(value)
        yield
    finally:
        for name, value in saved_values.items():
            if MODES[name].get() != value:
                MODES[name].put(value)


@contextmanager
def torch_as_usual() -> Iterator[None]:
    """Context in which torch takes gradients, in float32, with oneDNN, even if user code has changed these modes."""
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
    if torch.get_default_dtype() == dtype and not _turn.num_contexts:
        return nullcontext()
    return in_turn(dtype=dtype)


@contextmanager
def _defaults(dtype: torch.dtype) -> Iterator[None]:
    with (
        torch.inference_mode(mode=False),
        torch.device("cpu"),
        in_turn(dtype=dtype, autocast=False, onednn=True),
    ):
        yield


def exact_on(num_threads: int) -> AbstractContextManager[None]:
    """Use `num_threads` threads for operations of this thread, and float32 products of full precision."""
    if _turn.num_contexts or _precision() != "highest":
        return in_turn(threads=num_threads, precision="highest")
    if torch.get_num_threads() == num_threads:
        return nullcontext()
    return modes(threads=num_threads)


def autocast_dtype_on(device: torch.device) -> torch.dtype | None:
    """Return the precision in which layers run on `device` under autocast; None without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
