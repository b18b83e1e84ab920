"""Progress files: they show what an actor is doing, even if it is stuck in a simulator and cannot answer."""

import faulthandler
import mmap
import os
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dppo.cluster.ray.environment import PROGRESS
from dppo.envs.activity import BYTES, Activity, ActivityRecord
from dppo.files import lock

STACKS_S = 0.3  # for a process to write its stacks
MOST_TEXT = 100_000  # characters of stacks


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """Location of the file in which a process records its progress."""

    node_id: str
    path: str
    """"" if there is no such file."""
    node: str = ""
    """Name of the node, for messages."""
    log: str = ""
    """Path of the log there; "" if there is none."""
    pid: int = 0


def make_progress_file() -> tuple[str, ActivityRecord]:
    """Return the path of a new file and the record that writes to it; the path is "" if the disk is full."""
    path = ""
    try:
        file, path = tempfile.mkstemp(prefix=PROGRESS)
        with os.fdopen(file, "r+b"):
            os.write(file, bytes(BYTES))  # allocates the blocks: a full disk raises here, not when the map is written
            lock(Path(path))  # held until this process ends: see `remove_abandoned`
            return path, ActivityRecord(memoryview(mmap.mmap(file, BYTES)).cast("q"))
    except OSError:
        remove_progress_file(path)
        return "", ActivityRecord()


def read_progress_file(path: str) -> Activity | None:
    """Return the progress of an actor on this node; None if the file is missing or invalid."""
    try:
        with open(path, "rb") as file:
            return ActivityRecord(memoryview(file.read(BYTES)).cast("q")).look()
    except (OSError, ValueError, TypeError):
        return None


def remove_progress_file(path: str) -> None:
    """Remove a file, and that of the stacks, if they exist."""
    for one in (path, f"{path}.stacks"):
        with suppress(OSError):
            os.unlink(one)


def write_stacks_on_signal(path: str) -> None:
    """Let SIGUSR2 write the stacks of all threads beside the progress file `path`, wherever this process is stuck."""
    with suppress(OSError):
        faulthandler.register(signal.SIGUSR2, open(f"{path}.stacks", "w"))  # noqa: SIM115  open as long as the process


def read_stacks(path: str, pid: int) -> str:
    """Return the stacks of all threads of a process on this node; "" if they cannot be read."""
    with suppress(OSError):
        os.kill(pid, signal.SIGUSR2)
        time.sleep(STACKS_S)  # no end is marked
        return Path(f"{path}.stacks").read_text(errors="replace")[:MOST_TEXT]
    return ""


def innermost(stacks: str) -> str:
    """Return the innermost frame of the main thread, which comes last: `; it was in File "sim.py", line 12 in step`."""
    main = stacks.rpartition("most recent call first")[2].splitlines()
    return next((f"; it was in {line.strip()}" for line in main if line.strip().startswith("File")), "")


class Witness:
    """Reads the progress files of its node, in a process of its own."""

    def look(self, path: str) -> Activity | None:
        """Return the progress in the file `path`."""
        return read_progress_file(path)

    def stacks(self, path: str, pid: int) -> str:
        """Return the stacks of a process: see `read_stacks`."""
        return read_stacks(path, pid)
