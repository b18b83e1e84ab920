"""Delays before lost processes are replaced, the lines about them, and the error about too many losses."""

import math

from dppo.errors import ClusterError, EnvironmentFault, counted

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0


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
    message: str, limit: int, fault: EnvironmentFault | None, num_samplers: int
) -> ClusterError:
    """Return the error that ends the run after `limit` replacements in a row: see `advice_after_losses`."""
    return ClusterError(
        f"{message}\nIt was replaced {counted(limit, 'time')} in a row without making a segment "
        f"(max_actor_restarts={limit}). {advice_after_losses(fault, num_samplers)}"
    )


def advice_after_losses(fault: EnvironmentFault | None, num_samplers: int) -> str:
    """Return the advice of the error that ends the run.

    Args:
        fault: the fault of the actor's last constructor, if one was the reason.
        num_samplers: all samplers of the run.
    """
    beside = 0
    if fault is not None and fault.place is not None:
        beside = fault.place.samplers_beside
    if not beside:
        return (
            "Look for the reason in the simulator's own log; `num_actors=0` runs it in this process, where a "
            "debugger can follow."
        )
    needed = math.ceil(num_samplers / beside)
    return (
        f"The process of that constructor had the environments of {counted(beside, 'sampler')}. If it may have no "
        f"more, use `num_actors={needed}` and `samplers_per_actor={beside}`; if licences are in use, free them."
    )
