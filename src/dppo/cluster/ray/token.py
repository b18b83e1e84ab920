"""A private token: only this process and its children can connect to the Ray that it starts."""

import atexit
import os
import secrets
import shutil
import tempfile
from functools import cache
from pathlib import Path

from dppo.files import lock, remove_abandoned

PREFIX = "dppo-token-"
PROGRESS = "dppo-progress-"  # begins the names of the files of `cluster/collecting/progress_file.py`
MODE, PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"
YOUNG_S = 60.0  # a younger folder may belong to a process that has not locked it yet


def use_private_token(*, ray_imported: bool) -> None:
    """Set the token for the Ray that is about to start. A Ray imported earlier keeps the token it has."""
    if not private_token.cache_info().currsize:
        if ray_imported:
            return
        remove_abandoned(PREFIX, PROGRESS, older_than_s=YOUNG_S)
    os.environ[MODE] = "token"
    os.environ[PATH] = str(private_token())


def forget_private_token() -> None:
    """Remove the variables that `use_private_token` set: another cluster would not accept this token."""
    if private_token.cache_info().currsize and os.environ.get(PATH) == str(private_token()):
        del os.environ[PATH]
        os.environ.pop(MODE, None)


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
