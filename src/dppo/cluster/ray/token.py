"""A private token: only this process and its children can connect to the Ray that it starts."""

import atexit
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

from filelock import lock_descriptor

PREFIX = "dppo-token-"
PROGRESS = "dppo-progress-"  # begins the names of the files of `cluster/collecting/progress_file.py`
MODE, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
YOUNG_S = 60.0  # a younger folder may belong to a process that has not locked it yet


def use_private_token(*, ray_imported: bool) -> None:
    """Set the token for the Ray that is about to start. A Ray imported earlier keeps the token it has."""
    if not private_token.cache_info().currsize:
        if ray_imported:
            return
        clear_abandoned()
    os.environ[MODE] = "token"
    os.environ[PATH] = str(private_token())


def forget_private_token() -> None:
    """Remove the variables that `use_private_token` set: another cluster would not accept this token."""
    if private_token.cache_info().currsize and os.environ.get(PATH) == str(private_token()):
        del os.environ[PATH]
        os.environ.pop(MODE, None)


def clear_abandoned() -> None:
    """Remove the token folders and the progress files of processes that were killed, whose locks are free."""
    here = Path(tempfile.gettempdir())
    for path in (*here.glob(f"{PREFIX}*"), *here.glob(f"{PROGRESS}*")):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime < YOUNG_S:
                continue
            handle = lock(path)
            if handle is not None:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink()
                os.close(handle)


@cache  # Ray remembers the first token that it reads
def private_token() -> Path:
    """Create the token of this process, in a folder that is removed when the process ends; return its path."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    lock(folder)  # held until the process ends; systemd-tmpfiles skips locked folders, too
    return token


def lock(path: Path) -> int | None:
    """Lock a file or folder; return None if another process holds the lock, or the system has no such locks."""
    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        with suppress(OSError):
            if lock_descriptor(number, blocking=False):
                return number
        os.close(number)
    return None
