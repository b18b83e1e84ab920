"""Failures in other processes: their transport, the meaning of Ray's errors, and the delay of restarts."""

import threading
from collections.abc import Callable

from dppo.errors import ClusterError, ConfigError, DppoError, EnvironmentFault, TrainingDiverged

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
UNKNOWN = "died: its process crashed, exited or was killed (out of memory?)"


class Recycled(ClusterError):
    """An actor is to be replaced before it makes the next segment: see the setting recycle_after."""


def sendable(error: DppoError) -> DppoError:
    """Return one of our own exceptions for `error`, so that no user-defined class has to be unpickled."""
    if isinstance(error, EnvironmentFault):
        return EnvironmentFault(*error.args)
    own = next((kind for kind in (TrainingDiverged, Recycled, ClusterError) if isinstance(error, kind)), ConfigError)
    return own(str(error))


def delay_before(replacement: int) -> float:
    """Return the seconds to wait before the 1st, 2nd ... replacement of a process in a row: 0, 1, 2, 4 ... 30."""
    return 0.0 if replacement == 1 else min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (replacement - 2))


def within(timeout_s: float, call: Callable[[], object]) -> None:
    """Run a call of Ray's that has no timeout of its own; return when it ends or time is up.

    Killing an actor that was never registered and removing a placement group wait without limit if the GCS is gone.
    """
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)


# ------------------------------------------------------------------ errors of Ray


def cause(error: Exception) -> str:
    """Return in one line why a call to another process failed, to follow its name: "died: ..."."""
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    if isinstance(error, GetTimeoutError):
        return "did not start or answer in time"
    if isinstance(error, TimeoutError):
        return str(error)
    verb = "failed" if isinstance(error, RayTaskError) else "died" if isinstance(error, RayActorError) else "is lost"
    return f"{verb}: {last_line(error)}"


def cause_of_death(error: Exception) -> str:
    """Return in one line why a process died: the last line of `error` about a worker, a node or an exit."""
    lines = _lines(error)
    if any("low on memory" in line or "OutOfMemory" in line for line in lines):
        return "died: killed because its node ran out of memory. Use fewer actors there, or set recycle_after"
    if any("Worker unexpectedly exits with a connection error" in line for line in lines):
        return UNKNOWN  # as Ray guesses, in a paragraph
    clues = [line for line in lines if any(word in line.lower() for word in ("worker", "node", "exit"))]
    return f"died: {(clues or lines)[-1][:300]}"


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, which names the original exception."""
    return _lines(error)[-1][:300]


def incurable(error: Exception) -> ClusterError | None:
    """Return the error that ends the run if a new process would fail in the same way; else None."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        return ClusterError(f"An actor failed in dppo itself; please report this.\n{error}")
    if getattr(error, "actor_init_failed", False) or "failed to import" in str(error):
        return ClusterError(f"An actor could not be created: {_lines(error)[-1]}. Install the same dppo on every node.")
    return None


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
