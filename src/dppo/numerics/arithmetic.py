"""How this thread computes: the rounding of its CPU, and NumPy's error state. Code of users may change both.

A simulator that flushes denormals to zero, or that wants NumPy to raise at an underflow, needs that in its own steps
alone. So dppo computes as usual, `as_usual`, and gives each environment back what it has set before it runs again.
Nothing is done while nobody has changed anything; to find that out takes a tenth of a microsecond.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

USUAL_ERRORS: Any = {"divide": "warn", "over": "warn", "under": "ignore", "invalid": "warn"}
ONE, TINY = 1.0, 1e-20  # their sum and difference are 1, unless the CPU rounds up, down or to zero
SMALLEST, HALF = sys.float_info.min, 0.5  # their product is 0 where denormals are flushed
BYTES_OF_ENVIRONMENT = 32  # of C's fenv_t on x86-64: the control words of the x87, and MXCSR at the end
MXCSR = slice(28, 32)
FLAGS = 0x3F  # of MXCSR: exceptions so far, which are no setting


_state: Any = None
if np.__version__ >= "2":
    _state = getattr(import_module("numpy._core.umath"), "_extobj_contextvar", None)
errors: Callable[[], Any] = np.geterr if _state is None else _state.get
"""Returns NumPy's error state: with NumPy 2 an object that is the same as long as nobody sets the state."""
with np.errstate(**USUAL_ERRORS):
    USUAL = errors()


def changed() -> bool:
    """Return whether this thread computes otherwise than within `as_usual`.

    Each env step asks, so each comparison stands alone: Python compares floats quickly only where a branch follows.
    """
    if ONE + TINY == ONE and ONE - TINY == ONE and SMALLEST * HALF > 0.0:
        numpy_errors = errors()
        return numpy_errors is not USUAL and numpy_errors != USUAL  # equal dicts with NumPy before 2.0
    return True


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """What code of a user has set in a thread; None for what is as usual."""

    environment: bytes | None
    """C's `fenv_t`: rounding mode, denormals."""
    errors: tuple[tuple[str, Any], ...] | None
    """NumPy's error state."""

    @property
    def words(self) -> list[str]:
        """Return the names of what has been changed."""
        of_numpy = ", ".join(f"{name}={value!r}" for name, value in self.errors or ())
        found = [f"NumPy's error state ({of_numpy})"] if self.errors is not None else []
        if self.environment is not None:
            found.append("the CPU's rounding mode or handling of denormals")
        return found


def current() -> Arithmetic | None:
    """Return how this thread computes; None if as usual."""
    environment = None
    if not (ONE + TINY == ONE == ONE - TINY and SMALLEST * HALF > 0.0):
        environment = _environment()
    found = np.geterr()
    numpy_errors = None if found == USUAL_ERRORS else tuple(found.items())
    if environment is None and numpy_errors is None:
        return None
    return Arithmetic(environment, numpy_errors)


def use(arithmetic: Arithmetic | None) -> None:
    """Let this thread compute so; None: as usual."""
    if _state is not None:
        _state.set(USUAL)
    elif arithmetic is None or arithmetic.errors is None:
        np.seterr(**USUAL_ERRORS)
    if arithmetic is not None and arithmetic.errors is not None:
        np.seterr(**dict(arithmetic.errors))
    if arithmetic is not None and arithmetic.environment is not None:
        _library().fesetenv(arithmetic.environment)
    elif not (ONE + TINY == ONE == ONE - TINY and SMALLEST * HALF > 0.0):
        _library().fesetenv(ctypes.c_void_p(-1))  # FE_DFL_ENV


@contextmanager
def as_usual() -> Iterator[Arithmetic | None]:
    """Context in which this thread computes as usual; yields how it did before, as it does afterwards."""
    before = current()
    kept = errors()
    use(None)
    try:
        yield before
    finally:
        use(before)
        if _state is not None and before is None:
            _state.set(kept)


@contextmanager
def torch_as_usual() -> Iterator[None]:
    """Context in which torch takes gradients, in float32, with oneDNN: whatever code of a user has set meanwhile."""
    import torch

    one_dnn, exact = torch._C._get_mkldnn_enabled(), torch.are_deterministic_algorithms_enabled()
    warn_only, dtype = torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_default_dtype()
    # A context of autocast around that of bfloat16 would keep the weights that the first minibatch has cast.
    lowered = torch.is_autocast_enabled("cpu")
    with torch.inference_mode(mode=False), torch.enable_grad():
        torch.set_autocast_enabled("cpu", False)
        torch._C._set_mkldnn_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cpu", lowered)
            torch._C._set_mkldnn_enabled(one_dnn)
            torch.use_deterministic_algorithms(exact, warn_only=warn_only)
            torch.set_default_dtype(dtype)


def _environment() -> bytes:
    buffer = ctypes.create_string_buffer(BYTES_OF_ENVIRONMENT)
    _library().fegetenv(buffer)
    found = bytearray(buffer.raw)
    if len(found[MXCSR]) == 4:
        found[MXCSR] = (int.from_bytes(found[MXCSR], "little") & ~FLAGS).to_bytes(4, "little")
    return bytes(found)


@cache
def _library() -> Any:
    return ctypes.CDLL(None)  # Python is linked with the library of mathematics
