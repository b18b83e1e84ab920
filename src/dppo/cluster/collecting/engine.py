"""Collecting: decides which actor makes which segment, and what happens when one fails.

Pure: no Ray, no clock, no waiting. A `Collector` feeds it events with the time at which they came, and lets a
transport carry out its commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import (
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
    Look,
    Progressed,
    Report,
    Say,
    Start,
    Started,
)
from dppo.cluster.collecting.roster import Actor, State
from dppo.cluster.faults import Fault, RestartBudget
from dppo.cluster.wire import Answer
from dppo.errors import ClusterError
from dppo.ppo.segment import Incident, IncidentKind, PolicySnapshot, SegmentReport, SegmentRequest, Timings
from dppo.spaces import Spaces


class Collecting:
    """Collects segment `index` of all samplers, from whichever actors are there.

    An actor that dies, or lets its deadline pass, is killed and replaced; the new process rebuilds the samplers and
    makes the same segments. One that does not come back leaves its samplers to the others until it does. Only the
    first answer for a segment counts, and none of a process that was given up.
    """

    def __init__(self, hosting: Sequence[Sequence[int]], ledger: ReplayLedger, limits: Limits) -> None:
        """Args:
        hosting: the samplers of each actor to begin with.
        """
        self.limits = limits
        self.spaces: Spaces | None = None
        """The answer to `describe`."""
        self.received: dict[int, tuple[SegmentReport, Any]] = {}
        """Report and segment by sampler, of the request made last."""
        self.timings: dict[int, Timings] = {}
        """Of each actor that answered it."""
        self._ledger = ledger
        self._budget = RestartBudget(limits.max_actor_restarts)
        self._actors = {actor_id: Actor(actor_id) for actor_id in range(len(hosting))}
        self._where = {sampler: actor_id for actor_id, samplers in enumerate(hosting) for sampler in samplers}
        self._owed: set[int] = set()
        self._policy: PolicySnapshot | None = None
        self._index = 0
        self._describing = False
        self._questions = 0
        self._news_at = self._asked_at = 0.0

    # ------------------------------------------------------------------ what the learner wants

    def describe(self, now: float) -> list[Command]:
        """Start all actors; ask for the spaces of the environments.

        One actor alone is asked, so that a constructor that fails runs once and is reported once.
        """
        self._describing, self._asked_at, self._news_at = True, now, now
        for actor in self._actors.values():
            actor.start_at = actor.missing_since = now
        return self.tick(now)

    def request(self, policy: PolicySnapshot, index: int, now: float) -> list[Command]:
        """Ask for segment `index` of every sampler, to be made under `policy`."""
        assert not self._owed, "the last request is not finished"
        self._policy, self._index, self._asked_at, self._news_at = policy, index, now, now
        self._owed, self.received, self.timings = set(self._where), {}, {}
        self._balance()
        return self._ask_for_what_is_owed(now)

    def renew(self, now: float) -> list[Command]:
        """Replace every process, and forget what was requested: their segments are lost, perhaps they are as well."""
        commands: list[Command] = []
        for actor in self._actors.values():
            if actor.state in (State.STARTING, State.RUNNING):
                commands.append(self._end(actor, now))
        self._owed.clear()
        return commands

    @property
    def finished(self) -> bool:
        """True when everything that was requested is here."""
        return not self._owed

    def alive(self) -> int:
        """Count the actors that have a process."""
        return sum(actor.state in (State.STARTING, State.RUNNING) for actor in self._actors.values())

    # ------------------------------------------------------------------ events

    def on(self, event: Event, now: float) -> list[Command]:
        """Take in what happened; return what to do about it. `tick` follows when all that happened is taken in."""
        if isinstance(event, Joined):
            return self._join(event.actor_id, now)
        actor = self._actors.get(event.actor_id)
        if actor is None:
            return []
        if isinstance(event, Left):
            return self._leave(actor, now)
        if event.process != actor.process or actor.state in (State.ABSENT, State.LEFT):
            return []  # of a process that was given up
        if isinstance(event, Started):
            return self._started(actor, now)
        if isinstance(event, Died):
            return [Fail(event.error)] if event.error is not None else self._lose(actor, event.reason, now)
        if isinstance(event, Progressed):
            actor.progressed(event.progress, now, self.limits)
            return []
        if event.ask_id not in actor.asked:
            return []  # a second time
        self._news_at = now
        if isinstance(event.answer, Fault):
            return [Fail(event.answer.as_error())]
        if isinstance(event, Described):
            actor.asked.pop(event.ask_id)
            self.spaces, self._describing = event.answer, False
            actor.extend(now, self.limits)
            return []
        return self._accept(actor, event.ask_id, event.answer, now)

    def _started(self, actor: Actor, now: float) -> list[Command]:
        if actor.state is not State.STARTING:
            return []
        said: list[Command] = [Say(f"actor {actor.actor_id} is back")] if actor.given_up else []
        actor.state, actor.ever_started, actor.given_up = State.RUNNING, True, False
        return said + self._ask_for_what_is_owed(now)

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
        actor.delivered = True
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
        """Do what is due."""
        commands: list[Command] = []
        for actor in self._actors.values():
            if actor.is_late(now, self.limits):
                commands += self._lose(actor, self._why_hung(actor), now, IncidentKind.ACTOR_HUNG)
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
                commands.append(Say(self._waiting_for(now)))
        return commands

    def _nobody_comes(self, now: float) -> list[Command]:
        if self._running():
            return []
        first = min((a for a in self._actors.values()), key=lambda actor: actor.missing_since)
        if now - max(actor.missing_since for actor in self._actors.values()) <= self.limits.nobody_s:
            return []
        return [
            Fail(
                ClusterError(
                    f"actor {first.actor_id} was not started by Ray within {self.limits.nobody_s:g} s, and no other "
                    f"of the {len(self._actors)} is running. Either the cluster has no room (see `ray status`): use "
                    f"fewer --num-actors or lower --cpus-per-actor; or starting takes longer: raise "
                    f"--segment-timeout-s."
                )
            )
        ]

    def _waiting_for(self, now: float) -> str:
        restarted = [
            f"actor {actor.actor_id} is being {'restarted' if actor.ever_started else 'started'}"
            for actor in self._actors.values()
            if actor.state in (State.ABSENT, State.STARTING) and actor.actor_id in self._where.values()
        ]
        replaying = [
            f"actor {actor.actor_id}: {actor.progress}"
            for actor in self._actors.values()
            if actor.rebuilds and actor.progress is not None
        ]
        waited = f"for {now - self._asked_at:.0f} s"
        if self._describing:
            return "; ".join([f"waiting for the first environment {waited}", *_shortened(restarted)])
        owed = sorted(self._owed)
        samplers = f"samplers {_listed(owed[:8])}{' ...' if len(owed) > 8 else ''}"
        none = "makes no progress" if replaying else "sends none"
        rule = f"an actor that {none} for {self.limits.segment_timeout_s:g} s is replaced"
        segments = f"waiting for {len(owed)} of {len(self._where)} segments {waited} ({samplers})"
        return "; ".join([segments, *_shortened(restarted), *_shortened(replaying), rule])

    # ------------------------------------------------------------------ asking

    def _ask_for_what_is_owed(self, now: float) -> list[Command]:
        """Ask each running actor, in one question, for what it owes and has not been asked for."""
        if self._describing:
            return self._ask_for_description(now)
        if not self._owed:
            return []
        commands: list[Command] = []
        pending = {s for actor in self._actors.values() for samplers in actor.asked.values() for s in samplers}
        for actor in self._running():
            hosted = tuple(sorted(s for s, actor_id in self._where.items() if actor_id == actor.actor_id))
            samplers = tuple(s for s in hosted if s in self._owed and s not in pending)
            if samplers:
                commands.append(self._question(actor, samplers, hosted, now))
        return commands

    def _ask_for_description(self, now: float) -> list[Command]:
        if any(actor.asked for actor in self._actors.values()):
            return []
        sampler = min(self._where)
        actor = self._actors[self._where[sampler]]
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

    def _why_hung(self, actor: Actor) -> str:
        limit = f"segment_timeout_s={self.limits.segment_timeout_s:g}"
        if self._describing:
            return f"made no environment within {limit}"
        stuck = "" if actor.progress is None else f", was last seen {actor.progress}"
        return (
            f"sent no segment for {limit}{stuck} and counts as hung; if its simulator is only slow, raise "
            f"--segment-timeout-s"
        )

    def _end(self, actor: Actor, now: float) -> Kill:
        """Give up an actor's process; a new one is due now."""
        actor.end(now)
        return Kill(actor.actor_id, actor.process)

    def _lose(
        self, actor: Actor, reason: str, now: float, kind: IncidentKind = IncidentKind.ACTOR_LOST
    ) -> list[Command]:
        """Give up an actor's process, and plan a new one while the budget lasts."""
        samplers = [sampler for sampler, actor_id in self._where.items() if actor_id == actor.actor_id]
        message = f"actor {actor.actor_id} (samplers {_listed(sorted(samplers))}) {reason}"
        commands: list[Command] = [self._end(actor, now)]
        self._news_at = now
        delay = self._budget.spend(actor.actor_id)
        if delay is None:
            error = ClusterError(
                f"{message}\nIt was replaced {self.limits.max_actor_restarts} times in a row without making a segment "
                f"(max_actor_restarts={self.limits.max_actor_restarts}). Look for the reason in the simulator's own "
                f"log; `--num-actors 0` runs it in this process, where a debugger can follow."
            )
            return [*commands, Fail(error)]
        actor.start_at = now + delay
        replaced = "replaced" + (f" in {delay:.0f} s" if delay else "")
        return [*commands, Report(Incident(kind, message), f"{message}; {replaced}")]

    def _move(self, actor: Actor, now: float) -> list[Command]:
        """Give the samplers of an actor that does not come back to those that run, until it does."""
        missing_s = now - actor.missing_since
        patience_s = self.limits.move_after_s if actor.ever_started else self.limits.start_timeout_s
        moved = sorted(sampler for sampler, actor_id in self._where.items() if actor_id == actor.actor_id)
        if not moved or actor.state is State.RUNNING or (actor.state is not State.LEFT and missing_s <= patience_s):
            return []
        for sampler in moved:
            self._where[sampler] = min(self._running(), key=self._load).actor_id
        actor.given_up = True
        hosts = sorted({self._where[sampler] for sampler in moved})
        reason = "has left" if actor.state is State.LEFT else f"has not started for {missing_s:.0f} s"
        message = (
            f"actor {actor.actor_id} {reason}; until it is back, its samplers {_listed(moved)} are on actor "
            f"{_listed(hosts)}"
        )
        return [Report(Incident(IncidentKind.SAMPLERS_MOVED, message), message)]

    def _load(self, actor: Actor) -> int:
        return sum(actor_id == actor.actor_id for actor_id in self._where.values())

    def _balance(self) -> None:
        """Let no running actor host two samplers fewer than another: between two segments, when one may be back."""
        running = {actor.actor_id for actor in self._running()}
        loads = dict.fromkeys(running, 0)
        for actor_id in self._where.values():
            loads[actor_id] = loads.get(actor_id, 0) + 1
        while running:
            least, most = min(running, key=lambda one: (loads[one], one)), max(loads, key=lambda one: loads[one])
            if loads[most] - loads[least] < 2:
                return
            sampler = max(s for s, actor_id in self._where.items() if actor_id == most)
            self._where[sampler] = least
            loads[most], loads[least] = loads[most] - 1, loads[least] + 1


def _shortened(parts: list[str], most: int = 4) -> list[str]:
    return parts if len(parts) <= most else [*parts[:most], f"and so are {len(parts) - most} more"]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
