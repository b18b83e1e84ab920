"""Arithmetic: the rounding of a thread's CPU, NumPy's error state, and the threads of NumPy's products.

Code of users may change them. A simulator that flushes denormals to zero, or that wants NumPy to raise at an underflow,
needs that only in its own steps. dppo computes with the usual settings, in `as_usual`, and restores the settings of
each environment before it runs again. Nothing is done while no state has changed; to find that out takes a tenth of a
microsecond.
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
ONE = 1.0
TINY = 1e-20  # one plus or minus this is one, unless the CPU rounds up, down or to zero
HALF = 0.5
MIN_NORMAL = sys.float_info.min  # half of it is 0 where denormals are flushed
FENV_BYTES = 32  # size of C's fenv_t on x86-64: the control words of the x87, and MXCSR at the end
MXCSR = slice(28, 32)
MXCSR_FLAGS = 0x3F  # exceptions so far, which are no setting
FE_DFL_ENV = -1  # C's default environment


_error_state: Any = None
if np.__version__ >= "2":
    _error_state = getattr(import_module("numpy._core.umath"), "_extobj_contextvar", None)
errors: Callable[[], Any] = np.geterr if _error_state is None else _error_state.get
"""Returns NumPy's error state: with NumPy 2 an object that is the same as long as the state is not set."""
with np.errstate(**USUAL_ERRORS):
    USUAL = errors()


def changed() -> bool:
    """Return whether this thread computes otherwise than within `as_usual`.

    Each env step asks, so one comparison finds all directions of rounding, and no comparisons are chained, which Python
    does not specialize for floats.
    """
    if ONE + TINY - TINY == ONE and MIN_NORMAL * HALF > 0.0:
        numpy_errors = errors()
        # equal dicts with NumPy before 2.0
        return numpy_errors is not USUAL and numpy_errors != USUAL
    return True


def _cpu_is_usual() -> bool:
    """Return whether the CPU rounds to nearest and does not flush denormals; `changed` asks the same, inline."""
    return ONE + TINY == ONE == ONE - TINY and MIN_NORMAL * HALF > 0.0


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Settings of a thread's arithmetic that a user's code has changed; None for the usual ones."""

    environment: bytes | None = None
    """C's `fenv_t`: rounding mode, denormals."""
    errors: tuple[tuple[str, Any], ...] | None = None
    """NumPy's error state."""

    @property
    def words(self) -> list[str]:
        """Descriptions of the changed settings."""
        described = []
        if self.errors is not None:
            values = ", ".join(f"{name}={value!r}" for name, value in self.errors)
            described.append(f"NumPy's error state ({values})")
        if self.environment is not None:
            described.append("the CPU's rounding mode or handling of denormals")
        return described


def current() -> Arithmetic | None:
    """Describe how this thread computes; None if as usual."""
    environment = None if _cpu_is_usual() else _environment()
    state = np.geterr()
    numpy_errors = None
    if state != USUAL_ERRORS:
        numpy_errors = tuple(state.items())
    if environment is None and numpy_errors is None:
        return None
    return Arithmetic(environment, numpy_errors)


def use(arithmetic: Arithmetic | None) -> None:
    """Let this thread compute with these settings; None: as usual."""
    settings = arithmetic or Arithmetic()
    if _error_state is not None:
        _error_state.set(USUAL)
    elif settings.errors is None:
        np.seterr(**USUAL_ERRORS)
    if settings.errors is not None:
        np.seterr(**dict(settings.errors))
    if settings.environment is not None:
        _library().fesetenv(settings.environment)
    elif not _cpu_is_usual():
        _library().fesetenv(ctypes.c_void_p(FE_DFL_ENV))


@contextmanager
def as_usual() -> Iterator[Arithmetic | None]:
    """Context in which this thread computes as usual; yields how it did before, as it does afterwards."""
    if changed():
        with _set_aside() as arithmetic:
            yield arithmetic
        return
    try:
        yield None
    finally:
        if changed():
            use(None)


@contextmanager
def _set_aside() -> Iterator[Arithmetic | None]:
    arithmetic = current()
    state = errors()
    use(None)
    try:
        yield arithmetic
    finally:
        use(arithmetic)
        if _error_state is not None and arithmetic is None:
            _error_state.set(state)


def _environment() -> bytes:
    buffer = ctypes.create_string_buffer(FENV_BYTES)
    _library().fegetenv(buffer)
    environment = bytearray(buffer.raw)
    settings = int.from_bytes(environment[MXCSR], "little") & ~MXCSR_FLAGS
    environment[MXCSR] = settings.to_bytes(4, "little")
    return bytes(environment)


def limit_blas(threads: int) -> Any:
    """Limit NumPy's matrix products to `threads`, so that sums have one order; `restore_original_limits` undoes it."""
    return openblas().limit(limits=threads)


@cache
def openblas() -> Any:
    """Return the OpenBLAS of NumPy, to limit its threads; it is found once."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(internal_api="openblas")


@cache
def _library() -> Any:
    return ctypes.CDLL(None)  # Python is linked with the library of mathematics
