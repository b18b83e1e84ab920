"""The losses of processes: why, after which delay they are replaced, the lines about them, and too many of them."""

from dataclasses import dataclass

from dppo.envs.activity import Activity
from dppo.errors import ClusterError, DppoError, EnvironmentFault, counted
from dppo.ppo.exchange.records import IncidentKind

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
# before the next start of an actor of which too many processes in a row have not started
REST_S = 600.0


@dataclass(frozen=True, slots=True)
class Loss:
    """Why the process of an actor is lost."""

    reason: str
    """Completes the sentence "actor 1 (samplers 2 and 3) ..."."""
    kind: IncidentKind = IncidentKind.ACTOR_LOST
    fault: EnvironmentFault | None = None
    """The fault of a constructor, if one was the reason."""
    activity: Activity | None = None
    """The last activity of the process, if it is known better than by the last look."""


def delay_before(replacement: int) -> float:
    """Return the seconds to wait before the 1st, 2nd ... replacement of a process in a row: 0, 1, 2, 4 ... 30."""
    if replacement == 1:
        return 0.0
    return min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (replacement - 2))


def describe_loss(message: str, delay_s: float) -> str:
    """Add to the first line of a message about a lost process that it is replaced, after a delay."""
    replaced = f"replaced in {delay_s:.0f} s" if delay_s else "replaced"
    first_line, *details = message.split("\n")
    return "\n".join([f"{first_line}; {replaced}", *details]).rstrip()


def too_many_losses(
    message: str, limit: int, fault: EnvironmentFault | None, *, started: bool
) -> DppoError:
    """Return the error that ends the run after `limit` replacements in a row.

    It is a fault of the environment if the last process was lost by a `fault` of its constructor. If that had not
    `started`, the simulator is not the reason.
    """
    replaced = f"replaced {counted(limit, 'time')} in a row without making a segment (max_actor_restarts={limit})"
    if fault is not None:
        text = f"{fault.message.splitlines()[0].rstrip('.')}. Its actor was {replaced}"
        return EnvironmentFault(text, fault.remote_traceback, fault.place)
    if not started:
        return ClusterError(
            f"{message}\nIt was {replaced}. Remove the reason, and resume (--resume)."
        )
    return ClusterError(
        f"{message}\nIt was {replaced}. Look for the reason in the simulator's own log; `num_actors=0` runs it in this "
        f"process, where a debugger can follow."
    )
