"""The program of an environment: its start, the exit codes of its ranks, its last lines, its end."""

import json
import os
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet

from dppo.log import logger

if TYPE_CHECKING:
    import psutil

GUARD = str(Path(__file__).with_name("guard.py"))
LOG = "solver.log"  # output of the program, in its folder
END_BYTES = 2**15  # last bytes of the output, which are searched for these lines
END_LINES = 12  # lines of output in an error; srun adds up to five after the last of the solver
REASON = "dppo: "  # begins the reason that `dppo.h` prints before it ends a solver
START_S = 30.0  # longest start of the keeper, on a busy machine
BY_SIGNAL = 128  # exit statuses of launchers beyond this stand for signals
EXIT_S = 2.0  # longest wait for the exit of a program after its connection has closed
END_S = 12.0  # longest wait for the keeper, which ends all ranks


class SolverError(RuntimeError):
    """A solver that ended, does not answer, or does not keep to the protocol."""


class SolverNotStarted(SolverError):
    """A solver that ended before it connected."""


class SolverKilled(SolverNotStarted):
    """A solver that a signal ended before it connected."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of a program, as its guard reports it."""

    number: int
    host: str
    pid: int
    code: int | None = None
    """Exit code; -9 if SIGKILL ended it; None while it runs."""
    was_ended: bool = False
    """True if it was ended because another rank had failed, or by `terminate`."""
    unbound: str = ""
    """The reason why it is not bound to its cores."""
    is_silent: bool = False
    """True if its node does not answer."""


class Ending(NamedTuple):
    """The end of a program, with its output."""

    outcome: str
    """A rank, its host and its exit code or signal, such as "(rank 1 on h2 by SIGKILL)"."""
    lines: Sequence[str]
    """The last lines that it printed."""

    @property
    def reason(self) -> str:
        """The last line with words; "" without any. Launchers end their messages with a rule."""
        with_words = [line.strip() for line in self.lines if any(map(str.isalnum, line))]
        return with_words[-1] if with_words else ""

    def __str__(self) -> str:
        if not self.lines:
            return f"{self.outcome}, and has printed nothing."
        return f"{self.outcome}. Its last lines:\n" + "\n".join(f"  {line}" for line in self.lines)


