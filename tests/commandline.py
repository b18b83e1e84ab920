"""`python -m dppo` as a person runs it: a process in a folder of its own, which gets signals and leaves traces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import dppo

SOURCE = Path(dppo.__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent
MARKER = "DPPO_TEST_MARKER"  # a variable that all processes of a command inherit, and no other has


def fresh_environment(**changes: str) -> dict[str, str]:
    """That of a user who has set nothing for Ray; modules of `tests` can be imported."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_") and name != "CI"}
    return inherited | {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(TESTS)))} | changes


class Command:
    """One `python -m dppo WORDS` in a session of its own. Whatever it started is gone when the `with` ends."""

    def __init__(self, words: Sequence[str], cwd: Path, *, program: Sequence[str] = ("-m", "dppo"), **env: str) -> None:
        self.marker = uuid.uuid4().hex
        self._out, self._err = cwd / f"stdout-{self.marker}", cwd / f"stderr-{self.marker}"
        # Files, not pipes: whoever inherits a pipe keeps it open, and reading it would wait for them all.
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                [sys.executable, *program, *words],
                cwd=cwd,
                env=fresh_environment(**env) | {MARKER: self.marker},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def __enter__(self) -> Command:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for pid in [self.pid, *self.processes()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        if error is not None and sys.version_info >= (3, 11):
            error.add_note(f"stdout:\n{self.out}\nstderr:\n{self.err}")

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def wait(self, timeout_s: float) -> int:
        """The exit code; 128 + n as a shell says it where signal n ended the process."""
        code = self._process.wait(timeout_s)
        return code if code >= 0 else 128 - code

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait for something that the command does while it runs."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.running, f"ended with {self._process.returncode} before it happened"
            assert time.monotonic() < deadline, f"did not happen within {timeout_s:g} s"
            time.sleep(0.05)

    def send(self, number: int) -> None:
        """Send a signal to the command alone, as `kill` does; do nothing if it has ended."""
        self._process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """SIGINT to all processes of the terminal's foreground group, which the command's children may be in too."""
        os.killpg(self.pid, signal.SIGINT)

    def processes(self) -> dict[int, str]:
        """What the command has started, directly or not, and still runs: command lines by process id."""
        return {pid: line for pid, line in marked(self.marker).items() if pid != self.pid}

    def leaves_nothing_within(self, timeout_s: float, *, but: Sequence[str] = ()) -> None:
        """See that no process of the command is left behind, leaving aside those whose command line is in `but`."""
        deadline = time.monotonic() + timeout_s
        while left := {pid: line for pid, line in self.processes().items() if line not in but}:
            assert time.monotonic() < deadline, f"still there after {timeout_s:g} s: {left}"
            time.sleep(0.1)


def run(words: Sequence[str], cwd: Path, timeout_s: Any = 90.0, **how: Any) -> tuple[int, str, str]:
    """Run a command, started as `Command` says, to its end: exit code, stdout, stderr."""
    with Command(words, cwd, **how) as command:
        return command.wait(timeout_s), command.out, command.err


def marked(marker: str) -> dict[int, str]:
    """Processes with this marker; a zombie has no environment any more, and does not count."""
    wanted = f"{MARKER}={marker}".encode()
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = command_line(int(folder.name))
    return found


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()


def descendants(pid: int) -> set[int]:
    """All processes that `pid` has started, directly or not."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found, newest = set[int](), {pid}
    while newest := {child for child, parent in parents.items() if parent in newest} - found:
        found |= newest
    return found


def actors_of_this_process() -> set[int]:
    """Process ids of the PPOActors of the Ray that this process started: never those of somebody else."""
    found = set()
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if "ray::PPOActor" in command_line(pid):
                found.add(pid)
    return found
