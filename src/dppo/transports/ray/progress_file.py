"""The file in which an actor records its progress, so that others can read it even while the actor is stuck."""

import faulthandler
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from dppo.envs.activity import BYTES, Activity, ActivityRecord
from dppo.files import lock
from dppo.transports.ray.environment import PROGRESS

STACKS_S = 0.3  # longest wait for a process that writes its stacks
PY_SPY_S = 5.0  # longest wait for py-spy, which reads the stacks
MOST_TEXT = 100_000  # characters of stacks


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """Location of the file in which a process records its progress."""

    node_id: str
    path: str  # "" if there is no such file
    node: str = ""  # name of the node, for messages
    log: str = ""  # path of the log there; "" if there is none
    pid: int = 0

    def read(self) -> Activity | None:
        """Return the progress of a process on this node; None if the file is missing or invalid."""
        try:
            with open(self.path, "rb") as file:
                return ActivityRecord(memoryview(file.read(BYTES)).cast("q")).look()
        except (OSError, ValueError, TypeError):
            return None

    def stacks(self) -> str:
        """Return the stacks of all threads of a process on this node, if py-spy is installed also of native code.

        "" if they cannot be read. Those of a process that is stopped (SIGSTOP) are read by py-spy alone.
        """
        stacks = ""
        with suppress(OSError):
            os.kill(self.pid, signal.SIGUSR2)
            time.sleep(STACKS_S)  # no end is marked
            stacks = Path(f"{self.path}.stacks").read_text(errors="replace")
        beside_python = Path(sys.executable).parent
        program = which("py-spy", path=f"{beside_python}{os.pathsep}{os.environ.get('PATH', '')}")
        if program is None:
            return stacks[:MOST_TEXT]
        # only --nonblocking reads a process that is stopped
        for option in ("--native", "--nonblocking"):
            with suppress(OSError, subprocess.TimeoutExpired):
                command = [program, "dump", option, "--pid", str(self.pid)]
                dump = subprocess.run(command, capture_output=True, timeout=PY_SPY_S, check=False)
                stacks += f"\npy-spy dump {option}:\n{(dump.stdout + dump.stderr).decode(errors='replace')}"
                if dump.returncode == 0:
                    break
        return stacks[:MOST_TEXT]

    def remove(self) -> None:
        """Remove the file, and the file of the stacks, if they exist."""
        for path in (self.path, f"{self.path}.stacks"):
            with suppress(OSError):
                os.unlink(path)


def make_progress_file() -> tuple[str, ActivityRecord]:
    """Return the path of a new file and the record that writes to it; the path is "" if the disk is full."""
    path = ""
    try:
        file, path = tempfile.mkstemp(prefix=PROGRESS)
        with os.fdopen(file, "r+b"):
            # allocates the blocks: a full disk raises here, not when the map is written
            os.write(file, bytes(BYTES))
            lock(Path(path))  # held until this process ends: see `remove_abandoned`
            return path, ActivityRecord(memoryview(mmap.mmap(file, BYTES)).cast("q"))
    except OSError:
        ProgressFile("", path).remove()
        return "", ActivityRecord()


def write_stacks_on_signal(path: str) -> None:
    """Let SIGUSR2 write the stacks of all threads next to the progress file `path`, even if this process is stuck."""
    if not path:  # the disk is full
        return
    with suppress(OSError):
        faulthandler.register(signal.SIGUSR2, open(f"{path}.stacks", "w"))  # noqa: SIM115  open as long as the process
