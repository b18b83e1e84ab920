"""The log of an actor, and its keeper: a program that limits the log's size and ends processes that outlive the actor.

The keeper imports nothing of dppo, so that it is small. It is no child of the actor, because Ray kills those. All that
an actor has started, even detached or through others, has MARKER in its environment; its forks map that file.
"""

import errno
import fcntl
import os
import queue
import select
import signal
import socket
import struct
import sys
import threading
import time
from contextlib import suppress

MARKER = "DPPO_ACTOR"
MAX_LOG_BYTES = 2 * 2**20  # older parts of a larger log are moved to LOG.1
POLL_S = 0.5  # between two looks at the size of the log
BEGINNING_S = 1.0  # longest wait for processes whose environment cannot be read yet
LOOK_AT_BEGINNING_S = 0.01  # between two looks at such processes
GRACE_S = 2.0  # from SIGTERM to SIGKILL, for a simulator to give back its licence
PARENT_S = 0.05  # until the parent of the actor has reaped it
PIDFD_GET_INFO = 0xC040FF0B  # since Linux 6.15
PIDFD_INFO_EXIT = 8
PIDFD_INFO = "=QQ11Ii"  # struct pidfd_info
CLOSED = "when dppo closed it"  # at the end of the run, or to replace it
# exit codes that Ray leaves when it ends an actor; None: the kernel does not show it
CODES_OF_A_CLOSED_ACTOR = (None, 0, 1)
LACK = "by SIGKILL of the kernel, for lack of memory. Use fewer actors there, or set recycle_after"
LOOKS_FOR_MEMORY = 20  # looks in which a process that the kernel kills for lack of memory ends
# logs in the folder for temporary files of a node that does not share the run folder
KEPT_LOGS = 20
END_LINES = 12  # last lines of a log that are reported
END_CHARACTERS = 200  # length of each of these lines
END_BYTES = 2**15  # last bytes of a log in which these lines are looked for
# longest wait for the keeper's own line at the very end, also of the keeper itself
LAST_LINE_S = 1.0
HEAD_PERIOD_S = 10.0  # between two connections to Ray's head
HEAD_LOST_S = 60.0  # without a connection to the head: a cluster gives up a node, and a run Ray, in about this time
CONNECT_S = 2.0  # longest wait for a connection to the head
ENDING_S = 5.0  # from SIGTERM to SIGKILL, for an actor that closes its environments
RAYLET = "raylet"  # program of Ray that starts actors
UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)


def begin_log(path: str, marker: str, driver: int = 0, head: str = "") -> str:
    """Start a keeper, and redirect the output of this process to a log; return the path of the log, "" if that fails.

    The log is `path`, or without one a file beside `marker`. The keeper ends this process if the process `driver` ends,
    if the raylet ends that has started this process, or if the network to `head`, the host:port of Ray's GCS, is cut
    for a minute. Without Linux's /proc, no keeper is started.
    """
    import subprocess  # not in the program

    marker = marker or f"dppo-actor-{os.getpid()}-{time.time_ns()}"
    os.environ[MARKER] = marker
    try:
        path = path or marker.replace("dppo-progress", "dppo-log")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if os.fstat(log).st_nlink > 1 or not os.path.exists("/proc/self/maps"):
            return ""  # a hard link leads to a file of another user
        os.write(log, f"\n{time.strftime('%F %T')} dppo: process {os.getpid()} began\n".encode())
        arguments = [str(os.getpid()), marker, path, str(driver), head]
        subprocess.run(
            [sys.executable, "-I", "-S", __file__, *arguments],
            env={},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            check=False,
        )
    except OSError:
        return ""
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    return path


def end_of_log(path: str, pid: int) -> tuple[str, list[str]]:
    """Return how a process ended, "" if that is not known, and the last lines that it printed."""
    last_line = _last_line(pid)
    until = time.monotonic() + LAST_LINE_S
    lines: list[str] = []
    numbers: list[int] = []
    while not numbers and time.monotonic() < until:
        with suppress(OSError):
            lines = _lines_of(path, pid)
        numbers = [number for number, line in enumerate(lines) if last_line in line]
        time.sleep(0.02)
    end = ""
    if numbers:
        end = lines[numbers[-1]].partition(last_line)[2].strip()
        # what follows are the last words of programs that outlive the process
        del lines[numbers[-1] :]
    fatal_lines = [
        number for number, line in enumerate(lines) if line.startswith("Fatal Python error")
    ]
    if fatal_lines and not end.startswith("with exit code"):
        return end, lines[fatal_lines[-1] :][:END_LINES]  # its stack begins with the latest call
    return end, lines[-END_LINES:]


