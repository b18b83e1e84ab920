"""The program of a solver: its start, how it ended, its last lines, its end."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dppo.remote.protocol import SolverError

LOG = "solver.log"  # in its folder
END_BYTES = 4096
END_LINES = 8
EXIT_S = 2.0  # for a program to exit after its connection has closed
STOP_S = 10.0  # for a program to write its files, after the reply to stop
TERM_S = 2.0  # from SIGTERM to SIGKILL


class Program:
    """A program that dppo has started in a session of its own, whose output goes to `solver.log` in its folder."""

    def __init__(
        self, command: Sequence[str] | str, folder: str, variables: Mapping[str, str]
    ) -> None:
        """Start the program; a text is split as a shell does. Raise SolverError if it cannot be started."""
        self.words = shlex.split(command) if isinstance(command, str) else [*command]
        self._log = Path(folder, LOG)
        with open(self._log, "ab") as log:
            try:
                self._process = subprocess.Popen(
                    self.words,
                    cwd=folder,
                    env={**os.environ, **variables},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            except (OSError, IndexError, ValueError) as error:
                reason = getattr(error, "strerror", None) or "it is empty"
                raise SolverError(
                    f"command={shlex.join(self.words)}: cannot be started ({reason}). It is looked for in PATH, or as "
                    f"an absolute path, because each solver runs in a folder of its own"
                ) from None

    def check(self) -> None:
        """Raise SolverError if the program has ended."""
        if self._process.poll() is not None:
            raise SolverError(f"the solver ended before it connected {self.end()}")

    def end(self, wait_s: float = EXIT_S) -> str:
        """Return how the program ended, with its last lines, waiting for its exit."""
        try:
            status = self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            outcome = f"(process {self._process.pid} is still running)"
        else:
            outcome = f"(exit status {status})"
            if status < 0:
                outcome = f"(by {signal.Signals(-status).name})"
        lines = self._last_lines()
        if not lines:
            return f"{outcome}, and has printed nothing."
        return f"{outcome}. Its last lines:\n" + "\n".join(f"  {line}" for line in lines)

    def _last_lines(self) -> list[str]:
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, self._log.stat().st_size - END_BYTES))
                content = log.read()
        except OSError:
            return []
        return content.decode("utf-8", "replace").splitlines()[-END_LINES:]

    def stop(self, wait_s: float) -> None:
        """Wait for the exit of the program; then end all processes of its session."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._signal(signal.SIGTERM)
        until = time.monotonic() + TERM_S
        while self._is_alive() and time.monotonic() < until:
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(TERM_S)

    def _is_alive(self) -> bool:
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except OSError:
            return False
        return True

    def _signal(self, number: int) -> None:
        with suppress(OSError):
            os.killpg(self._process.pid, number)
