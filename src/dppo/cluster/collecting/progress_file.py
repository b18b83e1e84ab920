"""Progress files: they show what an actor is doing, even if it is stuck in a simulator and cannot answer."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dppo.cluster.ray.token import PROGRESS, lock
from dppo.envs.activity import BYTES, Activity, ActivityRecord, look_at


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """Location of the file in which a process records its progress."""

    node_id: str
    path: str
    """"" if there is no such file."""
    node: str = ""
    """Name of the node, for messages."""


def make_progress_file() -> tuple[str, ActivityRecord]:
    """Return the path of a new file and the record that writes to it; the path is "" if the disk is full."""
    path = ""
    try:
        file, path = tempfile.mkstemp(prefix=PROGRESS)
        with os.fdopen(file, "r+b"):
            os.write(file, bytes(BYTES))  # allocates the blocks: a full disk raises here, not when the map is written
            lock(Path(path))  # held until this process ends: see `clear_abandoned`
            return path, ActivityRecord(memoryview(mmap.mmap(file, BYTES)).cast("q"))
    except OSError:
        remove_progress_file(path)
        return "", ActivityRecord()


def read_progress_file(path: str) -> Activity | None:
    """Return the progress of an actor on this node; None if the file is missing or invalid."""
    try:
        with open(path, "rb") as file:
            return look_at(memoryview(file.read(BYTES)).cast("q"))
    except (OSError, ValueError, TypeError):
        return None


def remove_progress_file(path: str) -> None:
    """Remove a file if it exists."""
    with suppress(OSError):
        os.unlink(path)


class Witness:
    """Reads the progress files of its node, in a process of its own."""

    def look(self, path: str) -> Activity | None:
        """Return the progress in the file `path`."""
        return read_progress_file(path)