class Program:
    """A program that has been started, with all of its ranks, whose output goes to `solver.log` in its folder.

    A keeper, a separate program, ends all ranks within 10 s if a rank fails or this process ends.
    """

    def __init__(
        self,
        words: Sequence[str],
        folder: str,
        variables: Mapping[str, str],
        locks: Sequence[int],
        address: str = "127.0.0.1",
    ) -> None:
        """Start the program. `variables` are its environment; the keeper holds `locks` until all ranks have ended.

        `address`: address of this machine, at which guards of ranks find the keeper.

        Raise SolverError if it cannot be started.
        """
        self.ranks: dict[int, Rank] = {}
        """The ranks that guards have reported; none where the user's command names a launcher."""
        self._words = [*words]
        self._log = Path(folder, LOG)
        self._code: int | None = None  # exit code of the launcher, or of the program itself
        self._unread = b""
        self._keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", GUARD, "keep"],
            cwd="/",
            env={},  # a keeper is not among the processes that an actor has started
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=locks,
        )
        launch = {
            "words": self._words,
            "folder": folder,
            "variables": {**variables},
            "log": str(self._log),
            "address": address,
            "environment_pid": os.getpid(),
        }
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(json.dumps(launch).encode() + b"\n")
        self._keeper.stdin.flush()
        reports = self._reports(START_S)
        with suppress(subprocess.TimeoutExpired):
            # the first process, which ends after it has started the keeper
            self._keeper.wait(START_S)
        if not reports or "ended" in reports[0]:
            self._close()
            raise SolverKilled(f"command={shlex.join(self._words)}: its keeper did not start")
        if "refused" in reports[0]:
            self._close()
            raise SolverError(
                f"command={shlex.join(self._words)}: cannot be started ({reports[0]['refused']}). A program is looked "
                f"for in PATH; a path must be absolute, because each solver runs in a separate folder"
            )
        self._keeper_pid: int = reports[0]["keeper"]
        self.pid: int = reports[0]["started"]
        """Process id of the launcher, or of the program itself."""
        self._record(reports[1:])
        _PROGRAMS.add(self)

    @property
    def is_running(self) -> bool:
        """True until the end of the program has been noticed."""
        return self._code is None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal: of the first rank that failed, or of the launcher.

        None while the program runs.
        """
        self._record(self._reports(0.0))
        failed = self._failed()
        if failed is None:
            return self._code
        return failed.code

    @property
    def exit_codes(self) -> dict[int, int | None]:
        """The exit code of each rank that has started, negative for a signal; None for a rank that runs."""
        self._record(self._reports(0.0))
        return {number: rank.code for number, rank in sorted(self.ranks.items())}

    def check(self) -> None:
        """Raise SolverError if the program has ended."""
        code = self.poll()
        if code is None:
            return
        text = f"the solver ended before it connected {self.end()}"
        by_signal = code < 0 or code > BY_SIGNAL
        raise SolverKilled(text) if by_signal else SolverNotStarted(text)

    def end(self, wait_s: float = EXIT_S) -> str:
        """Return how the program ended, with its last lines, waiting for its exit."""
        return str(self.ending(wait_s))

    def ending(self, wait_s: float = EXIT_S) -> Ending:
        """Wait for the exit of the program, and return how it ended."""
        self._wait(wait_s)
        return Ending(self._outcome(), self.last_lines())

    def _outcome(self) -> str:
        rank = self._failed()
        if rank is not None and rank.is_silent:
            return f"(the node of rank {rank.number}, {rank.host}, does not answer)"
        if rank is not None and rank.code is not None:
            return f"(rank {rank.number} on {rank.host} {_in_words(rank.code)})"
        if self._code is None:
            return "(it is still running)"
        return f"({_in_words(self._code)})"

    def _failed(self) -> Rank | None:
        """Return the rank that failed first; None if none did, or the program has no other ranks."""
        for rank in self.ranks.values():
            if rank.code and not rank.was_ended:
                return rank
        return None

    def last_lines(self) -> list[str]:
        """Return the last lines of output, after the reasons before them that `dppo.h` has given.

        A library may print a hundred lines when it ends, and hide the reason.
        """
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, self._log.stat().st_size - END_BYTES))
                content = log.read()
        except OSError:
            return []
        lines = content.decode("utf-8", "replace").splitlines()
        reasons = [line for line in lines[:-END_LINES] if REASON in line]
        # equal lines of several ranks count once
        return [*dict.fromkeys(reasons), *lines[-END_LINES:]]

    def terminate(self, wait_s: float = 0.0) -> None:
        """Wait `wait_s` for the end of the program; then end all of its processes, and return when they are gone."""
        if self._wait(wait_s):
            return
        with suppress(OSError):
            os.write(self._input, b"\n")
            os.kill(self._keeper_pid, signal.SIGCONT)  # it may have been stopped
        self._wait(END_S)

    def _wait(self, wait_s: float) -> bool:
        """Return whether the keeper has ended all processes; wait `wait_s` at most for that."""
        until = time.monotonic() + wait_s
        while self._code is None:
            left_s = until - time.monotonic()
            self._record(self._reports(max(0.0, left_s)))
            if left_s <= 0:
                return self._code is not None
        return True

    @property
    def _input(self) -> int:
        assert self._keeper.stdin is not None
        return self._keeper.stdin.fileno()

    def _reports(self, timeout_s: float) -> list[dict[str, Any]]:
        """Return what the keeper has written since the last call; wait for the first line."""
        output = self._keeper.stdout
        assert output is not None
        if output.closed or not select.select([output], [], [], timeout_s)[0]:
            return []
        received = os.read(output.fileno(), 65536)
        if not received:  # it was killed
            return [{"ended": -signal.SIGKILL}]
        *lines, self._unread = (self._unread + received).split(b"\n")
        return [json.loads(line) for line in lines]

    def _record(self, reports: Sequence[dict[str, Any]]) -> None:
        for report in reports:
            if "ended" in report:
                self._code = report["ended"]
                self._close()
                continue
            rank = Rank(number=report.pop("rank"), **report)
            if rank.unbound and rank.number not in self.ranks:
                logger.warning(
                    "rank %d on %s is not bound to %s", rank.number, rank.host, rank.unbound
                )
            self.ranks[rank.number] = rank

    def _close(self) -> None:
        for stream in (self._keeper.stdin, self._keeper.stdout):
            assert stream is not None
            stream.close()


_PROGRAMS = WeakSet[Program]()


def running_programs() -> list[Program]:
    """List the programs that this process has started and that still run."""
    return [program for program in _PROGRAMS if program.is_running]


def processes_of_programs() -> "list[psutil.Process]":
    """Return launchers, guards and ranks of the running programs, which are not child processes of this one."""
    import psutil

    processes = []
    for program in running_programs():
        with suppress(psutil.Error):
            launcher = psutil.Process(program.pid)
            processes += [launcher, *launcher.children(recursive=True)]
    return processes


def _in_words(code: int) -> str:
    return f"by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
