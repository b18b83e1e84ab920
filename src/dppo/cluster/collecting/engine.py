"""Collecting: decides which actor collects which segment, and what happens when an actor fails.

Pure: no Ray, no clock, no waiting. A `Collector` passes in events with the time at which they arrived, and lets a
transport execute the commands that come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dppo.cluster.collecting import words
from dppo.cluster.collecting.hosting import Hosting
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import (
    Answered,
    Ask,
    Command,
    Describe,
    Described,
    Died,
    Event,
    Fail,
    Joined,
    Kill,
    Left,
    Limits,
    Log,
    Look,
    Progressed,
    Report,
    Start,
    Started,
)
from dppo.cluster.collecting.roster import Actor, State
from dppo.cluster.faults import Fault, RestartBudget
from dppo.cluster.wire import Answer
from dppo.errors import ClusterError
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot, SegmentReport, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces


class Collecting:
    """Collects segment `index` of all samplers from the actors that are available.

    An actor that dies or misses its deadline is killed and replaced; the new process rebuilds the samplers and
    collects the same segments. While an actor cannot be replaced, its samplers move to the others. Only the first
    answer for a segment counts, and answers from abandoned processes are ignored.
    """

    def __init__(self, hosting: Sequence[Sequence[int]], ledger: ReplayLedger, limits: Limits) -> None:
        """Create the engine; `describe` starts the actors.

        Args:
            hosting: the samplers of each actor at the start.
        """
        self.limits = limits
        self.spaces: Spaces | None = None
        """The answer to `describe`."""
        self.received: dict[int, tuple[SegmentReport, Any]] = {}
        """Report and segment of each sampler, for the last request."""
        self.timings: dict[int, Timings] = {}
        """Timings of each actor that answered the last request."""
        self._ledger = ledger
        self._budget = RestartBudget(limits.max_actor_restarts)
        self._actors = {actor_id: Actor(actor_id) for actor_id in range(len(hosting))}
        self._hosting = Hosting(hosting)
        self._owed: set[int] = set()
        self._policy: PolicySnapshot | None = None
        self._index = 0
        self._describing = False
        self._questions = 0
        self._news_at = self._asked_at = 0.0

    # ------------------------------------------------------------------ requests of the learner

    def describe(self, now: float) -> list[Command]:
        """Start all actors; ask one of them for the spaces of the environments.

        Only one is asked, so that a failing constructor runs once and is reported once.
        """
        self._describing, self._asked_at, self._news_at = True, now, now
        for actor in self._actors.values():
            actor.start_at = actor.missing_since = now
        return self.tick(now)

    def request(self, policy: PolicySnapshot, index: int, now: float) -> list[Command]:
        """Ask for segment `index` of every sampler, collected with `policy`."""
        assert not self._owed, "the last request is not finished"
        self._policy, self._index, self._asked_at, self._news_at = policy, index, now, now
        self._owed, self.received, self.timings = self._hosting.samplers, {}, {}
        self._hosting.balance([actor.actor_id for actor in self._running()])
        return self._ask_for_what_is_owed(now)

    def renew(self, now: float) -> list[Command]:
        """Replace every process and drop the current request: segments were lost, and processes may be too."""
        commands: list[Command] = []
        for actor in self._actors.values():
            if actor.state in (State.STARTING, State.RUNNING):
                commands.append(self._end(actor, now))
        self._owed.clear()
        return commands

    def heard(self, now: float) -> None:
        """Note that actors are making env steps, so that no message about waiting is due."""
        self._news_at = now

    @property
    def finished(self) -> bool:
        """True when all requested segments have arrived."""
        return not self._owed

    def alive(self) -> int:
        """Count the actors with a process."""
        return sum(actor.state in (State.STARTING, State.RUNNING) for actor in self._actors.values())

    # ------------------------------------------------------------------ events

    def on(self, event: Event, now: float) -> list[Command]:
        """Process one event and return the commands that follow from it. Call `tick` after a batch of events."""
        if isinstance(event, Joined):
            return self._join(event.actor_id, now)
        actor = self._actors.get(event.actor_id)
        if actor is None:
            return []
        if isinstance(event, Left):
            return self._leave(actor, now)
        if event.process != actor.process or actor.state in (State.ABSENT, State.LEFT):
            return []  # from an abandoned process
        return self._on_process(event, actor, now)

    def _on_process(
        self, event: Started | Died | Answered | Described | Progressed, actor: Actor, now: float
    ) -> list[Command]:
        """Process an event of the actor's current process."""
        match event:
            case Started():
                return self._started(actor, now)
            case Died(reason=reason, error=error):
                return self._lose(actor, reason, now) if error is None else [Fail(error)]
            case Progressed(progress=progress):
                actor.progressed(progress, now, self.limits)
                return []
            case _:
                return self._answered(event, actor, now)

    def _started(self, actor: Actor, now: float) -> list[Command]:
        if actor.state is not State.STARTING:
            return []
        commands: list[Command] = [Log(f"actor {actor.actor_id} is back")] if actor.samplers_moved else []
        actor.state, actor.ever_started, actor.samplers_moved = State.RUNNING, True, False
        return commands + self._ask_for_what_is_owed(now)

    def _answered(self, event: Answered | Described, actor: Actor, now: float) -> list[Command]:
        if event.ask_id not in actor.asked:
            return []  # a duplicate
        self._news_at = now
        if isinstance(event.answer, Fault):
            return [Fail(event.answer.as_error())]
        if isinstance(event, Answered):
            return self._accept(actor, event.ask_id, event.answer, now)
        actor.asked.pop(event.ask_id)
        self.spaces, self._describing = event.answer, False
        actor.extend(now, self.limits)
        return []

    def _accept(self, actor: Actor, ask_id: int, answer: Answer, now: float) -> list[Command]:
        assert self._policy is not None
        asked = [(sampler, self._index, self._policy.version) for sampler in actor.asked[ask_id]]
        got = [(report.sampler_id, report.index, report.policy_version) for report, _ in answer.made]
        if got != asked:
            reason = f"sent the wrong segments: {got} instead of {asked} (sampler, segment, policy version)"
            return self._lose(actor, reason, now)
        del actor.asked[ask_id]
        for report, segment in answer.made:
            actor.holds[report.sampler_id] = report.index + 1
            self.received[report.sampler_id] = report, segment
            self._owed.discard(report.sampler_id)
        self.timings[actor.actor_id] = self.timings.get(actor.actor_id, Timings()) + answer.timings
        self._budget.delivered(actor.actor_id)
        actor.extend(now, self.limits)
        return []

    def _join(self, actor_id: int, now: float) -> list[Command]:
        actor = self._actors.setdefault(actor_id, Actor(actor_id, state=State.LEFT))
        if actor.state is State.LEFT:
            actor.state, actor.start_at, actor.missing_since = State.ABSENT, now, now
        return []

    def _leave(self, actor: Actor, now: float) -> list[Command]:
        commands: list[Command] = []
        if actor.state in (State.STARTING, State.RUNNING):
            commands.append(self._end(actor, now))
        actor.state = State.LEFT
        return commands

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Command]:
        """Return the commands that are due: kills, starts, looks, moves, questions."""
        commands: list[Command] = []
        for actor in self._actors.values():
            if actor.is_late(now, self.limits):
                reason = words.hung(actor, self.limits, describing=self._describing)
                commands += self._lose(actor, reason, now, IncidentKind.ACTOR_HUNG)
            if now >= actor.look_at:
                actor.look_at = now + self.limits.look_s
                commands.append(Look(actor.actor_id, actor.process))
            if actor.state is State.ABSENT and now >= actor.start_at:
                actor.process += 1
                actor.state = State.STARTING
                commands.append(Start(actor.actor_id, actor.process))
        if self._running():
            for actor in self._actors.values():
                commands += self._move(actor, now)
        commands += self._ask_for_what_is_owed(now)
        if self._describing or self._owed:
            commands += self._nobody_comes(now)
            if now - self._news_at > self.limits.quiet_s:
                self._news_at = now
                commands.append(Log(self._waiting_for(now)))
        return commands

    def _nobody_comes(self, now: float) -> list[Command]:
        if self._running():
            return []
        first = min((a for a in self._actors.values()), key=lambda actor: actor.missing_since)
        if now - max(actor.missing_since for actor in self._actors.values()) <= self.limits.nobody_s:
            return []
        return [Fail(ClusterError(words.none_started(first, len(self._actors), self.limits)))]

    def _waiting_for(self, now: float) -> str:
        starting = [
            actor
            for actor in self._actors.values()
            if actor.state in (State.ABSENT, State.STARTING) and self._hosting.hosted_by(actor.actor_id)
        ]
        waited_s = now - self._asked_at
        if self._describing:
            return words.waiting_for_description(waited_s, starting)
        replaying = [actor for actor in self._actors.values() if actor.rebuilds and actor.progress is not None]
        total = len(self._hosting.samplers)
        return words.waiting_for_segments(waited_s, sorted(self._owed), total, starting, replaying, self.limits)

    # ------------------------------------------------------------------ asking

    def _ask_for_what_is_owed(self, now: float) -> list[Command]:
        """Send each running actor one question for the segments that it owes and has not been asked for."""
        if self._describing:
            return self._ask_for_description(now)
        if not self._owed:
            return []
        commands: list[Command] = []
        pending = {s for actor in self._actors.values() for samplers in actor.asked.values() for s in samplers}
        for actor in self._running():
            hosted = self._hosting.hosted_by(actor.actor_id)
            samplers = tuple(s for s in hosted if s in self._owed and s not in pending)
            if samplers:
                commands.append(self._question(actor, samplers, hosted, now))
        return commands

    def _ask_for_description(self, now: float) -> list[Command]:
        if any(actor.asked for actor in self._actors.values()):
            return []
        sampler = min(self._hosting.samplers)
        actor = self._actors[self._hosting.host_of(sampler)]
        if actor.state is not State.RUNNING:
            return []
        self._questions += 1
        actor.ask(self._questions, (sampler,), now, self.limits, rebuilds=False)
        return [Describe(actor.actor_id, actor.process, self._questions, sampler)]

    def _question(self, actor: Actor, samplers: tuple[int, ...], hosted: tuple[int, ...], now: float) -> Ask:
        assert self._policy is not None
        index, requests = self._index, []
        for sampler in samplers:
            rebuild = None if actor.holds.pop(sampler, 0) == index else self._ledger.rebuild(sampler, index)
            requests.append(SegmentRequest(sampler, index, rebuild))
        actor.holds = {sampler: held for sampler, held in actor.holds.items() if sampler in hosted}
        self._questions += 1
        rebuilds = any(request.rebuild is not None for request in requests)
        actor.ask(self._questions, samplers, now, self.limits, rebuilds=rebuilds)
        spaces = self.spaces if rebuilds or index == 0 else None
        return Ask(actor.actor_id, actor.process, self._questions, tuple(requests), hosted, self._policy, spaces)

    # ------------------------------------------------------------------ losing and moving

    def _running(self) -> list[Actor]:
        return [actor for actor in self._actors.values() if actor.state is State.RUNNING]

    def _end(self, actor: Actor, now: float) -> Kill:
        """Abandon an actor's process; a new one is due now."""
        actor.end(now)
        return Kill(actor.actor_id, actor.process)

    def _lose(
        self, actor: Actor, reason: str, now: float, kind: IncidentKind = IncidentKind.ACTOR_LOST
    ) -> list[Command]:
        """Abandon an actor's process; plan a new one, or fail when the restart budget is spent."""
        samplers = self._hosting.hosted_by(actor.actor_id)
        message = f"actor {actor.actor_id} ({words.samplers_named(samplers)}) {reason}"
        commands: list[Command] = [self._end(actor, now)]
        self._news_at = now
        delay = self._budget.spend(actor.actor_id)
        if delay is None:
            return [*commands, Fail(ClusterError(words.restarts_spent(message, self.limits)))]
        actor.start_at = now + delay
        replaced = "replaced" + (f" in {delay:.0f} s" if delay else "")
        return [*commands, Report(Incident(kind, message), f"{message}; {replaced}")]

    def _move(self, actor: Actor, now: float) -> list[Command]:
        """Move the samplers of an actor that cannot be replaced to running actors until it is back."""
        missing_s = now - actor.missing_since
        patience_s = self.limits.move_after_s if actor.ever_started else self.limits.start_timeout_s
        moved = self._hosting.hosted_by(actor.actor_id)
        if not moved or actor.state is State.RUNNING or (actor.state is not State.LEFT and missing_s <= patience_s):
            return []
        hosts = self._hosting.move(moved, [one.actor_id for one in self._running()])
        actor.samplers_moved = True
        message = words.moved(actor, missing_s, moved, hosts)
        return [Report(Incident(IncidentKind.SAMPLERS_MOVED, message), message)]
