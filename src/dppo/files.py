"""Files of a run folder, perhaps a stranger's: regular files of that folder, and not too large; and temporary files.

A link could lead anywhere, and a pipe could block for ever. Only the run folder itself may be reached through links.
"""

import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from dppo.errors import ConfigError

MAX_DEPTH = 100  # levels of nesting of settings, and of the JSON values in a checkpoint
MAX_BYTES = 2**31  # largest file that is read as a whole
MAX_SETTINGS_BYTES = 2**21  # largest file of settings
SCRATCH = "dppo-scratch-"
KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Irregular(OSError):
    """A link, a pipe or the like in place of a file or folder."""

    def __init__(self, path: Path, kind: str, expected: str) -> None:
        super().__init__(errno.EINVAL, f"is {kind}, not {expected}", str(path))
        self.kind = kind


class TooLarge(OSError):
    """A file with more bytes than its limit."""

    def __init__(self, path: Path, size: int, max_bytes: int) -> None:
        super().__init__(errno.EFBIG, f"has {size:,} bytes, more than {max_bytes:,}", str(path))


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without following a link and without waiting; return its descriptor.

    Raises `Irregular` if it is something else, or is to be written and has a second name (a hard link); or an OSError.
    """
    check_kind(path, stat.S_IFREG)  # before opening, which alone can have effects on a device
    handle = os.open(
        path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666
    )
    try:
        status = os.fstat(handle)
        _compare(path, status.st_mode, stat.S_IFREG)
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise Irregular(path, "a hard link", "a file with a single name")
    except BaseException:
        os.close(handle)
        raise
    return handle


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file of any size; raise as `open_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        digest = hashlib.sha256()
        while chunk := file.read(2**20):
            digest.update(chunk)
    return digest.hexdigest()


def read_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of at most `max_bytes`; raise `TooLarge`, or as `open_file`."""
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise TooLarge(path, size, max_bytes)
        return file.read()


def home_expanded(path: str) -> str:
    """Return a path with its `~` or `~user` replaced by that home folder, as a shell does it; keep a / at its end.

    A shell leaves it in `--run-dir=~/x`, and nothing replaces it in a file of settings. `./~x` is a folder of that
    name. Raises ConfigError if there is no such user.
    """
    if not str(Path(path)).startswith("~"):
        return path
    if not path.startswith("~"):
        # else a Path of it would drop the dot, and look like a home folder
        return os.path.join(os.getcwd(), path)
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise ConfigError(
            f"{path}: no home folder is known for {path.partition('/')[0]}. Write the whole path."
        )
    return expanded


def user_path(path: str | os.PathLike[str]) -> Path:
    return Path(home_expanded(os.fspath(path)))


def check_kind(path: Path, kind: int) -> None:
    """Raise `Irregular` if there is anything but a file of this kind, such as `stat.S_IFDIR`, or nothing."""
    with suppress(FileNotFoundError, NotADirectoryError):
        _compare(path, os.lstat(path).st_mode, kind)


def lock(path: Path) -> int | None:
    """Lock a file or folder; return None if another process holds the lock, or the system has no such locks."""
    from filelock import lock_descriptor  # here, because it takes long to load

    with suppress(OSError):
        number = os.open(path, os.O_RDONLY)
        with suppress(OSError):
            if lock_descriptor(number, blocking=False):
                return number
        os.close(number)
    return None


def remove_abandoned(*prefixes: str, older_than_s: float = 0.0) -> None:
    """Remove temporary files and folders of processes that were killed, whose locks are free."""
    for prefix in prefixes:
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime >= older_than_s:
                    _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    """Remove a file or folder, unless a process that still runs holds its lock."""
    handle = lock(path)
    if handle is None:
        return
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink()
    os.close(handle)


def make_scratch_dir(stack: ExitStack) -> str:
    """Return the path of a new folder, which `stack` removes; both also remove folders of killed processes."""
    remove_abandoned(SCRATCH)
    stack.callback(remove_abandoned, SCRATCH)
    hidden = Path(tempfile.mkdtemp(prefix=f".{SCRATCH}"))
    handle = lock(hidden)
    if handle is not None:
        stack.callback(os.close, handle)
    # only now: a folder of this name without a lock may go
    folder = hidden.rename(hidden.with_name(hidden.name[1:]))
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return str(folder)


def is_deep(value: Any) -> bool:
    """Return whether JSON values have more than `MAX_DEPTH` levels, at which functions that recurse may fail."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for container in level for item in _items(container)]
    return any(isinstance(item, dict | list) for item in level)


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _compare(path: Path, mode: int, kind: int) -> None:
    if stat.S_IFMT(mode) != kind:
        raise Irregular(path, KINDS.get(stat.S_IFMT(mode), "something else"), KINDS[kind])
