"""Programs that see to it that no rank outlives its environment: a keeper, and a guard around each rank.

`guard.py keep` starts a launcher such as mpirun, and ends all that it has started if a rank fails, or if the process of
the environment ends or asks for it. `guard.py rank CORES -- WORDS` is started by the launcher in place of a rank: it
binds itself to the rank's cores, starts the rank, reports its end to the keeper, and ends it if the keeper is gone.
`guard.py agent HOST COMMAND` is started by a launcher in place of ssh, for ranks on several nodes: the server of that
node (`node.py`) runs the command.

The file imports nothing of dppo, so that each program is small. The keeper is no child of an actor, because Ray kills
those.
"""

import ctypes
import errno
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any, NoReturn

LAUNCH = "DPPO_LAUNCH"  # variable of all processes of a launch
KEEPER = "DPPO_KEEPER"  # variable of a guard: host:port:secret
NODES = "DPPO_NODES"  # variable of an agent: address -> port and secret of the server of each further node
# variables with the number of a rank: of Open MPI, MPICH, and srun
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
SAVE_S = 3.0  # longest wait for ranks that save their state after the process of their environment has ended
TERM_S = 2.0  # from SIGTERM to SIGKILL
LAUNCHER_S = 1.0  # longest wait for the end of a launcher after its last rank
HELLO_S = 10.0  # longest wait of a guard for the connection to its keeper
POLL_S = 0.1  # between two looks at processes that are to end
BEGINNING_S = 1.0  # longest wait for processes whose environment cannot be read yet
LOOK_AT_BEGINNING_S = 0.01  # between two looks at such processes
LOOK_AT_LOG_S = 1.0  # between two looks at the size of the output of a launch
MAX_LOG_BYTES = 16 * 2**20
KEPT_LOG_BYTES = MAX_LOG_BYTES // 2  # newest part of a larger log, which stays
SHOWN_LOG_BYTES = 2**13  # end of the output of a launch that has failed, for the log of its actor
IN_ACTOR = "DPPO_ACTOR"  # variable of an actor, and of all that it starts
MIN_MARK_LENGTH = 16
SILENT_S = 5  # without an answer from the other node, after which a connection is lost
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
    if not keeper:  # started by words of `Slots.command`, without a keeper
        _replace_by(words)
    mark = f"{os.environ[LAUNCH]}.{rank}."  # with a dot at its end: rank 1 is not rank 10
    os.environ[LAUNCH] = mark
    host, port, secret = keeper.split(":")
    connection = connected(host, int(port))
    pid = os.fork()
    if not pid:
        # if the guard is killed, the rank ends with it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _replace_by(words)
    report |= {"secret": secret, "pid": pid}
    send(connection, report)
    exited = os.pidfd_open(pid)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
    ready, _, _ = select.select([connection.fileno(), exited], [], [])
    if exited not in ready:  # the keeper has closed the connection, or is gone
        end_marked(mark)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another process may have the rank's number soon
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    with suppress(OSError):
        send(connection, report | {"code": code})
    _wake_keeper(mark)
    end_marked(mark)
    os._exit(code if code >= 0 else 128 - code)


def _wake_keeper(mark: str) -> None:
    """Continue the keeper if it was stopped: after the end of its environment, no other process does that."""
    pid = int(mark.split("-")[1])
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:  # it may be on another node
        if os.fsencode(__file__) in file.read():
            os.kill(pid, signal.SIGCONT)


def _own_rank() -> int:
    return next((int(os.environ[name]) for name in RANKS if name in os.environ), 0)


def _replace_by(words: list[str]) -> NoReturn:
    try:
        os.execvp(words[0], words)
    except OSError as error:
        print(f"{words[0]}: cannot be started ({error.strerror})", file=sys.stderr, flush=True)
        os._exit(127)


# ------------------------------------------------------------------ other nodes


def connected(host: str, port: int) -> socket.socket:
    """Connect to a server; the connection fails if the other node does not answer for SILENT_S."""
    connection = socket.create_connection((host, port), HELLO_S)
    connection.settimeout(None)
    return watched(connection)


