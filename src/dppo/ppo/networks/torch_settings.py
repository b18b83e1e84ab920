"""Process-wide settings of torch, which an environment or a program in this process may have changed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch


class _Setting(NamedTuple):
    """A setting of torch to be overridden for a while."""

    set_to: Callable[[Any], None]
    value: Any
    """Value in the meantime."""
    before: Any
    """Value to restore, on which an environment may rely."""


def default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Make `dtype` the default of new tensors, and the CPU their device; oneDNN is on, autocast and inference mode off.

    An actor enters this context in each step, so the context does nothing if all settings have these values already.
    """
    before = torch.get_default_dtype()
    dtype_setting = _Setting(torch.set_default_dtype, dtype, before)
    if not torch._C._get_mkldnn_enabled():
        return _defaults_restored(
            dtype_setting, _Setting(torch._C._set_mkldnn_enabled, value=True, before=False)
        )
    # A default device is an entry of this stack. Asking torch for the device itself would take 3 us.
    has_default_device = torch._C._len_torch_function_stack() > 0
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled() or has_default_device:
        return _defaults_restored(dtype_setting)
    if before == dtype:
        return nullcontext()
    return _settings_overridden(dtype_setting)


def exact_on(num_threads: int) -> AbstractContextManager[None]:
    """Use `num_threads` threads for operations of this thread, and float32 products of full precision."""
    threads_before = torch.get_num_threads()
    try:
        precision = torch.get_float32_matmul_precision()
    except RuntimeError:
        # the precision was set for one backend alone, and torch has no name for that
        precision = ""
    if threads_before == num_threads and precision == "highest":
        return nullcontext()
    return _settings_overridden(
        _Setting(torch.set_num_threads, num_threads, threads_before),
        _Setting(torch.set_float32_matmul_precision, "highest", precision or "highest"),
    )


def autocast_dtype_on(device: torch.device) -> torch.dtype | None:
    """Return the precision in which layers run on `device` under autocast; None without autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


@contextmanager
def _defaults_restored(*settings: _Setting) -> Iterator[None]:
    """Override `settings`, switch inference mode and autocast off, and make the CPU the default device."""
    with (
        torch.inference_mode(mode=False),
        torch.autocast("cpu", enabled=False),
        torch.device("cpu"),
        _settings_overridden(*settings),
    ):
        yield


@contextmanager
def _settings_overridden(*settings: _Setting) -> Iterator[None]:
    """Override `settings`, and restore them at the end."""
    for setting in settings:
        setting.set_to(setting.value)
    try:
        yield
    finally:
        for setting in settings:
            setting.set_to(setting.before)
