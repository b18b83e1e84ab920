"""A folder of files that is there whole, or not at all, and whose every byte is checked before use.

It is written under another name, flushed, and renamed. Its manifest holds the size and SHA-256 of each file,
and a checksum of its own. This tells damage, not forgery: whoever can write the folder can seal it too.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import socket
import stat
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dppo.errors import CheckpointError

FORMAT = 1
MANIFEST = "manifest.json"
FILE_NAME = re.compile(r"[a-z][a-z0-9_]*\.(json|safetensors)")
ABANDONED_S = 86_400.0  # what another machine left unfinished for a day has no writer any more


@dataclass(frozen=True)
class Manifest:
    """What a sealed folder says of itself."""

    iteration: int
    serial: int
    """Order of writing among its siblings."""
    score: float | None
    files: dict[str, tuple[int, str]]
    """Name -> size in bytes, SHA-256."""

    def encode(self) -> bytes:
        """The one way to write it: any other byte in the file is damage."""
        content = {"format": FORMAT, **asdict(self)}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return json.dumps({**content, "sha256": digest}, indent=1, sort_keys=True).encode() + b"\n"


def write_folder(path: Path, files: dict[str, bytes], *, iteration: int, serial: int, score: float | None) -> None:
    """Put all the files under the name `path`, or nothing.

    What has that name already is set aside as `NAME.replaced` first, because no rename can replace a folder
    that holds something. It is the caller's to delete.

    Raises:
        OSError: a full disk, say. What was there is still there, under its name or set aside.
    """
    seals = {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    manifest = Manifest(iteration, serial, score, seals).encode()
    temporary = _temporary(path)
    aside = path.with_name(f"{path.name}.replaced")
    try:
        temporary.mkdir()
        for name, data in {**files, MANIFEST: manifest}.items():
            _write(temporary / name, data)
            _sync(temporary / name)
        _sync(temporary)
        if path.exists():
            delete(aside)
            _rename(path, aside)
        _rename(temporary, path)
        _sync(path.parent)
    finally:
        with suppress(OSError):
            delete(temporary)


def write_file(path: Path, data: bytes) -> None:
    """Replace a file by `data`, or leave it as it was."""
    temporary = _temporary(path)
    try:
        _write(temporary, data)
        _sync(temporary)
        _rename(temporary, path)
        _sync(path.parent)
    finally:
        with suppress(OSError):
            delete(temporary)


def make_folder(path: Path) -> None:
    """Make `path` and its parents, so that it survives a power cut."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir()
        _sync(path.parent)


def delete(path: Path) -> None:
    """Take the name away first, so that what is half deleted is never taken for damaged."""
    if not path.exists():
        return
    if not path.name.startswith(".tmp-"):
        temporary = _temporary(path)
        _rename(path, temporary)
        path = temporary
    _remove(path)


def clear_abandoned(folder: Path) -> None:
    """Remove what writers that were killed left unfinished."""
    for path in folder.glob(".tmp-*"):
        host, _, pid = path.name.split("-", 2)[-1].rpartition("-")
        if host == socket.gethostname() and pid.isdigit():
            abandoned = int(pid) == os.getpid() or not _alive(int(pid))
        else:
            abandoned = time.time() - path.stat().st_mtime > ABANDONED_S
        if abandoned:
            _remove(path)


def _temporary(path: Path) -> Path:
    """A name that says who writes there: `.tmp-NAME-HOST-PID`."""
    return path.with_name(f".tmp-{path.name}-{socket.gethostname()}-{os.getpid()}")


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


# ---------------------------------------------------------------------- reading


def read_manifest(path: Path) -> Manifest:
    """The manifest of the sealed folder `path`.

    Raises:
        CheckpointError: it is missing, damaged, or of a later format.
    """
    data = _read(path / MANIFEST)
    content = parse_json(path / MANIFEST, data)
    written_as = content.get("format")
    if isinstance(written_as, int) and written_as > FORMAT:
        raise CheckpointError(f"{path}: is of format {written_as}, this dppo reads format {FORMAT}.\nUse a newer dppo.")
    try:
        files = {name: (int(size), str(digest)) for name, (size, digest) in content["files"].items()}
        score = None if content["score"] is None else float(content["score"])
        manifest = Manifest(int(content["iteration"]), int(content["serial"]), score, files)
        good = manifest.encode() == data and all(FILE_NAME.fullmatch(name) for name in files)
    except (KeyError, TypeError, ValueError, AttributeError):
        good = False
    if not good:
        raise damaged(path / MANIFEST, "a manifest that agrees with its own checksum", "another one")
    return manifest


def read_folder(path: Path) -> dict[str, bytes]:
    """The files of the sealed folder `path`, checked.

    Raises:
        CheckpointError: one is missing, is not as it was written, or is a link.
    """
    contents = {}
    for name, (size, digest) in read_manifest(path).files.items():
        contents[name] = _read(path / name, size)
        found = hashlib.sha256(contents[name]).hexdigest()
        if found != digest:
            raise damaged(path / name, f"SHA-256 {digest[:12]}...", f"{found[:12]}...")
    return contents


def _read(path: Path, size: int | None = None) -> bytes:
    """The bytes of a regular file (a link could point anywhere) of `size` bytes."""
    try:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            kind = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "something else"
            raise damaged(path, "a regular file", kind)
        if size is not None and found.st_size != size:
            raise damaged(path, f"{size:,} bytes", f"{found.st_size:,}")
        return path.read_bytes()
    except FileNotFoundError:
        raise damaged(path, "a file", "nothing") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {cause(error)}\n{remedy(error)}") from error


def parse_json(path: Path, data: bytes) -> dict[str, Any]:
    """The object in `data`, which was read from `path`."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise damaged(path, "a JSON object", looks_like(data))
    return value


def looks_like(data: bytes) -> str:
    """What someone may have put in the place of a file of ours."""
    if data[:4] == b"PK\x03\x04":
        return "a zip archive (as torch.save writes), which is never loaded because it may run code"
    if data[:1] == b"\x80":
        return "a pickle, which is never loaded because it may run code"
    return "something else" if data else "nothing"


def damaged(path: Path, expected: str, found: str) -> CheckpointError:
    """The error for a file that is not as it was written; its first line is the fact."""
    return CheckpointError(
        f"{path}: expected {expected}, found {found}.\n"
        f"The checkpoint is damaged. Give the folder of its run, and the newest good one is used."
    )


def cause(error: OSError) -> str:
    """What the system says, as a sentence."""
    return f"{error.strerror or error}."


def remedy(error: OSError) -> str:
    """What to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space there."
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "Make the folder readable and writable for you."
    return "Look after the disk."


# ---------------------------------------------------------------------- what changes the disk and its faults


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)


def _sync(path: Path) -> None:
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


def _rename(source: Path, target: Path) -> None:
    os.replace(source, target)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
