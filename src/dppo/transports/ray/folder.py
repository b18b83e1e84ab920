"""The folder of Ray's sockets, logs and objects that do not fit into memory; Ray cannot use every one."""

import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dppo.errors import ConfigError

VARIABLE = "RAY_TMPDIR"
SOCKET = "/ray/session_2026-11-27_15-58-44_266695_4194304/sockets/plasma_store.1"
LONGEST_SOCKET = {"darwin": 103}.get(sys.platform, 107)  # bytes of the path of a Unix socket
LONGEST = LONGEST_SOCKET - len(SOCKET)  # bytes of the path of the folder
# Ray starts programs with the path, and encodes it as ASCII
PLAIN = re.compile(r"[\w./+@:=,~-]+", re.ASCII)
PLACES = ("/tmp", "/var/tmp")


def ray_folder() -> str:
    """Return the folder as Ray chooses it. Python leaves out a TMPDIR that is full or does not exist; Ray does not."""
    in_environment = os.environ.get("TMPDIR") if sys.platform.startswith("linux") else None
    return os.environ.get(VARIABLE) or in_environment or tempfile.gettempdir()


@contextmanager
def usable_folder(notify: Callable[[str], None]) -> Iterator[None]:
    """Let Ray use another folder if the path of the usual one is too long, or has characters that Ray cannot use.

    Raises ConfigError if the user has named such a folder, or if no other one can be written.
    """
    problem = _problem(ray_folder())
    if not problem:
        yield
        return
    if os.environ.get(VARIABLE):
        raise ConfigError(f"RAY_TMPDIR={ray_folder()}: {problem}. {_remedy()}")
    places = [
        place for place in PLACES if not _problem(place) and os.access(place, os.W_OK | os.X_OK)
    ]
    if not places:
        raise ConfigError(
            f"TMPDIR={ray_folder()}: {problem}, and {' and '.join(PLACES)} cannot be written. {_remedy()}"
        )
    notify(
        f"TMPDIR={ray_folder()}: {problem}. Ray uses {places[0]}; RAY_TMPDIR names another folder."
    )
    os.environ[VARIABLE] = places[0]
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def _problem(folder: str) -> str:
    size = len(os.fsencode(folder))
    if size > LONGEST:
        return f"has {size} bytes, and the paths of Ray's sockets leave room for {LONGEST}"
    if not PLAIN.fullmatch(folder):
        return "has spaces, quotes or letters beyond ASCII, with which Ray cannot start"
    return ""


def _remedy() -> str:
    return f"Set RAY_TMPDIR to a folder with a plain name of at most {LONGEST} bytes, or use `num_actors=0`."
