"""Restrict a run folder to one process."""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from dppo.errors import ConfigError
from dppo.records.files.disk import is_alive

try:
    import fcntl
except ImportError:  # not a Unix system: the file's content alone decides
    fcntl = None  # type: ignore[assignment]

FILE = "run.lock"
ATTEMPTS = 10  # at taking over a stale lock while other processes try the same


class RunLock:
    """A file that is locked while the run lasts, and contains the owner's host and process id.

    The system releases the lock of a killed process. Where a file system has no locks, or a child of a killed run
    still holds one, the host and the process id in the file decide.
    """

    def __init__(self, folder: Path) -> None:
        """Take the lock.

        Raises:
            ConfigError: another run holds it; the message names process, host and start time.
            OSError: the file cannot be written.
        """
        self._path = folder / FILE
        for _ in range(ATTEMPTS):
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
            if self._take(handle):
                self._handle = handle
                with suppress(OSError):  # the disk is full: the lock holds all the same
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
            with suppress(OSError):  # closing alone would leave the lock to processes forked meanwhile
                if fcntl is not None:
                    fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)

    def _take(self, handle: int) -> bool:
        """Try to take the lock; False: try again with a new file."""
        owner = self._owner()
        try:
            if fcntl is None:
                raise OSError("no locks")
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not _is_gone(owner):
                os.close(handle)
                raise _refusal(self._path.parent, owner) from None
            # A child of the dead owner still holds the lock: start with a new file.
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
    """Return whether the owner ran on this machine and has ended."""
    pid = owner.get("pid")
    return owner.get("host") == socket.gethostname() and isinstance(pid, int) and not is_alive(pid)


def _refusal(folder: Path, owner: dict[str, Any]) -> ConfigError:
    who = f"process {owner.get('pid', '?')} on {owner.get('host', '?')} since {owner.get('since', '?')}"
    return ConfigError(
        f"run_dir={folder}: is in use by {who}. Stop it or wait until it has ended, or use another folder."
    )
