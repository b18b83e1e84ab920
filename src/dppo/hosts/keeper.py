"""The log of an actor, and its keeper: a program that limits the log's size and ends processes that outlive the actor.

The keeper imports nothing of dppo, so that it is small. It is no child of the actor, because Ray kills those. All that
an actor has started, even detached or through others, has MARKER in its environment; its forks map that file.
"""

import fcntl
import os
import select
import signal
import struct
import sys
import time
from contextlib import suppress

MARKER = "DPPO_ACTOR"
MOST_BYTES = 2 * 2**20  # of a log; the newest part of what is more is moved to LOG.1
LOOK_S = 0.5  # between two looks at its size
GRACE_S = 2.0  # from SIGTERM to SIGKILL, for a simulator to give back its licence
GET_INFO, EXIT, INFO = (
    0xC040FF0B,
    8,
    "=QQ11Ii",
)  # PIDFD_GET_INFO since Linux 6.15, PIDFD_INFO_EXIT, struct pidfd_info
LACK = "by SIGKILL of the kernel, for lack of memory. Use fewer actors there, or set recycle_after"
LOOKS = 20  # in which a process that the kernel kills for lack of memory ends
KEPT_LOGS = (
    20  # of processes on nodes without the folder of the run, in the folder for temporary files
)
LINES, CHARACTERS, READ, WAIT_S = (
    12,
    200,
    2**15,
    1.0,
)  # of the end of a log; for the keeper's own line at the very end


def begin_log(path: str, marker: str, driver: int = 0) -> str:
    """Start a keeper; let this process print to `path`, or without one to a file beside `marker`; "" if that fails.

    If the process `driver` ends, this one gets SIGTERM. Without Linux's /proc, there is nothing of that.
    """
    import subprocess  # not in the program

    os.environ[MARKER] = marker = marker or f"dppo-actor-{os.getpid()}-{time.time_ns()}"
    try:
        path = path or marker.replace("dppo-progress", "dppo-log")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        if os.fstat(log).st_nlink > 1 or not os.path.exists("/proc/self/maps"):
            return ""  # a hard link leads to a file of somebody else
        os.write(log, f"\n{time.strftime('%F %T')} dppo: process {os.getpid()} began\n".encode())
        program = [
            sys.executable,
            "-I",
            "-S",
            __file__,
            str(os.getpid()),
            marker,
            path,
            str(driver),
        ]
        subprocess.run(
            program, env={}, cwd="/", stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=False
        )
    except OSError:
        return ""
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    return path


def end_of_log(path: str, pid: int) -> tuple[str, list[str]]:
    """Return how a process ended, "" if that is not known, and the last lines that it printed."""
    last, until, lines = _last_line(pid), time.monotonic() + WAIT_S, [""]
    while last not in lines[-1] and time.monotonic() < until:
        with suppress(OSError), open(path, "rb") as file:
            file.seek(-min(READ, os.fstat(file.fileno()).st_size), os.SEEK_END)
            text = "".join(
                one if one.isprintable() else "\n" for one in file.read().decode("utf8", "replace")
            )
            text = text.rpartition(f"dppo: process {pid} began")[2]
            lines = ["", *(line[:CHARACTERS] for line in text.splitlines() if line.strip())]
        time.sleep(0.02)
    how = lines.pop().partition(last)[2].strip() if last in lines[-1] else ""
    fatal = max(
        (n for n, line in enumerate(lines) if line.startswith("Fatal Python error")), default=0
    )
    if fatal and not how.startswith("with exit code"):  # its stack begins with the most recent call
        return how, lines[fatal:][:LINES]
    return how, lines[1:][-LINES:]


def _last_line(pid: int, status: str = "") -> str:
    return f"dppo: process {pid} ended {status}".rstrip()


# ------------------------------------------------------------------ the program


