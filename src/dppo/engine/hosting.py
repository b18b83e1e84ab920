"""Hosting: who hosts which sampler, how far each sampler is, whether enough actors run; and slots. Pure."""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from dppo.engine.actors import Actor, State
from dppo.engine.messages import Command, Limits, Log
from dppo.engine.slots import Slots
from dppo.errors import ClusterError, counted
from dppo.ppo.exchange.questions import Question

PATIENCE_S = 5.0  # without enough actors, before that is logged
BACKUPS = "backup_requests=True (--backup-requests) would let an idle actor make a late segment, too"


@dataclass(slots=True)
class SamplerPosition:
    """A sampler's place in the run."""

    host: Actor  # the actor that makes its next segments; earlier ones may still be on their way from another
    arrived: int = 0  # index of the first segment that has not arrived
    asked: int = 0  # index of the first segment that has not been asked for
    maker: Actor | None = None  # which has been asked for those that have not arrived


def shares(num_samplers: int, num_actors: int) -> list[list[int]]:
    """Return the samplers of each actor at the start."""
    return [list(range(num_samplers))[actor_id::num_actors] for actor_id in range(num_actors)]


class Hosting:
    """Knows the samplers of each actor, the actor of each sampler, and the actors that may be asked for something.

    It waits for enough actors: until a deadline if their number is fixed, without one if they join and leave.
    """

    def __init__(self, actors: dict[int, Actor], limits: Limits) -> None:
        self.positions = {sampler: SamplerPosition(actor) for actor in actors.values() for sampler in actor.samplers}
        self.running: dict[int, Actor] = {}  # the actors that accept questions, by id
        self.said_to_wait = False  # True while the log says that the run waits for actors
        self.slots = Slots(limits)
        self.limit = sys.maxsize
        """Most samplers of a process."""
        self.most_held = 0
        """Most samplers of which a process has had environments, as answers show."""
        self._fewest = limits.fewest_actors
        self._actors, self._limits = actors, limits
        self._few_since: float | None = None
        self._ready: set[int] = set()  # ids of the actors that may be asked for something new
        self._stranded: dict[int, Actor] = {}  # those that have not started, whose samplers no other has room for
        self._unplaced = False  # True while an actor hosts more samplers than `limit`, for lack of others
        if limits.samplers_per_actor is not None:
            self.limit_to(limits.samplers_per_actor)

    def begin(self, index: int) -> None:
        """Let all samplers start with segment `index`; nothing has been asked for."""
        for place in self.positions.values():
            place.arrived = place.asked = index

    def started(self, actor: Actor) -> None:
        """Record that an actor accepts questions."""
        self.running[actor.actor_id] = actor
        self._ready.add(actor.actor_id)
        self._stranded.pop(actor.actor_id, None)
        actor.stranded = False
        if self._unplaced:
            self.limit_to(self.limit)

    def held(self, actor: Actor, question: Question) -> None:
        """Record the answer to a question: of which samplers a process has environments at once."""
        actor.made = {*actor.made, *question.samplers}.intersection(question.hosted)
        self.most_held = max(self.most_held, len(actor.made))

    def has_room(self, actor: Actor) -> bool:
        """Return whether an actor may host one more sampler."""
        return len(actor.samplers) < self.limit

    def limit_to(self, limit: int) -> list[int]:
        """Let no process have more than `limit` samplers; return those that went to another actor.

        Of too many samplers, an actor keeps those of which its process has had environments.
        """
        self.limit = limit
        if self._limits.elastic:  # with fewer, some samplers have no place
            self._fewest = max(self._limits.fewest_actors, math.ceil(len(self.positions) / limit))
        surplus = list[int]()
        for actor in self._actors.values():
            kept_first = sorted(actor.samplers, key=lambda sampler: (sampler not in actor.made, sampler))
            surplus += kept_first[limit:]
        there = [actor for actor in self._actors.values() if actor.state not in (State.LEAVING, State.LEFT)]
        moved = self._move_to(there, surplus)
        self._unplaced = len(moved) < len(surplus)
        return list(moved)

    def ended(self, actor: Actor) -> None:
        """Record that the process of an actor, and its queue, are abandoned."""
        for asked in actor.asked.values():
            for place in map(self.positions.__getitem__, asked.samplers):
                if place.maker is actor:  # else another one makes these segments, too
                    place.asked = place.arrived
                    self._ready.add(place.host.actor_id)
        self.running.pop(actor.actor_id, None)
        self.slots.ended(actor)

    def ready(self, *actors: Actor) -> None:
        """Record that there may be something new to ask these actors for."""
        self._ready.update(actor.actor_id for actor in actors)

    def take_ready(self) -> list[Actor]:
        """Return the running actors that may be asked for something new since the last call."""
        ready, self._ready = self._ready, set()
        return [self.running[actor_id] for actor_id in ready if actor_id in self.running]

    def next_of(self, actor: Actor, end: int) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield index and samplers of each question for segments before `end` that the actor can be asked now.

        A sampler goes on from where this process leaves it, or is rebuilt once all of its segments have arrived.
        """
        positions = [(sampler, self.positions[sampler]) for sampler in actor.samplers]
        for index in range(min([place.asked for _, place in positions], default=end), end):
            able = [
                sampler
                for sampler, place in positions
                if place.asked == index
                and (place.arrived == index or (place.maker is actor and actor.holds.get(sampler) == index))
            ]
            if able:
                yield index, tuple(able)

    def asked(self, samplers: Iterable[int], index: int, maker: Actor) -> None:
        """Record that an actor has been asked for segment `index` of some samplers."""
        for place in map(self.positions.__getitem__, samplers):
            place.asked, place.maker = index + 1, maker

    def arrived(self, sampler: int, index: int, end: int) -> None:
        """Record that segment `index` of a sampler has arrived, of those before `end`."""
        place = self.positions[sampler]
        place.arrived = index + 1
        if place.asked < end:  # it is moving to its host, which may be asked now
            self._ready.add(place.host.actor_id)

    def move(self, samplers: Iterable[int]) -> list[int]:
        """Move each of `samplers` to the running actor with the fewest; return the ids of their new hosts.

        Those for which no running actor has room stay.
        """
        return sorted(set(self._move_to(self.running.values(), samplers).values()))

    def _move_to(self, actors: Iterable[Actor], samplers: Iterable[int]) -> dict[int, int]:
        """Move each of `samplers` to the one of `actors` with the fewest, while one has room; return ids by sampler."""
        least = [(len(actor.samplers), actor.actor_id, actor) for actor in actors]
        heapify(least)
        hosts = dict[int, int]()
        for sampler in samplers:
            if not least or not self.has_room(least[0][2]):
                break
            hosted, host_id, host = least[0]
            self.rehost(sampler, host)
            heapreplace(least, (hosted + 1, host_id, host))
            hosts[sampler] = host_id
        return hosts

    def strand(self, actor: Actor) -> None:
        """Let the samplers of an actor wait until it is back, or until another one that starts has room."""
        actor.stranded = True
        self._stranded[actor.actor_id] = actor

    def take_stranded(self) -> list[Actor]:
        """Return the actors whose samplers wait for room, if there is some."""
        if not self._stranded or not any(map(self.has_room, self.running.values())):
            return []
        stranded, self._stranded = list(self._stranded.values()), {}
        return [actor for actor in stranded if actor.samplers]

    def rehost(self, sampler: int, host: Actor) -> None:
        """Let `host` make the next segments of a sampler."""
        place = self.positions[sampler]
        place.host.samplers = tuple(one for one in place.host.samplers if one != sampler)
        host.samplers = tuple(sorted((*host.samplers, sampler)))
        place.host = host
        self._ready.add(host.actor_id)

    @property
    def enough(self) -> bool:
        """True if segments may be collected."""
        return len(self.running) >= self._fewest

    def leave(self, actor: Actor) -> bool:
        """Let an actor accept no more questions; return False if it is leaving already, or is the only one running."""
        actor.unwanted = True
        if actor.state in (State.LEAVING, State.LEFT) or self.running.keys() == {actor.actor_id}:
            return False
        self.running.pop(actor.actor_id, None)
        actor.state = State.LEAVING if actor.has_process else State.LEFT
        return True

    def waiting(self, waited_s: float, index: int, limit_s: float) -> str:
        """Return the message about missing segments `index`, or if that is negative about the first environment."""
        actors = self._actors.values()
        missing = [actor for actor in actors if actor.state in (State.ABSENT, State.STARTING) and actor.samplers]
        starts = [f"actor {one.actor_id} is being {'restarted' if one.ever_started else 'started'}" for one in missing]
        if index < 0:
            return "; ".join([f"waiting for the first environment for {waited_s:.0f} s", *_shortened(starts)])
        owed, total = (
            sorted(one for one, place in self.positions.items() if place.arrived <= index),
            len(self.positions),
        )
        samplers = f"{samplers_named(owed[:8])}{' ...' if len(owed) > 8 else ''}"
        segments = f"waiting for {len(owed)} of {total} segments for {waited_s:.0f} s ({samplers})"
        places = [f"actor {one.actor_id}: {one.progress}" for one in actors if one.progress and one.first.rebuilds]
        places += [f"actor {one.actor_id}: {one.progress} for {one.stood[1]:.0f} s" for one in actors if _stands(one)]
        slots = [str(self.slots)] if self.slots.limited else []
        rule = f"an actor that makes no progress for {limit_s:g} s is replaced"
        may_help = any(not actor.asked for actor in self.running.values()) and not starts and not slots
        backups = [BACKUPS] if may_help and not self._limits.backup_requests else []
        return "; ".join([segments, *_shortened(starts), *_shortened(places), *slots, rule, *backups])

    def check_enough(self, now: float) -> list[Command]:
        """Return a message once too few actors have been running for a while, and one once there are enough again.

        Raise ClusterError if actors whose number is fixed cannot be started.
        """
        self._check_stranded(now)
        if self.enough:
            logged, self.said_to_wait, self._few_since = self.said_to_wait, False, None
            return [Log(f"training goes on with {counted(len(self.running), 'actor')}")] if logged else []
        if self._few_since is None:
            self._few_since = now
        if self._limits.elastic:
            if self.said_to_wait or now - self._few_since < PATIENCE_S:
                return []
            self.said_to_wait = True
            numbers = f"{len(self.running)} running, at least {self._fewest} wanted"
            each = f" (samplers_per_actor={self.limit})" if self._fewest > self._limits.fewest_actors else ""
            return [Log(f"training waits for actors: {numbers}{each}; `ray status` shows the room in the cluster")]
        missing = sorted(self._actors.values(), key=lambda actor: actor.missing_since)
        limit_s = max(self._limits.start_timeout_s, self._limits.segment_timeout_s)
        if min(now - self._few_since, now - missing[-1].missing_since) > limit_s:
            raise ClusterError(
                f"actor {missing[0].actor_id} was not started by Ray within {limit_s:g} s, and no other of the "
                f"{len(missing)} is running. If the cluster is full (see `ray status`), lower `num_actors` or "
                f"`cpus_per_actor`; if starting takes longer, raise `segment_timeout_s`."
            )
        return []

    def _check_stranded(self, now: float) -> None:
        """Raise ClusterError if an actor whose samplers wait for it has not started for too long.

        If actors join and leave, another one may still take them.
        """
        limit_s = max(self._limits.start_timeout_s, self._limits.segment_timeout_s)
        for actor in () if self._limits.elastic else self._stranded.values():
            starting = actor.state in (State.ABSENT, State.STARTING)
            if starting and now - actor.missing_since > limit_s:
                raise ClusterError(
                    f"actor {actor.actor_id} was not started by Ray within {limit_s:g} s, and no other actor has room "
                    f"for {samplers_named(actor.samplers)}: a process has at most {counted(self.limit, 'sampler')} "
                    f"(samplers_per_actor={self.limit}). Make room in the cluster (see `ray status`), and resume."
                )


def samplers_named(samplers: Sequence[int]) -> str:
    """Return `sampler 3`, or `samplers 0, 3, 5`."""
    return f"sampler{'' if len(samplers) == 1 else 's'} {listed(samplers)}"


def listed(numbers: Sequence[int]) -> str:
    """Return `0, 3, 5`."""
    return ", ".join(map(str, numbers))


def _stands(actor: Actor) -> bool:
    """Return whether an actor was seen twice in the same step, reset or constructor."""
    return bool(actor.asked) and not actor.first.rebuilds and actor.progress is not None and actor.stood[1] > 0


def _shortened(parts: list[str], most: int = 4) -> list[str]:
    return parts if len(parts) <= most else [*parts[:most], f"and so are {len(parts) - most} more"]
