"""State of the whole process that code of users may change, and that dppo depends on or names."""

import _signal  # type: ignore[import-not-found]
import logging
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import current_thread, main_thread
from typing import Any, TextIO

from dppo.log import logger
from dppo.numerics.portable import CONVOLUTIONS, VARIABLES

PRIVATE = 0o077  # umask for the instant in which it is read: files that another thread makes then are not public


@dataclass(frozen=True, slots=True)
class ProcessState:
    """Something of the whole process that code of users may change."""

    name: str
    """Name of the state in notes."""
    get: Callable[[], Any]
    put: Callable[[Any], object] | None = None
    """Sets it; None: nothing of dppo depends on it."""
    given_back: bool = True
    """Code of users has what it has set whenever it runs."""
    noted: bool = True
    """A change is worth a note."""
    is_shared: bool = False
    """The program may change it, too, while a run is in a thread beside it: then it stays as it is."""


def _umask() -> int:
    umask = os.umask(PRIVATE)
    os.umask(umask)
    return umask


def _set_errors_of_warnings(filters: tuple[Any, ...]) -> None:
    warnings.filters[:] = [*filters, *(entry for entry in warnings.filters if entry[0] != "error")]  # type: ignore[index]


def _raise_recursion_limit(least: int) -> None:
    if sys.getrecursionlimit() < least:
        sys.setrecursionlimit(least)


def _set_variables(values: list[bytes | None]) -> None:
    os.environb.update(
        {name: value for name, value in zip(_NAMES, values, strict=True) if value is not None}
    )


def _current_folder() -> str:
    with suppress(OSError):  # it has been removed
        return os.getcwd()
    return ""


def _enter_folder(path: str) -> None:
    with suppress(OSError):
        os.chdir(path)


def _set_handlers(handlers: list[Any]) -> None:
    if current_thread() is main_thread():
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            if handler is not None and _signal.getsignal(number) != handler:
                signal.signal(number, handler)


def _torch_mode(get: Callable[[Any], Any], usual: Any) -> Any:
    """Return a mode of torch; None if it is as usual, or torch is not loaded, or is being loaded by another thread."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):
        return None
    mode = get(torch)
    return None if mode == usual else mode


_NAMES = [name.encode() for name in (*VARIABLES, *CONVOLUTIONS)]
_SIGNALS = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)))
_USUAL_RECURSION = 1000
STATES = (
    ProcessState(
        "sys.stdout", lambda: sys.stdout, lambda stream: setattr(sys, "stdout", usable(stream))
    ),
    ProcessState(
        "sys.stderr", lambda: sys.stderr, lambda stream: setattr(sys, "stderr", usable(stream))
    ),
    ProcessState("the umask", _umask, os.umask),
    ProcessState(
        "which warnings are errors",
        lambda: tuple(entry for entry in warnings.filters if entry[0] == "error"),
        _set_errors_of_warnings,
    ),
    ProcessState(
        "the default timeout of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout
    ),
    ProcessState(
        "the recursion limit",
        lambda: min(sys.getrecursionlimit(), _USUAL_RECURSION),
        _raise_recursion_limit,
        given_back=False,
    ),
    ProcessState(
        "environment variables of numerics",
        lambda: [os.environb.get(name) for name in _NAMES],  # without decoding, which takes long
        _set_variables,
        given_back=False,
    ),
    ProcessState(
        "the handler of SIGINT or SIGTERM",
        # without the enum of `signal`, which takes long
        lambda: [_signal.getsignal(number) for number in _SIGNALS],
        _set_handlers,
        given_back=False,
    ),
    ProcessState("the current folder", _current_folder, _enter_folder),
    ProcessState(
        "whether anything is logged", lambda: (logging.root.manager.disable, logger.disabled)
    ),
    # Debugging lines of a simulator are wanted; those of the libraries that dppo calls would flood the terminal.
    ProcessState(
        "the level of the root logger",
        lambda: logging.root.level,
        logging.root.setLevel,
        noted=False,
        is_shared=True,
    ),
    # Those of a simulator would show the notes of dppo once more.
    ProcessState(
        "the handlers of the root logger",
        lambda: [*logging.root.handlers],
        lambda handlers: setattr(logging.root, "handlers", [*handlers]),
        noted=False,
        is_shared=True,
    ),
    # Computations of torch are shielded at their place: `numerics.torch_modes`.
    ProcessState(
        "torch's grad mode", partial(_torch_mode, lambda torch: torch.is_grad_enabled(), usual=True)
    ),
    ProcessState(
        "torch's inference mode",
        partial(_torch_mode, lambda torch: torch.is_inference_mode_enabled(), usual=False),
    ),
    ProcessState(
        "torch's dtype",
        partial(_torch_mode, lambda torch: str(torch.get_default_dtype()), usual="torch.float32"),
    ),
    ProcessState(
        "torch's use of oneDNN",
        partial(_torch_mode, lambda torch: torch._C._get_mkldnn_enabled(), usual=True),
    ),
    ProcessState(
        "torch's deterministic algorithms",
        partial(
            _torch_mode, lambda torch: torch.are_deterministic_algorithms_enabled(), usual=False
        ),
    ),
)


def is_closed(stream: Any) -> bool:
    return getattr(stream, "closed", False) is True


def usable(stream: TextIO) -> TextIO:
    """Return a standard stream; if it has been closed, a new stream for its descriptor."""
    if is_closed(stream):
        descriptor = {"<stdout>": 1, "<stderr>": 2}.get(getattr(stream, "name", ""))
        if descriptor is not None:
            with suppress(OSError):
                return open(
                    descriptor, "w", encoding=stream.encoding, errors=stream.errors, closefd=False
                )
    return stream
