"""Run `python -m dppo` in its own process and folder, send it signals, and inspect what it leaves behind."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import pytest
from processes import command_line

import dppo
from dppo.commands.train import COMMAND, Arguments, arguments_of
from dppo.records.files.run_folder import describe_process

SOURCE = Path(dppo.__file__).resolve().parents[1]
TESTS = Path(__file__).resolve().parent
Typed = Callable[..., str]
"""A function that runs a command line in this process, without `dppo`, and returns what it prints: see conftest.py."""
MARKER = "DPPO_TEST_MARKER"  # a variable that only the processes of one command inherit
# Variables with which Ray detects a dead node in seconds; by default it takes a quarter of a minute.
QUICK_CHECKS = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def parse(argv: list[str]) -> Arguments:
    """Return the settings that `dppo train` takes from these words."""
    return arguments_of(*COMMAND.split(argv)[1:], COMMAND.prog)


def fresh_environment(**changes: str) -> dict[str, str]:
    """Return this environment without settings of Ray, but for its priority, and with `tests` on the import path."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and name != "CI"
    }
    ours = {"PYTHONPATH": os.pathsep.join((str(SOURCE), str(TESTS))), "RAY_worker_niceness": "0"}
    return inherited | ours | changes


def run_as_program(text: str, file: Path | None = None) -> dict[str, Any]:
    """Run a program in this process, as `python FILE` does, or as a notebook without a file; return its names."""
    program = ModuleType("__main__")
    if file is not None:
        file.write_text(text, encoding="utf8")
        program.__file__ = str(file)
    describe_process.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "__main__", program)
        exec(text, vars(program))
    describe_process.cache_clear()
    return vars(program)


class Command:
    """One `python -m dppo WORDS` in its own session; leaving the `with` kills all processes that it started."""

    def __init__(
        self,
        words: str | Sequence[str],
        cwd: Path,
        *,
        program: Sequence[str] = ("-m", "dppo"),
        **env: str,
    ) -> None:
        if isinstance(words, str):
            words = shlex.split(words)
        self.marker = uuid.uuid4().hex
        self._out = cwd / f"stdout-{self.marker}"
        self._err = cwd / f"stderr-{self.marker}"
        # Files, not pipes: reading a pipe would wait for all processes that have inherited it.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
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
        """Return the exit code; as in a shell, 128 + n if signal n ended the process."""
        code = self._process.wait(timeout_s)
        return code if code >= 0 else 128 - code

    def wait_until(self, happened: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Wait for an event while the command runs."""
        deadline = time.monotonic() + timeout_s
        while not happened():
            assert self.running, (
                f"the command ended with {self._process.returncode} before the event"
            )
            assert time.monotonic() < deadline, f"no event within {timeout_s:g} s"
            time.sleep(0.05)

    def send(self, number: int) -> None:
        """Send a signal to the command alone, as `kill` does; do nothing if it has ended."""
        self._process.send_signal(number)

    def press_ctrl_c(self) -> None:
        """Send SIGINT to the process group of the command, as a terminal does; its children may be in it, too."""
        os.killpg(self.pid, signal.SIGINT)

    def processes(self) -> dict[int, str]:
        """Return the command lines of all running descendants of the command, by process id."""
        return {pid: line for pid, line in marked(self.marker).items() if pid != self.pid}

    def leaves_nothing_within(self, timeout_s: float, *, but: Sequence[str] = ()) -> None:
        """Assert that all processes of the command end, except those whose command line is in `but`."""
        deadline = time.monotonic() + timeout_s
        while running := {pid: line for pid, line in self.processes().items() if line not in but}:
            assert time.monotonic() < deadline, f"still running after {timeout_s:g} s: {running}"
            time.sleep(0.1)


def run(
    words: Sequence[str],
    cwd: Path,
    timeout_s: Any = 90.0,
    program: Any = ("-m", "dppo"),
    **env: str,
) -> tuple[int, str, str]:
    """Run a `Command` to its end; return the exit code, stdout and stderr."""
    with Command(words, cwd, program=program, **env) as command:
        return command.wait(timeout_s), command.out, command.err


def output_of(program: Sequence[str], cwd: Path, **env: str) -> str:
    """Run `python PROGRAM` to its end; return what it printed on stdout if it succeeded."""
    code, out, err = run([], cwd, 250, program, **env)
    assert code == 0, err
    return out


def marked(marker: str) -> dict[int, str]:
    """Return the command lines of all processes with this marker; zombies have no environment and do not count."""
    variable = f"{MARKER}={marker}".encode()
    running = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                running[int(folder.name)] = command_line(int(folder.name))
    return running
