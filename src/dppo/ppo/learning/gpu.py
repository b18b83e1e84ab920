"""SGD on a GPU: equal bits in each run, and errors of memory and of the GPU in words."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from dppo.errors import ConfigError, DppoError, GPUFailed, OutOfMemory, in_gigabytes
from dppo.user_code import in_a_line


@dataclass(frozen=True, slots=True)
class UpdateRows:
    """The rows of an update that pass through the network together."""

    at_once: int
    limit: int | None
    """The setting `micro_batch_size`."""
    sequence_length: int


# texts in errors for lack of memory, also on a CPU
NO_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
# beginnings of errors of torch about a GPU
NO_GPU = ("CUDA error", "CUBLAS_STATUS", "CUDNN_STATUS", "cuDNN error")
FEWER = 4  # divisor of the rows at once that is suggested where they do not fit


@contextmanager
def repeatable_on(device: torch.device) -> Iterator[None]:
    """Compute the same bits in each run on a GPU, with full float32 products; nothing changes on a CPU.

    Without it, some operations add in the order in which threads finish, and cuDNN rounds the inputs of float32
    convolutions to 10 bits (TF32). torch warns of an operation, in a network of yours, that has no such order.
    """
    if device.type != "cuda":
        yield
        return
    saved_mode = torch.get_deterministic_debug_mode()
    settings = [
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),
        # each new tensor would be written twice
        (torch.utils.deterministic, "fill_uninitialized_memory", False),
        _tf32_of_convolutions(),
    ]
    values_before = [getattr(place, name) for place, name, _ in settings]
    torch.set_deterministic_debug_mode("warn")
    for place, name, value in settings:
        setattr(place, name, value)
    try:
        # an environment in this process may have left it on
        with torch.autocast("cuda", enabled=False):
            yield
    finally:
        torch.set_deterministic_debug_mode(saved_mode)
        for (place, name, _), value in zip(settings, values_before, strict=True):
            setattr(place, name, value)


def _tf32_of_convolutions() -> tuple[Any, str, Any]:
    """Return where torch keeps whether convolutions round to TF32, and the value for no."""
    if hasattr(torch.backends.cudnn, "conv"):
        return torch.backends.cudnn.conv, "fp32_precision", "ieee"
    return torch.backends.cudnn, "allow_tf32", False  # torch before 2.9


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` is NumPy's or torch's about too little memory, of this machine or of a GPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)


def explained(error: BaseException, device: torch.device, rows: UpdateRows) -> DppoError | None:
    """Return what `error` of an update means, and what to do; None if it is of neither memory nor a GPU."""
    if is_out_of_memory(error):
        return _out_of_memory(device, rows)
    reason = gpu_failure(error)
    if not reason:
        return None
    return GPUFailed(
        f"device=cuda: the GPU failed in an update ({reason}). Resume the run with `device=cpu`, or on another GPU; "
        f"`nvidia-smi` shows the state of this one."
    )


def _out_of_memory(device: torch.device, rows: UpdateRows) -> OutOfMemory:
    where = _describe_memory(device)
    if rows.at_once <= rows.sequence_length:
        return OutOfMemory(
            f"num_steps: a batch does not fit into {where}. Lower `num_steps`, `num_samplers` or the network's layers."
        )
    fewer = max(1, rows.at_once // FEWER)
    limit = "none" if rows.limit is None else rows.limit
    return OutOfMemory(
        f"micro_batch_size={limit}: {rows.at_once:,} rows at once do not fit into {where}. Use "
        f"`micro_batch_size={fewer}`, which sums the gradients of fewer rows at once."
    )


def gpu_failure(error: BaseException) -> str:
    """Return the first line of what CUDA reported; "" if `error` is not of CUDA."""
    reported = isinstance(error, RuntimeError) and any(words in str(error) for words in NO_GPU)
    return str(error).partition("\n")[0] if reported else ""


@contextmanager
def starting_on(device: str, network: str) -> Iterator[None]:
    """Raise ConfigError if `network` cannot be built, or computes nothing, on a GPU; nothing changes on a CPU."""
    if device == "cpu":
        yield
        return
    try:
        # of the first product in a thread of torch's, which means nothing
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Attempting to run cuBLAS")
            yield
    except RuntimeError as error:
        if is_out_of_memory(error):
            where = _describe_memory(torch.device(device))
            raise ConfigError(
                f"device={device}: the network does not fit into {where}. End what else uses it (`nvidia-smi`), or use "
                f"`device=cpu`."
            ) from error
        reason = gpu_failure(error)
        if reason:
            raise ConfigError(
                f"device={device}: the GPU cannot be used ({reason}). Use `device=cpu`."
            ) from error
        raise ConfigError(
            f"model={network}: it works on the CPU, and fails on device={device} ({in_a_line(error)}). Make new "
            f"tensors on the device of the observations (device=obs.device), and constants with register_buffer()."
        ) from error


def _describe_memory(device: torch.device) -> str:
    if device.type != "cuda":
        return "the memory of this machine"
    try:
        name = torch.cuda.get_device_name(device)
        free_bytes, total = torch.cuda.mem_get_info(device)
    except RuntimeError:  # it has failed altogether
        return "the memory of the GPU"
    ours = torch.cuda.memory_reserved(device)
    elsewhere = in_gigabytes(max(0, total - free_bytes - ours))
    return (
        f"the memory of the GPU ({name}, {in_gigabytes(total)}, of which tensors of this process hold "
        f"{in_gigabytes(ours)}, and CUDA and other processes {elsewhere})"
    )


def gpu_memory_line(needed: int, rows: UpdateRows, device: torch.device) -> str:
    """Return what an update needs of the memory of a GPU, and what to do if there is less."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    available = free_bytes + torch.cuda.memory_reserved(device)
    name = torch.cuda.get_device_name(device)
    line = (
        f"GPU: {name}; an update takes about {in_gigabytes(needed)} of its memory, {in_gigabytes(available)} are "
        f"available."
    )
    if needed < available:
        return line
    return f"{line} If it does not fit, use `micro_batch_size={max(1, rows.at_once // FEWER)}`."


def gpu_bytes_of(step: Callable[[int], None], rows: int, device: torch.device) -> int:
    """Return the most bytes of a GPU that tensors of this process hold during `step(rows)`."""
    torch.cuda.reset_peak_memory_stats(device)
    with repeatable_on(device):  # it decides how much memory convolutions take
        step(rows)
    return torch.cuda.max_memory_allocated(device)