def watched(connection: socket.socket) -> socket.socket:
    """Let a connection fail after SILENT_S without an answer, so that a cut cable is noticed."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, SILENT_S // 2),
        (socket.TCP_KEEPCNT, 2),
        (socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def act_as_ssh(host: str, words: list[str]) -> NoReturn:
    """Run a command on another node, with the variables and the folder of this process; exit as it does."""
    nodes = json.loads(os.environ[NODES])
    if host not in nodes:  # a launcher may name this node, too
        _replace_by(["sh", "-c", " ".join(words)])
    port, secret = nodes[host]
    mark = secrets.token_hex(16)
    request = {"secret": secret, "cores": 0, "mark": mark, "folder": os.getcwd()}
    code = b""
    try:
        connection = connected(host, port)
        send(connection, request | {"command": " ".join(words), "variables": {**os.environ}})
        while not code:
            printed, _, code = connection.recv(65536).partition(b"\0")
            if not printed and not code:
                break
            os.write(2, printed)
    except OSError as error:
        print(f"node {host} does not answer: {error}", file=sys.stderr, flush=True)
    os._exit(int(code or b"255"))


# ------------------------------------------------------------------ the keeper


class Keeper:
    """Watches one launch: reports starts and ends of its ranks, and ends all when one fails."""

    def __init__(self, launch: dict[str, Any]) -> None:
        self._mark = f"dppo-{os.getpid()}-{secrets.token_hex(8)}"
        self._secret = secrets.token_hex(16)
        self._server = socket.create_server((launch["address"], 0))
        self._guards: dict[socket.socket, bytearray] = {}  # connection -> received part of a line
        # connection -> first report of the rank
        self._ranks: dict[socket.socket, dict[str, Any]] = {}
        self._codes: dict[int, int] = {}  # rank -> exit code
        self._is_ending = False
        port = self._server.getsockname()[1]
        keeper = f"{launch['address']}:{port}:{self._secret}"
        variables = {LAUNCH: self._mark, KEEPER: keeper}
        self._log: str = launch["log"]
        # stays open, because the folder may be removed before all ranks have ended
        self._output = os.open(self._log, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._is_in_actor = IN_ACTOR in launch["variables"]
        self._launcher = subprocess.Popen(
            launch["words"],
            cwd=launch["folder"],
            env=launch["variables"] | variables,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,
        )

    def run(self, environment_pid: int) -> None:
        """Watch the ranks until all have ended."""
        _report({"started": self._launcher.pid, "keeper": os.getpid()})
        # in a thread, because a disk may block for minutes
        threading.Thread(target=_keep_limited, args=(self._log,), daemon=True).start()
        pidfds = _pidfd(environment_pid)
        exited = os.pidfd_open(self._launcher.pid)
        is_gone = False
        while self._launcher.poll() is None and not any(self._codes.values()):
            ready = self._ready([exited, 0, *pidfds])
            # a child of the process may hold the pipe open, so that nothing could be read from it
            is_gone = bool(set(pidfds) & set(ready)) or (0 in ready and _is_closed(0))
            if is_gone:  # ranks may save their state
                select.select([exited], [], [], SAVE_S)
            if is_gone or 0 in ready:
                break
        # the launcher may have ended before its ranks' reports were read: these were not ended by this keeper
        while not any(self._codes.values()) and self._ready([], 0.0):
            pass
        shows_output = is_gone or any(self._codes.values()) or self._launcher.poll()
        self._end()
        if shows_output and self._is_in_actor:
            self._show_output()
        _report({"ended": self._launcher.wait()})

    def _ready(self, sources: list[int], timeout_s: float | None = None) -> list[Any]:
        """Wait for a source or a report of a rank; record the reports, and return the sources that are ready."""
        guards = [*self._guards]
        awaited: list[Any] = [*sources, self._server, *guards]
        ready, _, _ = select.select(awaited, [], [], timeout_s)
        for guard in guards:
            if guard in ready:
                self._read_reports(guard)
        if self._server in ready:
            self._guards[watched(self._server.accept()[0])] = bytearray()
        return ready

    def _read_reports(self, guard: socket.socket) -> None:
        """Record what a guard reports, or that its connection is closed."""
        received = b""
        is_silent = False
        try:
            received = guard.recv(4096)
        except OSError as error:
            is_silent = error.errno == errno.ETIMEDOUT
        self._guards[guard] += received
        while b"\n" in self._guards[guard]:
            line, _, remainder = self._guards[guard].partition(b"\n")
            self._guards[guard] = remainder
            report = json.loads(line)
            if report.pop("secret", "") != self._secret:
                received = b""  # not a guard of this launch
                break
            self._record(guard, report)
        if not received:
            del self._guards[guard]
            guard.close()
            rank = self._ranks.pop(guard, None)
            if rank is not None and rank["rank"] not in self._codes:
                self._record(guard, rank | {"code": -signal.SIGKILL, "is_silent": is_silent})

    def _record(self, guard: socket.socket, report: dict[str, Any]) -> None:
        if "code" in report:
            self._codes[report["rank"]] = report["code"]
            report["was_ended"] = self._is_ending
        else:
            self._ranks[guard] = report
        _report(report)

    def _show_output(self) -> None:
        """Write the end of the output into the log of the actor: the folder of the launch is removed."""
        with suppress(OSError):
            start = max(0, os.fstat(self._output).st_size - SHOWN_LOG_BYTES)
            title = f"{time.strftime('%F %T')} dppo: a solver has ended; the end of its output:"
            output = os.pread(self._output, SHOWN_LOG_BYTES, start)
            os.write(2, b"\n%b\n%b\n" % (title.encode(), output))

    def _end(self) -> None:
        """End all ranks, the launcher and their children."""
        self._is_ending = True
        for guard in self._guards:
            with suppress(OSError):
                guard.shutdown(socket.SHUT_WR)
        until = time.monotonic() + TERM_S + LAUNCHER_S
        while self._guards and time.monotonic() < until:
            self._ready([], POLL_S)
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(LAUNCHER_S if self._codes else 0)
        end_marked(self._mark)


def _keep_limited(log: str) -> NoReturn:
    """Limit the size of a log until this program ends."""
    while True:
        _limit(log)
        time.sleep(LOOK_AT_LOG_S)


def _limit(path: str) -> None:
    """Drop the older part of a log that has become too large; all of its writers append."""
    # the solver may have removed it
    with suppress(OSError), os.fdopen(os.open(path, os.O_RDWR | os.O_APPEND), "r+b") as log:
        if os.fstat(log.fileno()).st_size <= MAX_LOG_BYTES:
            return
        log.seek(-KEPT_LOG_BYTES, os.SEEK_END)
        newest = log.read(KEPT_LOG_BYTES)
        log.truncate(0)
        log.write(newest)


def end_marked(mark: str) -> None:
    """End all other processes of this node whose environment has the mark."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + TERM_S
        marked = marked_processes(mark)
        for pid in marked:
            with suppress(OSError):
                os.kill(pid, signal_number)
        while marked and time.monotonic() < until:
            time.sleep(POLL_S)
            marked = marked_processes(mark)


