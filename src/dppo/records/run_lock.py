"""Keep a run's folder to one process."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.errors import ConfigError
from dppo.records.disk import is_alive

try:
    import fcntl
except ImportError:  # not a Unix system: the file's content alone decides
    fcntl = None  # type: ignore[assignment]

FILE = "run.lock"
ATTEMPTS = 10  # of taking over a lock whose owner is gone, while others try the same


class RunLock:
    """A file that is locked while the run lasts and says whose it is.

    The system releases the lock of a process that is killed, and no process id can be mistaken for another. Where
    a file system knows no locks, or a child of a killed run still holds one, the owner's host and process id decide.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            ConfigError: another run has it; says who, where and since when.
            OSError: the file cannot be written.
        """
        self._path = folder / FILE
        for _ in range(ATTEMPTS):
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            if self._take(handle):
                self._handle = handle
                with suppress(OSError):  # a full disk: the lock holds all the same
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, json.dumps(_myself()).encode() + b"\n", 0)
                return
            os.close(handle)
        raise _refusal(folder, self._owner())

    def close(self) -> None:
        """Release the lock, and remove its file."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            with suppress(OSError):
                self._path.unlink()  # nobody else can have locked this file meanwhile
            with suppress(OSError):  # closing it alone would leave the lock to processes that were forked meanwhile
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _take(self, handle: int) -> bool:
        """Return whether the lock is ours; False to try again with a new file."""
        owner = self._owner()
        try:
            if fcntl is None:
                raise OSError("no locks")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _is_gone(owner):
                os.close(handle)
                raise _refusal(self._path.parent, owner) from None
            # A process that the dead owner forked holds its lock: begin another file.
            with suppress(OSError):
                if os.path.samestat(os.fstat(handle), os.stat(self._path)):
                    self._path.unlink()
            return False
        except OSError:
            if owner and not _is_gone(owner):
                os.close(handle)
                raise _refusal(self._path.parent, owner) from None
        with suppress(OSError):  # between opening and locking, its owner may have removed the file
            return os.path.samestat(os.fstat(handle), os.stat(self._path))
        return False

    def _owner(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            owner = json.loads(self._path.read_bytes())
            if isinstance(owner, dict):
                return owner
        return {}


def _myself() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _is_gone(owner: dict[str, Any]) -> bool:
    """Return whether a process of this machine that has ended wrote the file."""
    pid = owner.get("pid")
    return owner.get("host") == socket.gethostname() and isinstance(pid, int) and not is_alive(pid)


def _refusal(folder: Path, owner: dict[str, Any]) -> ConfigError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('since', '?')}"
    return ConfigError(
        f"run_dir={folder}: is in use by {who}. Wait until it has ended or stop it, or name another folder."
    )