def _lines_of(path: str, pid: int) -> list[str]:
    """Return the last lines of a process, without characters that a terminal would obey."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(-min(END_BYTES, size), os.SEEK_END)
        text = file.read().decode("utf8", "replace")
    printable = "".join(character if character.isprintable() else "\n" for character in text)
    process_text = printable.rpartition(f"dppo: process {pid} began")[2]
    return [line[:END_CHARACTERS] for line in process_text.splitlines() if line.strip()]


def _last_line(pid: int, status: str = "") -> str:
    return f"dppo: process {pid} ended {status}".rstrip()


# ------------------------------------------------------------------ the program


class _Head:
    """The connection to Ray's head: an actor without it for long has been replaced.

    Ray itself ends the processes of a host that is cut off only after many minutes.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._next_look = time.monotonic() + HEAD_PERIOD_S
        self._failing_since = 0.0

    def is_lost(self) -> bool:
        now = time.monotonic()
        if not self._address or now < self._next_look:
            return False
        self._next_look = now + HEAD_PERIOD_S
        if _is_reachable(self._address):
            self._failing_since = 0.0
            return False
        self._failing_since = self._failing_since or now
        return now - self._failing_since >= HEAD_LOST_S


class _Raylet:
    """The parent of an actor: without it, the actor has been replaced.

    Ray itself looks only whether the raylet's process exists, which it does for ever as a zombie: in a container whose
    first process reaps no others.
    """

    def __init__(self, pid: int) -> None:
        """Remember the parent of the process `pid`, if that is a raylet."""
        self._child = pid
        self._pid = 0
        parent = _parent(pid)
        with suppress(OSError), open(f"/proc/{parent}/comm", encoding="ascii") as file:
            if file.read().strip() == RAYLET:
                self._pid = parent

    def is_lost(self) -> bool:
        # a process whose parent has ended gets another one at once
        return self._pid > 0 and _parent(self._child) not in (self._pid, 0)


def _parent(pid: int) -> int:
    """Return the id of the parent of a process; 0 if the process has ended, or /proc cannot be read."""
    with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
        # the name of the program, in parentheses, may contain anything
        return int(file.read().rpartition(b")")[2].split()[1])
    return 0


