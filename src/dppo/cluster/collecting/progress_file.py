"""A small file in which an actor keeps its progress: a process that is stuck in a simulator can still be looked at."""

from __future__ import annotations

import mmap
import os
import tempfile
from contextlib import suppress

from dppo.ppo.progress import BYTES, Progress, ProgressRecord, look_at


def make_progress_file() -> tuple[str, ProgressRecord]:
    """Return the path of a new file, and the record that writes into it; "" where there is no room for one."""
    try:
        file, path = tempfile.mkstemp(prefix="dppo-progress-")
    except OSError:
        return "", ProgressRecord()
    try:
        os.write(file, bytes(BYTES))  # its blocks exist before they are mapped: a full disk is an error here, not later
        return path, ProgressRecord(memoryview(mmap.mmap(file, BYTES)).cast("q"))
    except OSError:
        remove_progress_file(path)
        return "", ProgressRecord()
    finally:
        os.close(file)


def read_progress_file(path: str) -> Progress | None:
    """Return what an actor on this node is doing; None if that cannot be known."""
    try:
        with open(path, "rb") as file:
            return look_at(memoryview(file.read(BYTES)).cast("q"))
    except (OSError, ValueError, TypeError):
        return None


def remove_progress_file(path: str) -> None:
    """Remove a file if it is there."""
    with suppress(OSError):
        os.unlink(path)


class Witness:
    """Looks at the actors of its node, from a process of its own."""

    def look(self, path: str) -> Progress | None:
        """Return what the actor that keeps its progress in `path` is doing."""
        return read_progress_file(path)
