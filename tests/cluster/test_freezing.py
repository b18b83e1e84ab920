"""A process that is frozen while it connects to Ray is reported and ended by a guard outside of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dppo.transports.ray import freezing

CONTEXT = """
import ctypes, sys, time
from dppo.transports.ray.freezing import FreezeGuard, Silence
with FreezeGuard(Silence(0.6, "it is silent"), Silence({end_s}, "it is ended")) as guard:
    print("started", flush=True)
"""
# A function of C that never returns, also after a signal, is called with Python's lock: no thread goes on.
FROZEN = f"""{CONTEXT}
    lock = ctypes.create_string_buffer(128)
    while True:
        ctypes.PyDLL(None).pthread_mutex_lock(lock)
"""
BEATING = f"""{CONTEXT}
    until = time.monotonic() + 4
    while time.monotonic() < until:
        guard.beat()
        time.sleep(0.1)
print("went on")
"""
# The fork outlives this test, unless the pipe that it reads is closed.
FORKED = f"""{CONTEXT}
    import os
    if os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
print("went on", flush=True)
sys.stdin.read()
"""


def started(program: str, end_s: float) -> subprocess.Popen[str]:
    """Start a program in a session of its own, and wait until its guard is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", program.format(end_s=end_s)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_a_frozen_process_is_noted_and_then_ended() -> None:
    process = started(FROZEN, end_s=1.5)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert err == "it is silent\nit is ended\n"


def test_a_process_that_beats_goes_on() -> None:
    process = started(BEATING, end_s=3)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "went on\n"), err


def test_ctrl_c_ends_a_frozen_process_before_its_time() -> None:
    process = started(FROZEN, end_s=10_000)
    assert process.stderr is not None
    assert process.stderr.readline() == "it is silent\n"
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert err == "interrupted while Ray did not answer\n"


def test_a_guard_ends_with_its_process() -> None:
    process = started(FROZEN, end_s=10_000)
    process.kill()
    # ends as soon as the guard has closed its standard error
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_a_fork_does_not_keep_the_guard_from_ending() -> None:
    """It has the pipe of the guard, too, which is not closed before the fork ends."""
    process = started(FORKED, end_s=1)
    assert process.stdout is not None
    assert process.stdout.readline() == "went on\n"
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="states of processes are read from /proc")
def test_a_process_that_was_stopped_is_not_taken_for_a_frozen_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert not freezing.is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert freezing.is_stopped(process.pid)
        process.kill()
    assert not freezing.is_stopped(process.pid)
