"""Hosting: who hosts which sampler, how far each sampler is, and whether enough actors run. Pure: no Ray, no clock."""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace

from dppo.engine.actors import Actor, ActorState
from dppo.engine.messages import Command, Limits, Log
from dppo.engine.slots import InstanceSlots
from dppo.errors import ClusterError, counted
from dppo.ppo.exchange.questions import Question
from dppo.ppo.exchange.records import Incident, IncidentKind

NAMED_MOVES = 3  # number of absent actors after which the message is shortened
PATIENCE_S = 5.0  # seconds without enough actors before the wait is logged


@dataclass(slots=True)
class SamplerPosition:
    """Progress of a sampler in the run, and the actor that makes its segments."""

    host: Actor
    """The actor that makes its next segments; earlier ones may still be on their way from another."""
    next_arrival: int = 0
    """Index of the first segment that has not arrived."""
    next_request: int = 0
    """Index of the first segment that has not been asked for."""
    maker: Actor | None = None
    """The actor that has been asked for the segments that have not arrived."""


def shares(num_samplers: int, num_actors: int) -> list[list[int]]:
    """Deal samplers out to actors in turn; return the samplers of each actor."""
    return [list(range(actor_id, num_samplers, num_actors)) for actor_id in range(num_actors)]


class Hosting:
    """Knows the samplers of each actor, the actor of each sampler, and the actors that may be asked for something.

    It waits for enough actors: until a deadline if their number is fixed, without one if they join and leave.
    """

    def __init__(self, actors: dict[int, Actor], limits: Limits) -> None:
        self.positions = {
            sampler: SamplerPosition(actor)
            for actor in actors.values()
            for sampler in actor.samplers
        }
        self.running: dict[int, Actor] = {}
        """The actors that accept questions, by id."""
        self._first_asked: Actor | None = None  # for the spaces
        self.logged_wait = False
        """True while the log says that the run waits for actors."""
        self.slots = InstanceSlots(limits)
        self.limit = sys.maxsize
        """Maximum number of samplers of a process."""
        self.most_instantiated = 0
        """Maximum number of samplers of which a process has had environments, as answers show."""
        self._min_actors = limits.fewest_actors
        self.actors = actors
        """All actors by id."""
        self._limits = limits
        # time since which too few actors have been running; None while there are enough
        self._few_since: float | None = None
        # ids of the actors that may be asked for something new
        self._ready: set[int] = set()
        # absent actors whose samplers have no room on other actors
        self._stranded: dict[int, Actor] = {}
        # True while an actor hosts more samplers than `limit`, because other actors have no room
        self._above_limit = False
        if limits.samplers_per_actor is not None:
            self.limit_to(limits.samplers_per_actor)

    def begin(self, index: int) -> None:
        """Let all samplers start with segment `index`; nothing has been asked for."""
        for position in self.positions.values():
            position.next_arrival = index
            position.next_request = index

    # ------------------------------------------------------------------ actors come and go

    def record_start(self, actor: Actor) -> None:
        """Record that an actor accepts questions."""
        self.running[actor.actor_id] = actor
        self._ready.add(actor.actor_id)
        self._stranded.pop(actor.actor_id, None)
        actor.stranded = False
        if self._above_limit:
            self.limit_to(self.limit)

    def record_end(self, actor: Actor) -> None:
        """Record that the process of an actor, and its queue, are abandoned."""
        for question in actor.queue.values():
            for sampler in question.samplers:
                position = self.positions[sampler]
                # otherwise another actor makes these segments, too
                if position.maker is actor:
                    position.next_request = position.next_arrival
                    self._ready.add(position.host.actor_id)
        self.running.pop(actor.actor_id, None)
        self.slots.record_end(actor)

    def leave(self, actor: Actor) -> bool:
        """Let an actor accept no more questions; return False if it is leaving already, or is the only one running."""
        actor.unwanted = True
        is_leaving = actor.state in (ActorState.LEAVING, ActorState.LEFT)
        is_last = self.running.keys() == {actor.actor_id}
        if is_leaving or is_last:
            return False
        self.running.pop(actor.actor_id, None)
        actor.state = ActorState.LEAVING if actor.has_process else ActorState.LEFT
        return True

    @property
    def enough(self) -> bool:
        """True if enough actors are running to collect segments."""
        return len(self.running) >= self._min_actors

    @property
    def may_ask(self) -> bool:
        """True if enough actors are running, and one of them may be ready for a new question."""
        return (bool(self._ready) or self.slots.limited) and self.enough

    # ------------------------------------------------------------------ how far samplers are

    def mark_ready(self, *actors: Actor) -> None:
        """Record that there may be something new to ask these actors for."""
        for actor in actors:
            self._ready.add(actor.actor_id)

    def take_ready(self) -> list[Actor]:
        """Return the running actors among those marked since the last call, which may be ready for a new question."""
        if not self._ready:
            return []
        ready = self._ready
        self._ready = set()
        return [self.running[actor_id] for actor_id in ready if actor_id in self.running]

    def first_to_ask(self, now: float) -> list[Actor]:
        """Return the actors to ask for the spaces: the first that runs; while its constructor takes long, all others.

        These make environments of their own meanwhile.
        """
        idle = (
            actor
            for actor in self.running.values()
            if actor.state is ActorState.RUNNING and actor.samplers and not actor.queue
        )
        first = self._first_asked
        if first is None or not first.queue:
            self._first_asked = next(idle, None)
            if self._first_asked is None:
                return []
            return [self._first_asked]
        if now - first.deadline.began <= self._limits.quiet_s:
            return []
        return list(idle)

    def askable(self, actor: Actor, index: int) -> tuple[int, ...]:
        """Return the samplers of an actor whose segment `index` it can be asked for now.

        A sampler goes on from where this process leaves it, or is rebuilt once all of its segments have arrived.
        """
        samplers = []
        for sampler in actor.samplers:
            position = self.positions[sampler]
            if position.next_request != index:
                continue
            goes_on = position.maker is actor and actor.holds.get(sampler) == index
            if goes_on or position.next_arrival == index:
                samplers.append(sampler)
        return tuple(samplers)

    def record_question(self, samplers: Iterable[int], index: int, maker: Actor) -> None:
        """Record that an actor has been asked for segment `index` of some samplers."""
        for sampler in samplers:
            position = self.positions[sampler]
            position.next_request = index + 1
            position.maker = maker

    def record_instances(self, actor: Actor, question: Question) -> None:
        """Record which samplers have environments in a process that has answered `question`."""
        instantiated = question.hosted
        if instantiated != question.samplers:  # others may never have been asked for
            candidates = {*actor.instantiated, *question.samplers}
            instantiated = tuple(sampler for sampler in question.hosted if sampler in candidates)
        actor.instantiated = instantiated
        self.most_instantiated = max(self.most_instantiated, len(instantiated))

    def record_arrival(self, sampler: int, index: int, end: int) -> None:
        """Record that segment `index` of a sampler has arrived, of the requested ones before `end`."""
        position = self.positions[sampler]
        position.next_arrival = index + 1
        # the sampler is moving to its host, which may be asked for it now
        if position.next_request < end:
            self._ready.add(position.host.actor_id)

    # ------------------------------------------------------------------ moving samplers

    def has_room(self, actor: Actor) -> bool:
        return len(actor.samplers) < self.limit

    def limit_to(self, limit: int) -> list[int]:
        """Let no process have more than `limit` samplers; return those that went to another actor.

        Of too many samplers, an actor keeps the samplers whose environments its process has had.
        """
        self.limit = limit
        # with fewer actors, some samplers would have no host
        if self._limits.elastic:
            needed = math.ceil(len(self.positions) / limit)
            self._min_actors = max(self._limits.fewest_actors, needed)
        surplus: list[int] = []
        staying = []
        for actor in self.actors.values():
            new_last = sorted(actor.samplers, key=lambda sampler: sampler not in actor.instantiated)
            surplus += new_last[limit:]
            if actor.state not in (ActorState.LEAVING, ActorState.LEFT):
                staying.append(actor)
        moved = self._move_to(staying, surplus)
        self._above_limit = len(moved) < len(surplus)
        return list(moved)

    def move(self, samplers: Iterable[int]) -> list[int]:
        """Move each of `samplers` to the running actor with the fewest; return the ids of their new hosts.

        Samplers for which no running actor has room stay.
        """
        return sorted(set(self._move_to(self.running.values(), samplers).values()))

    def vacate(self, actors: Iterable[Actor], now: float) -> list[Command]:
        """Move the samplers of actors that cannot be replaced to running actors until they are back."""
        commands: list[Command] = []
        if not self.running:
            return commands
        for number, actor in enumerate(actors):
            samplers = actor.samplers
            hosts = self.move(samplers)
            moved = [sampler for sampler in samplers if sampler not in actor.samplers]
            absence = _describe_absence(actor, now)
            if actor.samplers:
                if not actor.stranded:
                    rule = f"no other actor has room (samplers_per_actor={self.limit})"
                    waiting = f"{samplers_named(actor.samplers)} must wait for it"
                    commands.append(Log(f"{absence}; {waiting}: {rule}"))
                actor.stranded = True
                self._stranded[actor.actor_id] = actor
            if not moved:
                continue
            actor.samplers_moved = True
            message = f"{absence}; until it is back, its samplers {listed(moved)} are on actor {listed(hosts)}"
            text = ""
            if number <= NAMED_MOVES:
                text = message
            elif number == NAMED_MOVES + 1:
                text = "and so do those of other actors"
            commands.append(Log(text, Incident(IncidentKind.SAMPLERS_MOVED, message)))
        return commands

    def _move_to(self, actors: Iterable[Actor], samplers: Iterable[int]) -> dict[int, int]:
        """Move each of `samplers` to the one of `actors` with the fewest, while one has room; return ids by sampler."""
        by_load = [(len(actor.samplers), actor.actor_id, actor) for actor in actors]
        heapify(by_load)
        hosts: dict[int, int] = {}
        for sampler in samplers:
            if not by_load or not self.has_room(by_load[0][2]):
                break
            hosted, host_id, host = by_load[0]
            self.rehost(sampler, host)
            heapreplace(by_load, (hosted + 1, host_id, host))
            hosts[sampler] = host_id
        return hosts

    def rehost(self, sampler: int, host: Actor) -> None:
        """Let `host` make the next segments of a sampler."""
        position = self.positions[sampler]
        old_host = position.host
        old_host.samplers = tuple(hosted for hosted in old_host.samplers if hosted != sampler)
        host.samplers = tuple(sorted((*host.samplers, sampler)))
        position.host = host
        self._ready.add(host.actor_id)

    def take_stranded(self) -> list[Actor]:
        """Forget and return the actors whose samplers wait for room, if some actor has room now."""
        if not self._stranded or not any(map(self.has_room, self.running.values())):
            return []
        stranded = list(self._stranded.values())
        self._stranded = {}
        return [actor for actor in stranded if actor.samplers]

    # ------------------------------------------------------------------ waiting for actors

    def check_enough(self, now: float) -> list[Command]:
        """Return a message once too few actors have been running for a while, and one once there are enough again.

        Raise ClusterError if actors whose number is fixed cannot be started.
        """
        if self._stranded and not self._limits.elastic:
            self._check_stranded(now)
        if self.enough:
            self._few_since = None
            if not self.logged_wait:
                return []
            self.logged_wait = False
            return [Log(f"training goes on with {counted(len(self.running), 'actor')}")]
        if self._few_since is None:
            self._few_since = now
        if self._limits.elastic:
            return self._log_wait(now - self._few_since)
        missing = sorted(self.actors.values(), key=lambda actor: actor.missing_since)
        limit_s = self._start_limit_s()
        if min(now - self._few_since, now - missing[-1].missing_since) > limit_s:
            raise ClusterError(
                f"actor {missing[0].actor_id} was not started by Ray within {limit_s:g} s, and no other of the "
                f"{len(missing)} is running. If the cluster is full (see `ray status`), lower `num_actors` or "
                f"`cpus_per_actor`; if starting takes longer, raise `segment_timeout_s`."
            )
        return []

    def _log_wait(self, waited_s: float) -> list[Command]:
        if self.logged_wait or waited_s < PATIENCE_S:
            return []
        self.logged_wait = True
        numbers = f"{len(self.running)} running, at least {self._min_actors} wanted"
        if self._min_actors > self._limits.fewest_actors:
            numbers += f" (samplers_per_actor={self.limit})"
        return [
            Log(f"training waits for actors: {numbers}; `ray status` shows the room in the cluster")
        ]

    def _start_limit_s(self) -> float:
        return max(self._limits.start_timeout_s, self._limits.segment_timeout_s)

    def _check_stranded(self, now: float) -> None:
        """Raise ClusterError if an actor whose samplers wait for it has not started for too long.

        If actors join and leave, another one may still take them.
        """
        limit_s = self._start_limit_s()
        for actor in self._stranded.values():
            starting = actor.state in (ActorState.ABSENT, ActorState.STARTING)
            if starting and now - actor.missing_since > limit_s:
                raise ClusterError(
                    f"actor {actor.actor_id} was not started by Ray within {limit_s:g} s, and no other actor has room "
                    f"for {samplers_named(actor.samplers)}: a process has at most {counted(self.limit, 'sampler')} "
                    f"(samplers_per_actor={self.limit}). Make room in the cluster (see `ray status`), and resume."
                )


def _describe_absence(actor: Actor, now: float) -> str:
    reason = f"has not started for {now - actor.missing_since:.0f} s"
    if actor.state is ActorState.LEFT:
        reason = "has left"
    elif actor.state is ActorState.LEAVING:
        reason = "is leaving"
    return f"actor {actor.actor_id} {reason}"


def samplers_named(samplers: Sequence[int]) -> str:
    if len(samplers) == 1:
        return f"sampler {samplers[0]}"
    if not samplers:
        return "no samplers"
    return f"samplers {listed(samplers)}"


def listed(numbers: Sequence[int]) -> str:
    """Join numbers as in `0, 3, 5`."""
    return ", ".join(map(str, numbers))
