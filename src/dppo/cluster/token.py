"""A private token: only this process, and the processes it starts, may talk to the Ray that it starts."""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "dppo-token-"
MODE, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
YOUNG_S = 60.0  # a folder younger than this may belong to a process that has not locked it yet

_token: Path | None = None  # of this process, made once: Ray remembers the first that it reads


def use_private_token(*, ray_imported: bool) -> None:
    """Set the token for the Ray that is about to start. A Ray imported earlier keeps the token it has."""
    global _token
    if _token is None:
        if ray_imported:
            return
        clear_abandoned()
        _token = _make_token()
    os.environ[MODE] = "token"
    os.environ[PATH] = str(_token)


def forget_private_token() -> None:
    """Remove what `use_private_token` set: another cluster would be met with the wrong token."""
    if _token is not None and os.environ.get(PATH) == str(_token):
        del os.environ[PATH]
        os.environ.pop(MODE, None)


def clear_abandoned() -> None:
    """Remove the token folders of processes that were killed: nobody holds their lock."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < YOUNG_S:
                continue
            lock = _lock(folder)
            if lock is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _make_token() -> Path:
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    token = folder / "ray_token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _lock(folder)  # held until the process ends; systemd-tmpfiles leaves a locked folder alone, too
    return token


def _lock(folder: Path) -> int | None:
    """Lock a folder; None if another process holds it, or the system has no such locks."""
    try:
        import fcntl
    except ModuleNotFoundError:  # Windows
        return None
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(number)
        return None
    return number
