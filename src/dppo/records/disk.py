"""Write files so that each is there whole or not at all, whatever moment the power goes."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

ABANDONED_S = 86_400.0  # a temporary file of another machine that is this old has no writer any more


class Disk:
    """The operations that change a disk. Tests pass one that fails at the n-th of them."""

    def write(self, path: Path, *parts: bytes | memoryview) -> None:
        """Write a new file."""
        with open(path, "xb") as file:
            for part in parts:
                file.write(part)

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes, or a folder's names, would survive a power cut."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network file systems cannot flush a folder; there is nothing better to do there.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
                raise
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Give a file another name; a file that has this name already is replaced."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Delete a file or a folder."""
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


DISK = Disk()


def write_file(path: Path, *parts: bytes | memoryview, disk: Disk = DISK) -> None:
    """Replace a file by `parts`, or leave it as it was. Waits for the disk.

    Raises:
        OSError: the disk is full, for example.
    """
    temporary = path.with_name(f".tmp-{path.name}-{socket.gethostname()}-{os.getpid()}")
    try:
        disk.write(temporary, *parts)
        disk.sync(temporary)
        disk.rename(temporary, path)
        disk.sync(path.parent)
    finally:
        if temporary.exists():
            with suppress(OSError):
                disk.remove(temporary)


def make_folder(path: Path, disk: Disk = DISK) -> None:
    """Make `path` and its parents, so that it survives a power cut."""
    if not path.is_dir():
        make_folder(path.parent, disk)
        path.mkdir(exist_ok=True)
        disk.sync(path.parent)


def abandoned(folder: Path) -> list[Path]:
    """Return the temporary files in `folder` that killed writers left behind."""
    return [path for path in folder.glob(".tmp-*") if _is_abandoned(path)]


def _is_abandoned(path: Path) -> bool:
    host, _, pid = path.name.split("-", 2)[-1].rpartition("-")
    if host == socket.gethostname() and pid.isdigit():
        return int(pid) == os.getpid() or not is_alive(int(pid))
    with suppress(OSError):  # it is gone, for example
        return time.time() - path.lstat().st_mtime > ABANDONED_S
    return False


def is_alive(pid: int) -> bool:
    """Return whether a process with this id runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def cause(error: OSError) -> str:
    """Return what the system says, as a sentence."""
    return f"{error.strerror or error}."


def remedy(error: OSError) -> str:
    """Return what to do about it, as a sentence."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Make the folder readable and writable for you."
    return "Check the disk."
