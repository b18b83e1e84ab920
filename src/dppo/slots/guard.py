"""Two programs that see to it that no rank outlives its environment: a keeper, and a guard around each rank.

`guard.py keep` starts a launcher such as mpirun, and ends all that it has started if a rank fails, or if the process of
the environment ends or says so. `guard.py rank CORES -- WORDS` is started by the launcher in place of a rank: it binds
itself to the rank's cores, starts the rank, reports its end to the keeper, and ends it if the keeper is gone.

The file imports nothing of dppo, so that each program is small. The keeper is no child of an actor, because Ray kills
those.
"""

import ctypes
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any, NoReturn

LAUNCH = "DPPO_LAUNCH"  # variable of all processes of a launch
KEEPER = "DPPO_KEEPER"  # variable of a guard: host:port:secret
# of Open MPI, MPICH, and srun
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
SAVE_S = 3.0  # for ranks to end by themselves after the process of their environment has ended
TERM_S = 2.0  # from SIGTERM to SIGKILL
LAUNCHER_S = 1.0  # for a launcher to end after its last rank
HELLO_S = 10.0  # for a guard to reach its keeper
LOOK_S = 0.1
PR_SET_PDEATHSIG = 1


# ------------------------------------------------------------------ a rank


def guard_rank(cores_of_ranks: str, words: list[str]) -> NoReturn:
    """Be the guard of one rank: exit as the rank does."""
    rank = _own_rank()
    report: dict[str, Any] = {"rank": rank, "host": socket.gethostname()}
    if cores_of_ranks:
        cores = set(map(int, cores_of_ranks.split(":")[rank].split(",")))
        try:
            os.sched_setaffinity(0, cores)
        except OSError as error:
            report["unbound"] = f"cores {sorted(cores)}: {error.strerror}"
    keeper = os.environ.pop(KEEPER, "")
    if not keeper:  # slots.command: somebody else looks after the ranks
        _replace_by(words)
    mark = f"{os.environ[LAUNCH]}.{rank}"
    os.environ[LAUNCH] = mark
    host, port, secret = keeper.split(":")
    connection = socket.create_connection((host, int(port)), HELLO_S)
    connection.settimeout(None)
    pid = os.fork()
    if not pid:
        # if the guard is killed, the rank ends with it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _replace_by(words)
    report |= {"secret": secret, "pid": pid}
    _send(connection, report)
    exited = os.pidfd_open(pid)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    ready, _, _ = select.select([connection.fileno(), exited], [], [])
    if exited not in ready:  # the keeper says so, or is gone
        _end_marked(mark)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with suppress(OSError):
        _send(connection, report | {"code": code})
    _end_marked(mark)
    os._exit(code if code >= 0 else 128 - code)


def _own_rank() -> int:
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)


def _replace_by(words: list[str]) -> NoReturn:
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]}: cannot be started ({error.strerror})", file=sys.stderr, flush=True)
        os._exit(127)


# ------------------------------------------------------------------ the keeper


