"""Errors of Ray: why a call or a process failed, in a line; and calls that Ray gives no timeout."""

import re
from collections.abc import Callable
from typing import TypeVar

from dppo.errors import ClusterError
from dppo.transports.ray.calls import RayThread

FETCH_TIMEOUT_S = 120.0  # longest transfer of a finished result over the network
UNREACHABLE = "cannot be reached: its connection to this process was lost"
UNKNOWN = "died: its process crashed, exited or was killed (out of memory?)"


T = TypeVar("T")


def call_with_timeout(timeout_s: float, call: Callable[[], object]) -> None:
    """Run a call that has no timeout of its own, in a thread; return when it ends or time is up.

    Killing an actor that was never registered and removing a placement group wait without limit if the GCS is gone, a
    look at a file if its disk blocks, and a host name if no name server answers.
    """
    thread = RayThread(call, "dppo-call")
    thread.start()
    thread.join(timeout_s)


def result_within(timeout_s: float, call: Callable[[], T], default: T) -> T:
    """Wait for the result of such a call; return `default` if time is up first."""
    results = [default]
    call_with_timeout(timeout_s, lambda: results.append(call()))
    return results[-1]


def cause(error: Exception) -> str:
    """Return in one line why a call to another process failed, to follow its name: "died: ..."."""
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    if isinstance(error, GetTimeoutError):
        return "did not start or answer in time"
    if isinstance(error, TimeoutError):
        return str(error)
    if isinstance(error, RayTaskError):
        return f"failed: {last_line(error)}"
    if isinstance(error, RayActorError):
        return f"died: {last_line(error)}"
    return f"is lost: {last_line(error)}"


def cause_of_death(error: Exception) -> str:
    """Return in one line why a process died: the last line of `error` about a worker, a node or an exit."""
    lines = _lines(error)
    if type(error).__name__ == "ActorUnavailableError":
        return UNREACHABLE
    if any("low on memory" in line or "OutOfMemory" in line for line in lines):
        return "died: killed because its node ran out of memory. Use fewer actors there, or set recycle_after"
    if any("Worker unexpectedly exits with a connection error" in line for line in lines):
        return UNKNOWN  # as Ray guesses, in a paragraph
    clues = [line for line in lines if re.search("worker|node|exit", line, re.IGNORECASE)]
    return f"died: {(clues or lines)[-1][:300]}"


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, which names the original exception."""
    return _lines(error)[-1][:300]


def fatal_error(error: Exception) -> ClusterError | None:
    """Return the error that ends the run if a new process would fail in the same way; else None."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        return ClusterError(f"An actor failed in dppo itself; please report this.\n{error}")
    if getattr(error, "actor_init_failed", False) or "failed to import" in str(error):
        return ClusterError(
            f"An actor could not be created: {_lines(error)[-1]}. Install the same dppo on every node."
        )
    return None


def _lines(error: Exception) -> list[str]:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines or [type(error).__name__]
