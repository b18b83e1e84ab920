"""The lock of a run folder, so that only one process writes to it."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dppo.errors import ConfigError
from dppo.files import Irregular, lock, open_file
from dppo.records.files.run_files import LOCK, json_in, refusal

PATIENCE_S = 0.1  # longest wait for an owner that is about to release the lock


@contextmanager
def locked(folder: Path) -> Iterator[bytes]:
    """Lock a file of a run folder, and remove it in the end; yield its content, the owner's host and process id.

    The system releases the lock of a killed process. Where a file system has no locks, the owner in the file decides.
    Raises a ConfigError that names process, host and start time if another run holds the lock, a CheckpointError if the
    file is a link or a pipe, and an OSError if it cannot be written.
    """
    path = folder / LOCK
    try:
        os.close(open_file(path, os.O_WRONLY | os.O_CREAT))
    except Irregular as error:  # to filelock, a pipe or a hard link is as good as any file
        raise refusal(error) from None
    file_lock = FileLock(path, timeout=PATIENCE_S, thread_local=False, fallback_to_soft=False)
    owner = json_in(path)
    try:
        file_lock.acquire()
    except Timeout:
        raise _in_use(folder, json_in(path)) from None
    except OSError:  # the file system has no locks
        if owner and _is_alive(owner):
            raise _in_use(folder, owner) from None
    try:
        yield _write_owner(path)
    finally:
        with suppress(OSError):
            path.unlink()  # no other process can have locked this file meanwhile
        file_lock.release()


def goes_on(run: Path) -> bool:
    """Return whether a process holds the lock of a run's folder, whose files have been checked."""
    file = run / LOCK
    if not file.exists():
        return False
    handle = lock(file)
    if handle is None:
        return True
    os.close(handle)
    return False


def training_notes(*runs: Path, content: str = "what it has so far") -> list[str]:
    """Return a line on each run that is still training, of which a command shows only `content`."""
    return [f"{run}: is still training; this is {content}" for run in runs if goes_on(run)]


def _write_owner(path: Path) -> bytes:
    owner = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    content = json.dumps(owner).encode() + b"\n"
    handle = open_file(path, os.O_WRONLY | os.O_CREAT)
    with os.fdopen(handle, "wb", buffering=0) as file, suppress(OSError):
        file.truncate()  # if the disk is full, the lock holds all the same
        file.write(content)
    return content


def _is_alive(owner: dict[str, Any]) -> bool:
    """Return whether the owner may still run: it is alive on this host, or it is on another one."""
    import psutil

    return owner.get("host") != socket.gethostname() or owner.get("pid") in psutil.pids()


def _in_use(folder: Path, owner: dict[str, Any]) -> ConfigError:
    process = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('since', '?')}"
    return ConfigError(
        f"run_dir={folder}: is in use by {process}. Stop it or wait until it has ended, or use another folder."
    )
