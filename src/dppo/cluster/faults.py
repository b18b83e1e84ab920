"""Failures in other processes: how they travel, what Ray's errors mean, and how often to try again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from dppo.errors import ClusterError, ConfigError, DppoError, EnvironmentFault, TrainingDiverged

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception in another process as plain data, so that no class of the user's has to be unpickled."""

    kind: str
    """Which exception to raise: "config", "environment" or "diverged" of `dppo.errors`, or "interrupted"."""
    message: str
    remote_traceback: str = ""

    @staticmethod
    def of(error: DppoError | KeyboardInterrupt) -> Fault:
        """Return `error` as a fault."""
        if isinstance(error, KeyboardInterrupt):
            return Fault("interrupted", str(error))
        if isinstance(error, EnvironmentFault):
            return Fault("environment", error.message, error.remote_traceback)
        return Fault("diverged" if isinstance(error, TrainingDiverged) else "config", str(error))

    def as_error(self) -> DppoError | KeyboardInterrupt:
        """Return the exception to raise here."""
        if self.kind == "interrupted":
            return KeyboardInterrupt(self.message)
        if self.kind == "environment":
            return EnvironmentFault(self.message, self.remote_traceback)
        return TrainingDiverged(self.message) if self.kind == "diverged" else ConfigError(self.message)


def or_raise(answer: T | Fault) -> T:
    """Return `answer`; raise the exception if it is a fault."""
    if isinstance(answer, Fault):
        raise answer.as_error()
    return answer


class RestartBudget:
    """Limit how often a process is replaced in a row, and delay each attempt: 0, 1, 2, 4 ... 30 seconds."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._in_a_row: dict[int, int] = {}

    def spend(self, actor_id: int) -> float | None:
        """Return the seconds to wait before replacing `actor_id`; None when it has been replaced too often in a row."""
        spent = self._in_a_row.get(actor_id, 0)
        if spent >= self._times:
            return None
        self._in_a_row[actor_id] = spent + 1
        return 0.0 if spent == 0 else min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (spent - 1))

    def delivered(self, actor_id: int) -> None:
        """Give `actor_id` its whole budget back: it has done some work."""
        self._in_a_row.pop(actor_id, None)


def within(timeout_s: float, call: Callable[[], object]) -> None:
    """Make a call of Ray's that has no timeout of its own; go on when time is up.

    To kill an actor that was never registered, or to remove a placement group, waits without limit for a GCS that has
    gone.
    """
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(timeout_s)


# ------------------------------------------------------------------ errors of Ray


def cause(error: Exception) -> str:
    """Say in a line why a call to another process failed, to follow its name: "died: ..."."""
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    if isinstance(error, GetTimeoutError):
        return "did not start, or send what it had, in time"
    if isinstance(error, TimeoutError):
        return str(error)
    what = "failed" if isinstance(error, RayTaskError) else "died" if isinstance(error, RayActorError) else "is lost"
    return f"{what}: {last_line(error)}"


def cause_of_death(error: Exception) -> str:
    """Say in a line why a process died: the last line of `error` about a worker, a node or an exit."""
    lines = _lines(error)
    clues = [line for line in lines if any(word in line.lower() for word in ("worker", "node", "exit"))]
    return f"died: {(clues or lines)[-1][:300]}"


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, which names the original exception."""
    return _lines(error)[-1][:300]


def incurable(error: Exception) -> ClusterError | None:
    """Return the error to end the run with where a new process would fail as this one did; None if it might not."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        return ClusterError(f"An actor failed in dppo itself; please report this.\n{error}")
    if getattr(error, "actor_init_failed", False) or "failed to import" in str(error):
        return ClusterError(f"An actor could not be made: {_lines(error)[-1]}. Install the same dppo on every node.")
    return None


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
