"""Write the files of a run folder atomically: after a crash at any moment, each is complete or absent."""

import errno
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dppo.errors import ConfigError, DppoError
from dppo.files import Irregular, TooLarge
from dppo.machine import file_size_remedy

PIECE_BYTES = 2**24
REMEDY = (
    "Move it away, or put the real one in its place. (The run folder as a whole may be a link.)"
)

PERMISSION = "Give yourself read and write permission for the folder."
REMEDIES = {  # errno -> remedy
    errno.ENOSPC: "Free some disk space.",
    errno.EDQUOT: "Delete files of yours on this disk, or use a folder on another one.",
    errno.EFBIG: "Its file system does not support files of this size. Use a folder on another disk.",
    errno.EROFS: "Its file system is mounted read-only. Use a folder on another disk.",
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
    errno.ENAMETOOLONG: "Use a shorter name.",
    errno.ENOENT: "Create its folder first.",
    errno.EMFILE: "Run `ulimit -n 4096` first, which allows more open files.",
}


class Disk:
    """The operations that change a disk. Tests replace DISK by an object whose n-th operation fails."""

    def write(self, path: Path, *parts: bytes | memoryview) -> None:
        """Write a new file; flush a large one piece by piece, so that a slow disk is not taken for a blocked one."""
        with open(path, "xb") as file:
            for part in parts:
                data = memoryview(part)
                for start in range(0, len(data), PIECE_BYTES):
                    file.write(data[start : start + PIECE_BYTES])
                    if len(data) > PIECE_BYTES:
                        file.flush()
                        os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Wait until the content of a file, or the names in a folder, would survive a power cut."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        except OSError as error:
            # Some network file systems cannot flush a folder; that has to do there.
            if error.errno not in (errno.EINVAL, errno.ENOTSUP) or not path.is_dir():
                raise
        finally:
            os.close(handle)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file; replace a file that has the new name already."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink(missing_ok=True)


DISK = Disk()


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Replace the content of a file by `parts`, or raise an OSError and leave it untouched. Waits for the disk."""
    temporary = path.with_name(f".tmp-{path.name}-{socket.gethostname()}-{os.getpid()}")
    try:
        DISK.write(temporary, *parts)
        DISK.sync(temporary)
        DISK.rename(temporary, path)
        DISK.sync(path.parent)
    finally:
        if temporary.exists():
            with suppress(OSError):
                DISK.remove(temporary)


def make_folder(path: Path) -> None:
    """Create `path` and its parents so that they survive a power cut."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        DISK.sync(path.parent)


@contextmanager
def writing(name: object, kind: type[DppoError] = ConfigError) -> Iterator[None]:
    """Raise an error of this kind, with cause and remedy, where the file or folder `name` cannot be written."""
    try:
        yield
    except OSError as error:
        raise kind(f"{name}: cannot be written: {cause(error)} {remedy(error)}") from error


def check_writable(folder: Path, name: object) -> None:
    """Raise the error of `writing`, before work that takes long, if no file can be written into a folder."""
    with writing(name), tempfile.TemporaryFile(dir=folder):
        pass


def cause(error: OSError) -> str:
    return f"{error.strerror or error}."


def remedy(error: OSError) -> str:
    if isinstance(error, Irregular):
        return REMEDY
    if isinstance(error, TooLarge):
        return "Restore it from a backup."
    if error.errno == errno.EFBIG:
        return file_size_remedy() or REMEDIES[errno.EFBIG]
    return REMEDIES.get(error.errno or 0, "Check the disk.")
