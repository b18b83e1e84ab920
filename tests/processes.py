"""Find processes that this one has started, and disturb them while they are busy: kill, stop, disconnect."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil

from dppo.transports.ray.calls import RayCalls

T = TypeVar("T")


def command_line(pid: int) -> str:
    return (
        Path(f"/proc/{pid}/cmdline")
        .read_bytes()
        .replace(b"\0", b" ")
        .decode(errors="replace")
        .strip()
    )


def alive(pid: int) -> bool:
    """Return whether a process runs, and is no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    state = stat.rpartition(")")[2].split()[0]
    return state != "Z"


def descendants(pid: int) -> set[int]:
    """Return all descendants of `pid`, none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return {child.pid for child in psutil.Process(pid).children(recursive=True)}
    return set()


def ours(title: str) -> list[int]:
    """Return the descendants of this process whose command line contains `title`."""
    pids = []
    for pid in descendants(os.getpid()):
        with suppress(OSError):
            if title in command_line(pid):
                pids.append(pid)
    return sorted(pids)


def in_ray_thread(function: Callable[[], T]) -> T:
    """Return what a function returns that may run in a thread of calls into Ray only."""
    calls = RayCalls("test")
    try:
        return calls.call(function, "testing")
    finally:
        calls.close(60)


def wait_until(happened: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, (
            f"no event within {timeout_s:g} s; actors: {actors_of_this_process()}"
        )
        time.sleep(0.02)


def actors_of_this_process() -> set[int]:
    return set(ours("ray::PPOActor"))


class Disturbance:
    """Waits in a thread until a descendant is busy with `title`, and disturbs it a moment later."""

    def __init__(self, title: str, disturb: Callable[[int], None], times: int = 1) -> None:
        self.pids: list[int] = []
        self._title = title
        self._disturb = disturb
        self._times = times
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Disturbance:
        self._others = set(ours(self._title))  # of an earlier run, or of a fixture
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for pid in self.pids:  # a stopped process must not outlive the test
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert len(self.pids) >= self._times, (
            f"no process was busy with {self._title} for long enough"
        )

    def _run(self) -> None:
        while len(self.pids) < self._times and not self._over.is_set():
            for pid in set(ours(self._title)) - self._others:
                time.sleep(0.05)
                if pid in ours(self._title) and pid not in self.pids:
                    self.pids.append(pid)
                    self._disturb(pid)
                    break
            time.sleep(0.02)


def send(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


def in_the_middle_of_an_update(disturb: Callable[[int], None], times: int = 1) -> Disturbance:
    return Disturbance("TrainerRank.update", disturb, times)
