"""A second name for files and folders, by hard links; and a listing that shows whether they were changed since."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from dppo.files import read_file

# largest folder that is compared by its content; for larger ones, sizes and times of change of the files count
HASHED_BYTES = 1 << 26
MAX_FILES = 50_000
PIECE_BYTES = 1 << 20
FICLONE = 0x40049409  # of Linux: a file that shares the blocks of another


class NotRegular(Exception):
    """A link, a pipe or the like among files, or too many of them."""


def listing(folder: Path) -> bytes:
    """Return a line for each file and folder below `folder`: two facts and its path. Raise `NotRegular`."""
    files = _below(folder)
    is_hashed = sum(status.st_size for status in files.values()) <= HASHED_BYTES
    lines = []
    for name, status in files.items():
        if stat.S_ISDIR(status.st_mode):
            facts = "folder -"
        elif is_hashed:
            facts = f"{hashlib.sha256(read_file(folder / name)).hexdigest()} -"
        else:
            facts = f"{status.st_size} {status.st_mtime_ns}"
        lines.append(f"{facts} {json.dumps(name)}\n")
    return "".join(lines).encode()


def first_change(recorded: bytes, now: bytes) -> str:
    """Return the first path in which two listings differ; "" if they are equal."""
    changed = set(recorded.splitlines()) ^ set(now.splitlines())
    return min((json.loads(line.split(maxsplit=2)[2]) for line in changed), default="")


def are_equal(path: Path, other: Path) -> bool:
    """Return whether two files, or all files of two folders, have the same content."""
    if path.is_dir() != other.is_dir():
        return False
    if not path.is_dir():
        return _has_equal_bytes(path, other)
    files = _below(path)
    if files.keys() != _below(other).keys():
        return False
    return all(
        stat.S_ISDIR(status.st_mode) or _has_equal_bytes(path / name, other / name)
        for name, status in files.items()
    )


def _has_equal_bytes(path: Path, other: Path) -> bool:
    if path.samefile(other):
        return True
    size = path.stat().st_size
    if size != other.stat().st_size:
        return False
    with open(path, "rb") as file, open(other, "rb") as other_file:
        handles = file.fileno(), other_file.fileno()
        position = min(_next_data(handle, 0, size) for handle in handles)
        while position < size:
            piece, other_piece = (os.pread(handle, PIECE_BYTES, position) for handle in handles)
            if piece != other_piece:
                return False
            end = position + len(piece)
            position = min(_next_data(handle, end, size) for handle in handles)
    return True


def _next_data(handle: int, position: int, size: int) -> int:
    """Return the position of the next bytes outside the holes of a sparse file; `size` if there are none."""
    try:
        return os.lseek(handle, position, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return size
        raise


def _below(folder: Path) -> dict[str, os.stat_result]:
    """Return the sorted paths of all files and folders below a folder, and what the system knows of them."""
    files = dict(sorted(_walk(folder, folder)))
    if len(files) > MAX_FILES:
        raise NotRegular(f"{folder} has {len(files):,} files, more than {MAX_FILES:,}")
    return files


def _walk(folder: Path, top: Path) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(folder) as scan:
        entries = list(scan)
    for entry in entries:
        status = entry.stat(follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(Path(entry.path), top)
        elif not stat.S_ISREG(status.st_mode):
            raise NotRegular(f"{entry.path} is neither a file nor a folder")
        yield os.path.relpath(entry.path, top), status


def link(source: Path, target: Path) -> int:
    """Make `target` the same file, or a folder of the same files; return the bytes that had to be copied instead."""
    if not source.is_dir():
        return _link_file(source, target)
    files = _below(source)
    target.mkdir()
    copied = 0
    for name, status in files.items():
        if stat.S_ISDIR(status.st_mode):
            (target / name).mkdir()
        else:
            copied += _link_file(source / name, target / name)
    return copied


def _link_file(source: Path, target: Path) -> int:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without hard links
        return _copy(source, target)
    return 0


def _copy(source: Path, target: Path) -> int:
    """Copy a file with its time of change; return the bytes, 0 if the file system lets both share them."""
    with open(source, "rb") as file, open(target, "xb") as new_file:
        try:
            fcntl.ioctl(new_file.fileno(), FICLONE, file.fileno())
            copied = 0
        except OSError:
            copied = _copy_data(file.fileno(), new_file.fileno())
    shutil.copystat(source, target)
    return copied


def _copy_data(file: int, new_file: int) -> int:
    """Copy what is written in a file, without its holes; return the bytes."""
    size = os.fstat(file).st_size
    os.ftruncate(new_file, size)
    copied = 0
    position = 0
    while position < size:
        position = _next_data(file, position, size)
        if position == size:
            break
        end = os.lseek(file, position, os.SEEK_HOLE)
        os.lseek(new_file, position, os.SEEK_SET)
        while position < end and (count := os.sendfile(new_file, file, position, end - position)):
            position += count
            copied += count
    return copied
