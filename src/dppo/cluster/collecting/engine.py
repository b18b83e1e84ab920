"""Collecting: decides which actor collects which segment, and what happens when an actor fails.

Pure: no Ray, no clock, no waiting. An `ActorCollector` passes in events with the time at which they arrived, and lets a
transport execute the commands that come back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from dppo.cluster.collecting import roster
from dppo.cluster.collecting.collector import Collected
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import (
    Answered,
    Ask,
    Command,
    Describe,
    Died,
    Event,
    Joined,
    Kill,
    Left,
    Limits,
    Log,
    Look,
    Process,
    Progressed,
    Started,
)
from dppo.cluster.collecting.roster import Actor, Asked, Place, State
from dppo.cluster.faults import Fault, RestartBudget
from dppo.cluster.wire import Answer, Question
from dppo.errors import ClusterError, DppoError
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot, SegmentReport, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces


class Collecting:
    """Collects segments 0, 1, 2 ... of all samplers from the actors that are available.

    A sampler is asked for a segment as soon as that has been requested, also while it makes the one before it: an actor
    works through a queue, and waits for no other. An actor that dies or misses its deadline is killed and replaced; the
    new process rebuilds the samplers and collects the same segments. While an actor cannot be replaced, its samplers
    move to the others. Only the first answer for a segment counts, and answers from abandoned processes are ignored.
    Each call raises the error that ends the run, if there is one.

    An event costs the same with 8 and with 10,000 actors: nothing here walks over all actors, or over all samplers, but
    what happens once per iteration or while no actor is running.
    """

    def __init__(self, shares: Sequence[Iterable[int]], ledger: ReplayLedger, limits: Limits) -> None:
        """Create the engine, with the samplers of each actor at the start; `describe` starts the actors."""
        self.limits = limits
        self.spaces: Spaces | None = None
        """The answer to `describe`."""
        self.expected: Expected | None = None  # the numerics that every actor must have
        self.index = 0
        """Index of the segments to be taken next."""
        self.began = 0.0
        """Time from which on they have been waited for: that of the last request, or of the last `take`."""
        self._policies: dict[int, PolicySnapshot] = {}  # by the index of the segment, from `index` on
        self._received: dict[int, dict[int, tuple[SegmentReport, Any]]] = {}  # [index][sampler]
        self._timings: dict[int, dict[int, Timings]] = {}  # [index][id of the actor]
        self._owed = 0  # number of segments that have been requested and not been received
        self._ledger = ledger
        self._budget = RestartBudget(limits.max_actor_restarts)
        self._actors = {actor_id: Actor(actor_id, set(samplers)) for actor_id, samplers in enumerate(shares)}
        self._places = {sampler: Place(actor) for actor in self._actors.values() for sampler in actor.samplers}
        self._first_sampler = min(self._places)
        self._running: dict[int, Actor] = {}  # by id
        self._nobody_since = 0.0  # while no actor is running
        self._ready: set[int] = set()  # ids of the actors that may be asked for something new
        self._alarms: list[tuple[float, int]] = []  # a heap of times and ids of actors; some are out of date
        self._uneven = False  # True if running actors may host unequal numbers of samplers
        self._describer: Actor | None = None  # the last one asked for the spaces
        self._describing = False
        self._questions = 0
        self._news_at = 0.0

    # ------------------------------------------------------------------ requests of the learner

    def describe(self, now: float) -> list[Command]:
        """Start all actors; ask one of them for the spaces of the environments.

        Only one is asked, so that a failing constructor runs once and is reported once.
        """
        self._describing = True
        self.began = self._news_at = self._nobody_since = now
        for actor in self._actors.values():
            actor.wanted(now)
            self._set_alarm(actor)
        return self.tick(now)

    def request(self, policy: PolicySnapshot, index: int, now: float) -> list[Command]:
        """Ask for segment `index` of every sampler, collected with `policy`; earlier ones may be on their way."""
        self._news_at = now
        if not self._policies:
            self.index, self.began = index, now
            for place in self._places.values():
                place.arrived = place.asked = index
        assert index == self._end, "segments are requested in order"
        self._policies[index], self._received[index], self._timings[index] = policy, {}, {}
        self._owed += len(self._places)
        if self._uneven:
            roster.balance(self._actors.values(), self._running.values(), self._rehost)
            self._uneven = False
        self._ready.update(self._running)
        return self._ask_all_ready(now)

    @property
    def _end(self) -> int:
        """The index after that of the last request."""
        return self.index + len(self._policies)

    @property
    def finished(self) -> bool:
        """True when all segments to be taken next have arrived."""
        return self.index not in self._policies or len(self._received[self.index]) == len(self._places)

    def take(self, now: float, transfer_s: float, incidents: list[Incident]) -> Collected:
        """Return the segments that were requested first, with these figures; keep none."""
        assert self.index in self._policies, "receive() without request()"
        assert self.finished, "some segments have not arrived"
        index, received = self.index, self._received.pop(self.index)
        made = [received[sampler] for sampler in sorted(received)]
        began, self.index, self.began = self.began, index + 1, now
        return Collected(
            index=index,
            policy=self._policies.pop(index),
            reports=[report for report, _ in made],
            segments=[segment for _, segment in made],
            timings=list(self._timings.pop(index).values()),
            collect_s=now - began,
            transfer_s=transfer_s,
            incidents=incidents,
        )

    @property
    def steps_received(self) -> int:
        """Env steps of the segments to be taken next, as far as they have arrived."""
        return sum(report.steps for report, _ in self._received[self.index].values())

    def working(self) -> dict[Process, bool]:
        """Return the processes that are working, and whether on the segments to be taken next or on later ones."""
        busy = [actor for actor in self._running.values() if actor.asked]
        return {actor.process: actor.first.index == self.index for actor in busy}

    def renew(self, now: float) -> list[Command]:
        """Replace every process and drop all requests: segments were lost, and processes may be too."""
        commands: list[Command] = [self._abandon(actor, now) for actor in self._actors.values() if actor.has_process]
        for by_index in (self._policies, self._received, self._timings):
            by_index.clear()
        self._owed = 0
        return commands

    def heard(self, now: float) -> None:
        """Note that actors are making env steps, so that no message about waiting is due."""
        self._news_at = now

    def alive(self) -> int:
        """Count the actors with a process."""
        return sum(actor.has_process for actor in self._actors.values())

    # ------------------------------------------------------------------ events

    def on(self, event: Event, now: float) -> list[Command]:
        """Process one event and return the commands that follow from it. Call `tick` after a batch of events."""
        if isinstance(event, Joined | Left):
            return self._join_or_leave(event, now)
        actor = self._actors[event.process.actor_id]
        if event.process != actor.process or not actor.has_process:
            return []  # from an abandoned process
        match event:
            case Started():
                return self._started(actor)
            case Died(error=DppoError() as error):
                raise error
            case Died(reason=reason):
                return self._lose(actor, reason, now)
            case Answered(ask_id=ask_id, answer=answer) if ask_id in actor.asked:  # else a duplicate
                return self._answered(actor, ask_id, answer, now)
            case Progressed(progress=progress):
                actor.progressed(progress, now, self.limits)
        return []

    def _started(self, actor: Actor) -> list[Command]:
        commands: list[Command] = [Log(f"actor {actor.actor_id} is back")] if actor.samplers_moved else []
        actor.state, actor.ever_started, actor.samplers_moved = State.RUNNING, True, False
        self._running[actor.actor_id] = actor
        self._ready.add(actor.actor_id)
        self._uneven = True
        return commands

    def _answered(self, actor: Actor, ask_id: int, answer: Answer | Spaces | Fault, now: float) -> list[Command]:
        """Take in this answer and those that came too early; a large answer may arrive after the one behind it."""
        self._news_at = now
        actor.early[ask_id] = answer
        commands: list[Command] = []
        while actor.asked and (first := next(iter(actor.asked))) in actor.early:
            commands += self._take_in(actor, first, actor.early.pop(first), now)
        return commands

    def _take_in(self, actor: Actor, ask_id: int, answer: Answer | Spaces | Fault, now: float) -> list[Command]:
        if isinstance(answer, ClusterError):
            return self._lose(actor, f"was refused: {answer}", now)
        if isinstance(answer, Fault):
            raise answer
        if isinstance(answer, Answer):
            index, samplers = actor.first.index, actor.first.samplers
            asked = [(sampler, index, self._policies[index].version) for sampler in samplers]
            got = [(report.sampler_id, report.index, report.policy_version) for report, _ in answer.made]
            if got != asked:
                reason = f"sent the wrong segments: {got} instead of {asked} (sampler, segment, policy version)"
                return self._lose(actor, reason, now)
            for report, segment in answer.made:
                self._arrived(report, segment)
            timings = self._timings[index]
            timings[actor.actor_id] = timings.get(actor.actor_id, Timings()) + answer.timings
            self._budget.delivered(actor.actor_id)
        else:
            self.spaces, self._describing = answer, False
        actor.answered(ask_id, now, self.limits)
        return []

    def _arrived(self, report: SegmentReport, segment: Any) -> None:
        self._ledger.record(report)
        self._received[report.index][report.sampler_id] = report, segment
        self._owed -= 1
        place = self._places[report.sampler_id]
        place.arrived = report.index + 1
        if place.asked < self._end:  # it is moving to its host, which may be asked now
            self._ready.add(place.host.actor_id)

    def _join_or_leave(self, event: Joined | Left, now: float) -> list[Command]:
        actor = self._actors.get(event.actor_id) or Actor(event.actor_id, state=State.LEFT)
        if isinstance(event, Joined):
            self._actors[event.actor_id] = actor
            if actor.state is State.LEFT:
                actor.wanted(now)
                self._set_alarm(actor)
            return []
        commands: list[Command] = [self._abandon(actor, now)] if actor.has_process else []
        actor.state = State.LEFT
        self._set_alarm(actor)
        return commands

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Command]:
        """Return the commands that are due: kills, starts, looks, moves, questions."""
        commands: list[Command] = []
        alarmed = self._alarmed(now)
        for actor in alarmed:
            if actor.is_late(now, self.limits):
                reason = roster.hung(actor, self.limits, describing=self._describing)
                commands += self._lose(actor, reason, now, IncidentKind.ACTOR_HUNG)
            if now >= actor.look_at:
                actor.look_at = now + self.limits.look_s
                commands.append(Look(actor.process))
            if actor.state is State.ABSENT and now >= actor.start_at:
                commands.append(actor.start())
        commands += self._move([actor for actor in alarmed if now > actor.move_at(self.limits)], now)
        for actor in alarmed:
            self._set_alarm(actor)
        if self._describing or self._owed:
            self._check_that_somebody_comes(now)
            commands += self._ask_all_ready(now)
            if now - self._news_at > self.limits.quiet_s:
                self._news_at = now
                owed = [] if self._describing else self._missing()
                waited_s, actors = now - self.began, self._actors.values()
                commands.append(Log(roster.waiting(waited_s, owed, len(self._places), actors, self.limits)))
        return commands

    def _missing(self) -> list[int]:
        return sorted(sampler for sampler, place in self._places.items() if place.arrived <= self.index)

    def _set_alarm(self, actor: Actor) -> None:
        """Let a tick attend to this actor when its next deadline passes; a later alarm than before need not be set."""
        when = actor.next_alarm(self.limits)
        if when < actor.alarm_at:
            actor.alarm_at = when
            heappush(self._alarms, (when, actor.actor_id))

    def _alarmed(self, now: float) -> list[Actor]:
        """Return the actors whose alarms are due, and forget these alarms."""
        alarmed = []
        while self._alarms and self._alarms[0][0] <= now:
            when, actor_id = heappop(self._alarms)
            actor = self._actors[actor_id]
            if when == actor.alarm_at:  # else an earlier one has been set since
                actor.alarm_at = math.inf
                alarmed.append(actor)
        return alarmed

    def _check_that_somebody_comes(self, now: float) -> None:
        if self._running or now - self._nobody_since <= self.limits.nobody_s:
            return
        missing = sorted(self._actors.values(), key=lambda actor: actor.missing_since)
        if now - missing[-1].missing_since > self.limits.nobody_s:
            raise ClusterError(roster.none_started(missing[0], len(missing), self.limits))

    # ------------------------------------------------------------------ asking

    def _ask_all_ready(self, now: float) -> list[Command]:
        """Ask the actors that may have something new to do."""
        if self._describing:
            return self._ask_for_description(now)
        ready, self._ready = self._ready, set()
        running = [self._running[actor_id] for actor_id in ready if actor_id in self._running]
        return [command for actor in running for command in self._ask(actor, now)]

    def _ask(self, actor: Actor, now: float) -> list[Command]:
        """Send an actor one question for each requested segment that its samplers can go on to.

        A sampler goes on from where this process leaves it, or is rebuilt once all of its segments have arrived.
        """
        commands: list[Command] = []
        places = {sampler: self._places[sampler] for sampler in actor.samplers}
        for index in range(min((place.asked for place in places.values()), default=self._end), self._end):
            can = [
                sampler
                for sampler, place in places.items()
                if place.asked == index and (place.arrived == index or actor.holds.get(sampler) == index)
            ]
            if can:
                commands.append(self._question(actor, index, tuple(sorted(can)), now))
        return commands

    def _ask_for_description(self, now: float) -> list[Command]:
        sampler, before = self._first_sampler, self._describer
        actor = self._places[sampler].host
        if actor.state is not State.RUNNING or (before is not None and before.asked):
            return []
        self._describer = actor
        return [Describe(actor.process, self._queue(actor, Asked(-1, (sampler,), rebuilds=False), now), sampler)]

    def _question(self, actor: Actor, index: int, samplers: tuple[int, ...], now: float) -> Ask:
        requests = []
        for sampler in samplers:
            rebuild = None if actor.holds.get(sampler, 0) == index else self._ledger.rebuild(sampler, index)
            requests.append(SegmentRequest(sampler, index, rebuild))
            actor.holds[sampler] = self._places[sampler].asked = index + 1
        actor.holds = {sampler: held for sampler, held in actor.holds.items() if sampler in actor.samplers}
        rebuilds = any(request.rebuild is not None for request in requests)
        checks = (self.spaces, self.expected) if rebuilds or index == 0 else (None, None)
        question = Question(tuple(requests), tuple(sorted(actor.samplers)), *checks)
        ask_id = self._queue(actor, Asked(index, samplers, rebuilds), now)
        return Ask(actor.process, ask_id, question, self._policies[index])

    def _queue(self, actor: Actor, asked: Asked, now: float) -> int:
        """Put a question into an actor's queue; return its id."""
        self._questions += 1
        actor.ask(self._questions, asked, now, self.limits)
        self._set_alarm(actor)
        return self._questions

    # ------------------------------------------------------------------ losing and moving

    def _abandon(self, actor: Actor, now: float) -> Kill:
        """Abandon an actor's process and its queue; a new one is due now."""
        if self._running.pop(actor.actor_id, None) is not None and not self._running:
            self._nobody_since = now
        for asked in actor.asked.values():
            for place in map(self._places.__getitem__, asked.samplers):
                place.asked = place.arrived
                self._ready.add(place.host.actor_id)
        kill = actor.end(now)
        self._set_alarm(actor)
        return kill

    def _lose(
        self, actor: Actor, reason: str, now: float, kind: IncidentKind = IncidentKind.ACTOR_LOST
    ) -> list[Command]:
        """Abandon an actor's process; plan a new one, or raise when the restart budget is spent."""
        message = f"actor {actor.actor_id} ({roster.samplers_named(sorted(actor.samplers))}) {reason}"
        self._news_at = now
        kill, delay = self._abandon(actor, now), self._budget.spend(actor.actor_id)
        if delay is None:
            raise ClusterError(roster.restarts_spent(message, self.limits))
        actor.start_at = now + delay
        replaced = "replaced" + (f" in {delay:.0f} s" if delay else "")
        return [kill, Log(f"{message}; {replaced}", Incident(kind, message))]

    def _move(self, gone: Iterable[Actor], now: float) -> list[Command]:
        """Move the samplers of actors that cannot be replaced to running actors until they are back."""
        commands: list[Command] = []
        for actor in gone if self._running else ():
            moved, actor.samplers_moved = sorted(actor.samplers), True
            hosts = roster.move(moved, self._running.values(), self._rehost)
            message = roster.moved(actor, now - actor.missing_since, moved, hosts)
            commands.append(Log(message, Incident(IncidentKind.SAMPLERS_MOVED, message)))
        return commands

    def _rehost(self, sampler: int, host: Actor) -> None:
        """Let `host` make the next segments of a sampler."""
        self._places[sampler].host.samplers.remove(sampler)
        host.samplers.add(sampler)
        self._places[sampler].host = host
        self._ready.add(host.actor_id)
        self._uneven = True
