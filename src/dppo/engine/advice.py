"""Advice about an actor that was lost too often."""

import math

from dppo.errors import ClusterError, EnvironmentFault, counted


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