def marked_processes(mark: str) -> list[int]:
    """Return the other processes of this node whose environment has the mark.

    While a process begins a program, its environment is empty for some milliseconds, on a busy machine for more. So if
    none has the mark, wait a little for such processes.
    """
    assert len(mark) >= MIN_MARK_LENGTH, f"{mark!r} may be in the environment of any process"
    until = time.monotonic() + BEGINNING_S
    while True:
        marked, some_start = look_for(mark)
        if marked or not some_start or time.monotonic() > until:
            return marked
        time.sleep(LOOK_AT_BEGINNING_S)


def look_for(mark: str) -> tuple[list[int], bool]:
    """Return the processes that have the mark, and whether some process has no readable environment yet.

    The same rule stands in `hosts/keeper.py`, which does not import the package either.
    """
    marked = []
    some_start = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
            if mark.encode() in environment and int(pid) != os.getpid():
                marked.append(int(pid))
            some_start = some_start or (not environment and _is_starting(pid))
    return marked, some_start


def _is_starting(pid: str) -> bool:
    """Return whether a process is just being started: it has a program, which has no arguments yet."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        arguments = file.read()
    os.readlink(f"/proc/{pid}/exe")  # raises for zombies and threads of the kernel
    return not arguments


def _is_closed(stream: int) -> bool:
    """Return whether the other end of a readable stream is closed: then there is nothing to read."""
    with suppress(OSError):
        return not os.read(stream, 1)
    return False


def _pidfd(pid: int) -> list[int]:
    with suppress(OSError):
        return [os.pidfd_open(pid)]
    return []


def _report(report: dict[str, Any]) -> None:
    """Write a report for the process of the environment, which may be gone."""
    with suppress(OSError):
        os.write(1, json.dumps(report).encode() + b"\n")


def send(connection: socket.socket, report: dict[str, Any]) -> None:
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
        _report({"refused": getattr(error, "strerror", None) or str(error)})
        os._exit(1)
    keeper.run(launch["environment_pid"])
    os._exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "keep":
        keep()
    if sys.argv[1] == "agent":
        act_as_ssh(sys.argv[2], sys.argv[3:])
    guard_rank(sys.argv[2], sys.argv[4:])
