"""Messages of the engine: what it waits for, and what it did about an actor."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dppo.cluster.collecting.messages import Limits
from dppo.cluster.collecting.roster import Actor, State
from dppo.errors import counted


def waiting(waited_s: float, owed: Sequence[int], total: int, actors: Collection[Actor], limits: Limits) -> str:
    """Return the message while segments of the samplers `owed`, of `total`, or the first environment, are missing."""
    missing = [actor for actor in actors if actor.state in (State.ABSENT, State.STARTING) and actor.samplers]
    starts = _shortened(
        [f"actor {actor.actor_id} is being {'restarted' if actor.ever_started else 'started'}" for actor in missing]
    )
    if not owed:
        return "; ".join([f"waiting for the first environment for {waited_s:.0f} s", *starts])
    samplers = f"{samplers_named(owed[:8])}{' ...' if len(owed) > 8 else ''}"
    segments = f"waiting for {len(owed)} of {total} segments for {waited_s:.0f} s ({samplers})"
    replaying = [actor for actor in actors if actor.rebuilds and actor.progress is not None]
    replays = _shortened([f"actor {actor.actor_id}: {actor.progress}" for actor in replaying])
    rule = f"an actor that makes no progress for {limits.segment_timeout_s:g} s is replaced"
    return "; ".join([segments, *starts, *replays, rule])


def none_started(first: Actor, num_actors: int, limits: Limits) -> str:
    """Return the error of a run whose actors never started."""
    return (
        f"actor {first.actor_id} was not started by Ray within {limits.nobody_s:g} s, and no other of the {num_actors} "
        f"is running. If the cluster is full (see `ray status`), lower `num_actors` or `cpus_per_actor`; if starting "
        f"takes longer, raise `segment_timeout_s`."
    )


def hung(actor: Actor, limits: Limits, *, describing: bool) -> str:
    """Return why an actor counts as hung."""
    limit = f"segment_timeout_s={limits.segment_timeout_s:g}"
    if describing:
        return f"made no environment within {limit}"
    standstill = "sent no segment" if actor.progress is None else "made no progress"
    stuck = "" if actor.progress is None else f", was last seen {actor.progress}"
    return (
        f"{standstill} for {limit}{stuck} and counts as hung; if a single step or reset takes longer, raise "
        f"segment_timeout_s"
    )


def restarts_spent(lost: str, limits: Limits) -> str:
    """Return the error of an actor that was lost too often in a row; `lost` describes the last time."""
    return (
        f"{lost}\nIt was replaced {counted(limits.max_actor_restarts, 'time')} in a row without making a segment "
        f"(max_actor_restarts={limits.max_actor_restarts}). Look for the reason in the simulator's own log; "
        f"`num_actors=0` runs it in this process, where a debugger can follow."
    )


def moved(actor: Actor, missing_s: float, samplers: Sequence[int], hosts: Sequence[int]) -> str:
    """Return the message about samplers that other actors host for now."""
    reason = "has left" if actor.state is State.LEFT else f"has not started for {missing_s:.0f} s"
    return (
        f"actor {actor.actor_id} {reason}; until it is back, its samplers {listed(samplers)} are on actor "
        f"{listed(hosts)}"
    )


def samplers_named(samplers: Sequence[int]) -> str:
    """Return `sampler 3`, or `samplers 0, 3, 5`."""
    return f"sampler{'' if len(samplers) == 1 else 's'} {listed(samplers)}"


def listed(numbers: Sequence[int]) -> str:
    """Return `0, 3, 5`."""
    return ", ".join(map(str, numbers))


def _shortened(parts: list[str], most: int = 4) -> list[str]:
    return parts if len(parts) <= most else [*parts[:most], f"and so are {len(parts) - most} more"]