def _is_reachable(address: str) -> bool:
    """Return whether there is a network to a host; no process needs to listen at the port."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except TimeoutError:
        return False
    except OSError as error:
        return error.errno not in UNREACHABLE
    return True


def keep(pid: int, marker: str, log: str, driver: int, head_address: str) -> None:
    """Wait for the end of the process `pid`, append its exit code to its log, and end processes that it has left."""
    has_progress_file = os.path.exists(marker)
    # the actor waits until this process has forked: later, its raylet may have ended already
    raylet = _Raylet(pid)
    if os.fork():
        os._exit(0)
    os.setsid()
    pidfds = list[int]()
    with suppress(OSError):  # before Linux 5.3, or it has ended
        pidfds = [os.pidfd_open(pid)]
    last_line = queue.Queue[str]()
    # in a thread, because a disk may block for minutes
    log_thread = threading.Thread(target=_keep_log, args=(log, last_line), daemon=True)
    log_thread.start()
    kills = [_kills_for_memory()]
    head = _Head(head_address)
    ending_since = 0.0
    while os.path.exists(f"/proc/{pid}") and not select.select(pidfds, [], [], POLL_S)[0]:
        if driver and not os.path.exists(f"/proc/{driver}"):
            os.kill(pid, signal.SIGTERM)  # Ray would end it in some seconds, without a warning
            driver = 0
        if head.is_lost() or raylet.is_lost():
            now = time.monotonic()
            is_late = ending_since and now - ending_since > ENDING_S
            if is_late or not ending_since:
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL if is_late else signal.SIGTERM)
            ending_since = ending_since or now
        kills = [*kills[-LOOKS_FOR_MEMORY:], _kills_for_memory()]
    # an actor that closes, and a driver that ends it, remove the file first; after a death, the driver reads this log
    was_closed = has_progress_file and not os.path.exists(marker)
    time.sleep(PARENT_S)  # before its parent has reaped it, the kernel does not show its exit code
    status = _status(pidfds, for_memory=_kills_for_memory() > kills[0], was_closed=was_closed)
    last_line.put(f"\n{time.strftime('%F %T')} {_last_line(pid, status)}\n")
    log_thread.join(LAST_LINE_S)
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        _end_marked(marker.encode(), signal_number)
    time.sleep(GRACE_S)  # a driver on this node reads where the process was
    _tidy(marker, log)


def _keep_log(log: str, last_line: "queue.Queue[str]") -> None:
    """Limit the size of a log until there is its last line; append that."""
    line = ""
    while not line:
        with suppress(OSError):
            _limit(log)
        with suppress(queue.Empty):
            line = last_line.get(timeout=POLL_S)
    with suppress(OSError), open(log, "a", encoding="utf8") as file:
        file.write(line)


def _limit(log: str) -> None:
    """Move the newest part of a log that has become too large to LOG.1; all writers of the log append."""
    with open(log, "r+b") as file:
        if os.fstat(file.fileno()).st_size <= MAX_LOG_BYTES:
            return
        file.seek(-MAX_LOG_BYTES, os.SEEK_END)
        with suppress(FileNotFoundError):
            os.remove(f"{log}.1")
        with open(f"{log}.1", "xb") as older:
            older.write(file.read(MAX_LOG_BYTES))
        file.truncate(0)


def _end_marked(marker: bytes, signal_number: int) -> None:
    """Send a signal to all processes of the actor until they have ended, for GRACE_S at most."""
    began = time.monotonic()
    while time.monotonic() < began + GRACE_S:
        pids, some_start = look_for(marker)
        if not pids and (not some_start or time.monotonic() > began + BEGINNING_S):
            return
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal_number)
        time.sleep(POLL_S if pids else LOOK_AT_BEGINNING_S)


def _tidy(marker: str, log: str) -> None:
    """Remove the progress file, and in its folder the older logs of processes that have ended."""
    for path in (marker, f"{marker}.stacks"):
        with suppress(OSError):
            os.remove(path)
    folder, name = os.path.split(marker.replace("dppo-progress", "dppo-log"))
    if not log.startswith(os.path.join(folder, name)):
        return
    ended = []
    for entry in os.scandir(folder):
        progress = entry.path.replace("dppo-log", "dppo-progress")[: len(marker)]
        if entry.name.startswith("dppo-log-") and entry.is_file() and not os.path.exists(progress):
            ended.append(entry)
    for entry in sorted(ended, key=lambda entry: entry.stat().st_mtime)[:-KEPT_LOGS]:
        with suppress(OSError):
            os.remove(entry.path)


def _kills_for_memory() -> int:
    """Return how many processes the kernel has killed for lack of memory since it started, in any container."""
    with suppress(OSError, IndexError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        return int(file.read().split("\noom_kill ")[1].split()[0])
    return 0


def _status(pidfds: list[int], *, for_memory: bool, was_closed: bool = False) -> str:
    """Describe an exit code or a signal; "" if the kernel does not show it. The code of a closed actor is no fault."""
    code = _exit_code(pidfds)
    if was_closed and code in CODES_OF_A_CLOSED_ACTOR:
        return CLOSED
    if code in (None, -signal.SIGKILL) and for_memory:
        return LACK
    if code is None:
        return ""
    if code < 0:
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"


def _exit_code(pidfds: list[int]) -> int | None:
    info = bytearray(struct.pack(PIDFD_INFO, PIDFD_INFO_EXIT, *[0] * 13))
    with suppress(OSError):
        for pidfd in pidfds:
            fcntl.ioctl(pidfd, PIDFD_GET_INFO, info)
        mask, *_, status = struct.unpack(PIDFD_INFO, info)
        if pidfds and mask & PIDFD_INFO_EXIT:
            return os.waitstatus_to_exitcode(status)
    return None


def look_for(marker: bytes) -> tuple[set[int], bool]:
    """Return the processes that have the marker in their environment, or map the file of that name.

    Return also whether some process has no readable environment yet: while a process begins a program, its environment
    is empty for some milliseconds, on a busy machine for more. The same rule stands in `slots/guard.py`: with the
    package, each of the two small programs would take 25 ms longer to start, and 2 MB more.
    """
    marked = set[int]()
    some_start = False
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for part in ("environ", "maps"):
            with suppress(OSError), open(f"/proc/{pid}/{part}", "rb") as file:
                content = file.read()
                if marker in content:
                    marked.add(int(pid))
                some_start = some_start or (not content and _is_starting(pid))
    return marked, some_start


def _is_starting(pid: str) -> bool:
    """Return whether a process is just being started: it has a program, which has no arguments yet."""
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        arguments = file.read()
    os.readlink(f"/proc/{pid}/exe")  # raises for zombies and threads of the kernel
    return not arguments


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