def keep(pid: int, marker: str, log: str, driver: int) -> None:
    """Wait for the end of the process `pid`; write to its log how it ended; end what it has left."""
    if os.fork():
        os._exit(0)
    os.setsid()
    watched, kills = list[int](), [_kills_for_memory()]
    with suppress(OSError):  # before Linux 5.3, or it has ended
        watched = [os.pidfd_open(pid)]
    while os.path.exists(f"/proc/{pid}") and not select.select(watched, [], [], LOOK_S)[0]:
        if driver and not os.path.exists(f"/proc/{driver}"):
            os.kill(pid, signal.SIGTERM)  # Ray would end it in some seconds, without a warning
            driver = 0
        kills = [*kills[-LOOKS:], _kills_for_memory()]
        with suppress(OSError), open(log, "r+b") as file:
            if os.fstat(file.fileno()).st_size > MOST_BYTES:  # all who write to it append
                file.seek(-MOST_BYTES, os.SEEK_END)
                with suppress(FileNotFoundError):
                    os.remove(f"{log}.1")
                with open(f"{log}.1", "xb") as older:
                    older.write(file.read(MOST_BYTES))
                file.truncate(0)
    time.sleep(
        0.05
    )  # for its parent to take note, before which the kernel does not tell how it ended
    with suppress(OSError), open(log, "a", encoding="utf8") as file:
        how = _status(watched, _kills_for_memory() > kills[0])
        file.write(f"\n{time.strftime('%F %T')} {_last_line(pid, how)}\n")
    for number in (signal.SIGTERM, signal.SIGKILL):
        until = time.monotonic() + GRACE_S
        while (left := _marked(marker.encode())) and time.monotonic() < until:
            for one in left:
                with suppress(OSError):
                    os.kill(one, number)
            time.sleep(LOOK_S)
    time.sleep(GRACE_S)  # for a driver on this node to read where it was
    _tidy(marker, log)


def _tidy(marker: str, log: str) -> None:
    """Remove the progress file, and older logs beside it of processes that have ended."""
    for path in (marker, f"{marker}.stacks"):
        with suppress(OSError):
            os.remove(path)
    folder, name = os.path.split(marker.replace("dppo-progress", "dppo-log"))
    if log.startswith(os.path.join(folder, name)):
        beside = [
            one for one in os.scandir(folder) if one.name.startswith("dppo-log-") and one.is_file()
        ]
        ended = [
            one
            for one in beside
            if not os.path.exists(one.path.replace("dppo-log", "dppo-progress")[: len(marker)])
        ]
        for one in sorted(ended, key=lambda one: one.stat().st_mtime)[:-KEPT_LOGS]:
            with suppress(OSError):
                os.remove(one.path)


def _kills_for_memory() -> int:
    """Return how many processes the kernel has killed for lack of memory since it started, in any container."""
    with suppress(OSError, IndexError, ValueError), open("/proc/vmstat", encoding="ascii") as file:
        return int(file.read().split("\noom_kill ")[1].split()[0])
    return 0


def _status(watched: list[int], for_memory: bool) -> str:
    """Return exit code or signal in words; "" if the kernel does not tell."""
    code = _code(watched)
    if code in (None, -signal.SIGKILL) and for_memory:
        return LACK
    if code is None:
        return ""
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"


def _code(watched: list[int]) -> int | None:
    info = bytearray(struct.pack(INFO, EXIT, *[0] * 13))
    with suppress(OSError):
        for one in watched:
            fcntl.ioctl(one, GET_INFO, info)
        mask, *_, status = struct.unpack(INFO, info)
        if watched and mask & EXIT:
            return os.waitstatus_to_exitcode(status)
    return None


def _marked(marker: bytes) -> set[int]:
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for part in ("environ", "maps"):
            with suppress(OSError), open(f"/proc/{pid}/{part}", "rb") as file:
                found |= {int(pid)} if marker in file.read() else set()
    return found


if __name__ == "__main__":
    keep(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