class Keeper:
    """Looks after one launch: reports what its ranks do, and ends them."""

    def __init__(self, launch: dict[str, Any]) -> None:
        self._mark = f"dppo-{os.getpid()}-{secrets.token_hex(8)}"
        self._secret = secrets.token_hex(16)
        self._server = socket.create_server(("127.0.0.1", 0))
        self._guards: dict[socket.socket, bytearray] = {}  # with what is left of a line
        self._ranks: dict[socket.socket, dict[str, Any]] = {}  # the first report of each
        self._codes: dict[int, int] = {}  # of ranks that have ended
        self._is_ending = False
        port = self._server.getsockname()[1]
        variables = {LAUNCH: self._mark, KEEPER: f"127.0.0.1:{port}:{self._secret}"}
        log = os.open(launch["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._launcher = subprocess.Popen(
            launch["words"],
            cwd=launch["folder"],
            env=launch["variables"] | variables,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        os.close(log)

    def run(self, environment_pid: int) -> None:
        """Look after the ranks until all have ended."""
        _tell({"started": self._launcher.pid})
        pidfds = _pidfd(environment_pid)
        exited = os.pidfd_open(self._launcher.pid)
        while self._launcher.poll() is None and not any(self._codes.values()):
            ready = self._ready([exited, 0, *pidfds])
            # a child of the process may hold the pipe open, so that nothing could be read from it
            is_gone = bool(set(pidfds) & set(ready)) or (0 in ready and _is_closed(0))
            if is_gone:  # ranks may save their state
                select.select([exited], [], [], SAVE_S)
            if is_gone or 0 in ready:
                break
        self._end()
        _tell({"ended": self._launcher.wait()})

    def _ready(self, sources: list[int], timeout_s: float | None = None) -> list[Any]:
        """Return the sources that are ready; wait for one of them, or for news of a rank, and note these."""
        guards = [*self._guards]
        awaited: list[Any] = [*sources, self._server, *guards]
        ready, _, _ = select.select(awaited, [], [], timeout_s)
        for guard in guards:
            if guard in ready:
                self._hear(guard)
        if self._server in ready:
            self._guards[self._server.accept()[0]] = bytearray()
        return ready

    def _hear(self, guard: socket.socket) -> None:
        """Take note of what a guard reports, or that its connection is closed."""
        received = b""
        with suppress(OSError):
            received = guard.recv(4096)
        self._guards[guard] += received
        while b"\n" in self._guards[guard]:
            line, _, left = self._guards[guard].partition(b"\n")
            self._guards[guard] = left
            report = json.loads(line)
            if report.pop("secret", "") != self._secret:
                received = b""  # a stranger
                break
            self._note(guard, report)
        if not received:
            del self._guards[guard]
            guard.close()
            rank = self._ranks.pop(guard, None)
            if rank is not None and rank["rank"] not in self._codes:
                self._note(guard, rank | {"code": -signal.SIGKILL})

    def _note(self, guard: socket.socket, report: dict[str, Any]) -> None:
        if "code" in report:
            self._codes[report["rank"]] = report["code"]
            report["was_ended"] = self._is_ending
        else:
            self._ranks[guard] = report
        _tell(report)

    def _end(self) -> None:
        """End all ranks, the launcher and their children."""
        self._is_ending = True
        for guard in self._guards:
            with suppress(OSError):
                guard.shutdown(socket.SHUT_WR)
        until = time.monotonic() + TERM_S + LAUNCHER_S
        while self._guards and time.monotonic() < until:
            self._ready([], LOOK_S)
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(LAUNCHER_S if self._codes else 0)
        _end_marked(self._mark)


def _end_marked(mark: str) -> None:
    """End all processes of this node whose environment has the mark, but this one."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + TERM_S
        marked = _marked(mark.encode())
        for pid in marked:
            with suppress(OSError):
                os.kill(pid, number)
        while marked and time.monotonic() < until:
            time.sleep(LOOK_S)
            marked = _marked(mark.encode())


def _marked(mark: bytes) -> list[int]:
    pids = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            # a zombie has no environment any more
            if mark in file.read() and int(pid) != os.getpid():
                pids.append(int(pid))
    return pids


def _is_closed(stream: int) -> bool:
    """Return whether the other end of a stream that can be read is closed."""
    with suppress(OSError):
        return not os.read(stream, 1)
    return False


def _pidfd(pid: int) -> list[int]:
    with suppress(OSError):
        return [os.pidfd_open(pid)]
    return []


def _tell(report: dict[str, Any]) -> None:
    """Write a line for the process of the environment, which may be gone."""
    with suppress(OSError):
        os.write(1, json.dumps(report).encode() + b"\n")


def _send(connection: socket.socket, report: dict[str, Any]) -> None:
    connection.sendall(json.dumps(report).encode() + b"\n")


def keep() -> NoReturn:
    with open(0, "rb", buffering=0, closefd=False) as requests:
        launch = json.loads(requests.readline())
    if os.fork():
        os._exit(0)
    os.setsid()
    try:
        keeper = Keeper(launch)
    except (OSError, ValueError) as error:
        _tell({"refused": getattr(error, "strerror", None) or str(error)})
        os._exit(1)
    keeper.run(launch["environment_pid"])
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep()
    guard_rank(sys.argv[2], sys.argv[4:])
