"""Open the files of a run folder. They must be its own: a link could lead anywhere, and a pipe could block for ever.

The run folder itself may be reached through links; only its parts must be real.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from dppo.errors import CheckpointError

FILES = ("run.lock", "config.yaml", "metrics.jsonl", "learning_curve.png", "checkpoints/best.json")
KINDS = {
    stat.S_IFREG: "a regular file",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
REMEDY = "Move it away, or put the real one in its place. (The run folder as a whole may be a link.)"


class Irregular(OSError):
    """A link, a pipe or the like in place of a file or folder."""

    def __init__(self, path: Path, found: str, expected: str) -> None:
        super().__init__(errno.EINVAL, f"is {found}, not {expected}", str(path))
        self.found = found


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file without following a link and without waiting; return its descriptor.

    Raises:
        Irregular: it is something else; or it is to be written in place, and has a second name (a hard link).
        OSError: for example because it is missing.
    """
    check_kind(path, stat.S_IFREG)  # before opening, which alone can have effects on a device
    handle = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
    try:
        status = os.fstat(handle)
        _compare(path, status.st_mode, stat.S_IFREG)
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise Irregular(path, "a hard link", "a file with a single name")
    except BaseException:
        os.close(handle)
        raise
    return handle


def read_file(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    with os.fdopen(open_file(path), "rb") as file:
        return file.read()


def check_kind(path: Path, kind: int) -> None:
    """Refuse anything but a file of this kind, such as `stat.S_IFDIR`, or nothing.

    Raises:
        Irregular: there is something else.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        _compare(path, os.lstat(path).st_mode, kind)


def check_parts(run_dir: Path) -> None:
    """Refuse a run folder with a link, a pipe or the like in place of a part that a run reads or writes.

    Raises:
        CheckpointError: there is one.
    """
    try:
        check_kind(run_dir / "checkpoints", stat.S_IFDIR)
        for path in (*(run_dir / name for name in FILES), *run_dir.glob("events.out.tfevents.*")):
            check_kind(path, stat.S_IFREG)
    except Irregular as error:
        raise refusal(error) from None


def refusal(error: Irregular) -> CheckpointError:
    """Return the error for a run folder with such a part."""
    return CheckpointError(f"{error.filename}: {error.strerror}. {REMEDY}")


def _compare(path: Path, mode: int, kind: int) -> None:
    if stat.S_IFMT(mode) != kind:
        raise Irregular(path, KINDS.get(stat.S_IFMT(mode), "something else"), KINDS[kind])
