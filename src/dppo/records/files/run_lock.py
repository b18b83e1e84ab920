"""Restrict a run folder to one process."""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dppo.errors import ConfigError
from dppo.files import Irregular, open_file
from dppo.records.files.disk import is_alive, refusal

FILE = "run.lock"
PATIENCE_S = 0.1  # for an owner that is just about to release the lock


class RunLock:
    """A file that is locked while the run lasts, and contains the owner's host and process id.

    The system releases the lock of a killed process. Where a file system has no locks, the owner in the file decides.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises a ConfigError that names process, host and start time if another run holds it, a CheckpointError if the
        file is a link or a pipe, and an OSError if it cannot be written.
        """
        self._path = folder / FILE
        try:
            os.close(open_file(self._path, os.O_WRONLY | os.O_CREAT))
        except Irregular as error:  # to filelock, a pipe or a hard link is as good as any file
            raise refusal(error) from None
        self._lock = FileLock(self._path, timeout=PATIENCE_S, thread_local=False, fallback_to_soft=False)
        owner = self._owner()
        try:
            self._lock.acquire()
        except Timeout:
            raise _refusal(folder, self._owner()) from None
        except OSError:  # the file system has no locks
            here, pid = owner.get("host") == socket.gethostname(), owner.get("pid")
            if owner and not (here and isinstance(pid, int) and not is_alive(pid)):
                raise _refusal(folder, owner) from None
        try:
            self._write_owner()
        except BaseException:
            self._lock.release()
            raise
        self._held = True

    def close(self) -> None:
        """Release the lock, and remove its file."""
        if self._held:
            self._held = False
            with suppress(OSError):
                self._path.unlink()  # nobody else can have locked this file meanwhile
            self._lock.release()

    def _owner(self) -> dict[str, Any]:
        with suppress(OSError, ValueError, RecursionError), os.fdopen(open_file(self._path), "rb") as file:
            owner = json.loads(file.read(4096))
            if isinstance(owner, dict):
                return owner
        return {}

    def _write_owner(self) -> None:
        myself = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        handle = open_file(self._path, os.O_WRONLY | os.O_CREAT)
        with os.fdopen(handle, "wb", buffering=0) as file, suppress(OSError):
            file.truncate()  # if the disk is full, the lock holds all the same
            file.write(json.dumps(myself).encode() + b"\n")


def _refusal(folder: Path, owner: dict[str, Any]) -> ConfigError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('since', '?')}"
    return ConfigError(
        f"run_dir={folder}: is in use by {who}. Stop it or wait until it has ended, or use another folder."
    )
