"""Collecting: decides which actor collects which segment, and what happens when an actor fails.

Pure: no Ray, no clock, no waiting. An `ActorCollector` passes in events with the time at which they arrived, and lets a
transport execute the commands that come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    Left,
    Limits,
    Log,
    Look,
    Progressed,
    Started,
)
from dppo.cluster.collecting.roster import Actor, State
from dppo.cluster.faults import Fault, RestartBudget
from dppo.cluster.wire import Answer, Question
from dppo.errors import ClusterError, DppoError
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot, SegmentReport, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces


class Collecting:
    """Collects segment `index` of all samplers from the actors that are available.

    An actor that dies or misses its deadline is killed and replaced; the new process rebuilds the samplers and
    collects the same segments. While an actor cannot be replaced, its samplers move to the others. Only the first
    answer for a segment counts, and answers from abandoned processes are ignored. Each call raises the error that ends
    the run, if there is one.
    """

    def __init__(self, shares: Sequence[Iterable[int]], ledger: ReplayLedger, limits: Limits) -> None:
        """Create the engine, with the samplers of each actor at the start; `describe` starts the actors."""
        self.limits = limits
        self.spaces: Spaces | None = None
        """The answer to `describe`."""
        self.expected: Expected | None = None  # the numerics that every actor must have
        self.received: dict[int, tuple[SegmentReport, Any]] = {}
        """Report and segment of each sampler, for the last request."""
        self._timings: dict[int, Timings] = {}  # of each actor that answered the last request
        self._ledger = ledger
        self._budget = RestartBudget(limits.max_actor_restarts)
        self._actors = {actor_id: Actor(actor_id, set(samplers)) for actor_id, samplers in enumerate(shares)}
        self._samplers = frozenset[int]().union(*shares)
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
            actor.wanted(now)
        return self.tick(now)

    def request(self, policy: PolicySnapshot, index: int, now: float) -> list[Command]:
        """Ask for segment `index` of every sampler, collected with `policy`."""
        assert not self._owed, "the last request is not finished"
        self._policy, self._index, self._asked_at, self._news_at = policy, index, now, now
        self._owed, self.received, self._timings = set(self._samplers), {}, {}
        roster.balance(self._actors.values())
        return self._ask_for_what_is_owed(now)

    @property
    def finished(self) -> bool:
        """True when all requested segments have arrived."""
        return not self._owed

    def take(self, collect_s: float, transfer_s: float, incidents: list[Incident]) -> Collected:
        """Return everything collected for the last request, with these figures; keep no segment."""
        assert self.received.keys() == self._samplers, "receive() without request()"
        assert self._policy is not None  # which every request brings
        made, self.received = [self.received[sampler] for sampler in sorted(self.received)], {}
        return Collected(
            index=self._index,
            policy=self._policy,
            reports=[report for report, _ in made],
            segments=[segment for _, segment in made],
            timings=list(self._timings.values()),
            collect_s=collect_s,
            transfer_s=transfer_s,
            incidents=incidents,
        )

    @property
    def steps_received(self) -> int:
        """Env steps of the segments received for the last request."""
        return sum(report.steps for report, _ in self.received.values())

    def renew(self, now: float) -> list[Command]:
        """Replace every process and drop the current request: segments were lost, and processes may be too."""
        self._owed.clear()
        return [actor.end(now) for actor in self._actors.values() if actor.has_process]

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
                commands: list[Command] = [Log(f"actor {actor.actor_id} is back")] if actor.samplers_moved else []
                actor.state, actor.ever_started, actor.samplers_moved = State.RUNNING, True, False
                return commands
            case Died(error=DppoError() as error):
                raise error
            case Died(reason=reason):
                return self._lose(actor, reason, now)
            case Answered(ask_id=ask_id, answer=answer) if ask_id in actor.asked:  # else a duplicate
                return self._answered(actor, ask_id, answer, now)
            case Progressed(progress=progress):
                actor.progressed(progress, now, self.limits)
        return []

    def _answered(self, actor: Actor, ask_id: int, answer: Answer | Spaces | Fault, now: float) -> list[Command]:
        self._news_at = now
        if isinstance(answer, ClusterError):
            return self._lose(actor, f"was refused: {answer}", now)
        if isinstance(answer, Fault):
            raise answer
        if isinstance(answer, Answer):
            assert self._policy is not None
            asked = [(sampler, self._index, self._policy.version) for sampler in actor.asked[ask_id]]
            got = [(report.sampler_id, report.index, report.policy_version) for report, _ in answer.made]
            if got != asked:
                reason = f"sent the wrong segments: {got} instead of {asked} (sampler, segment, policy version)"
                return self._lose(actor, reason, now)
            for report, segment in answer.made:
                actor.holds[report.sampler_id] = report.index + 1
                self.received[report.sampler_id] = report, segment
                self._owed.discard(report.sampler_id)
            self._timings[actor.actor_id] = self._timings.get(actor.actor_id, Timings()) + answer.timings
            self._budget.delivered(actor.actor_id)
        else:
            self.spaces, self._describing = answer, False
        actor.answered(ask_id, now, self.limits)
        return []

    def _join_or_leave(self, event: Joined | Left, now: float) -> list[Command]:
        actor = self._actors.get(event.actor_id) or Actor(event.actor_id, state=State.LEFT)
        if isinstance(event, Joined):
            self._actors[event.actor_id] = actor
            if actor.state is State.LEFT:
                actor.wanted(now)
            return []
        commands: list[Command] = [actor.end(now)] if actor.has_process else []
        actor.state = State.LEFT
        return commands

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Command]:
        """Return the commands that are due: kills, starts, looks, moves, questions."""
        commands: list[Command] = []
        for actor in self._actors.values():
            if actor.is_late(now, self.limits):
                reason = roster.hung(actor, self.limits, describing=self._describing)
                commands += self._lose(actor, reason, now, IncidentKind.ACTOR_HUNG)
            if now >= actor.look_at:
                actor.look_at = now + self.limits.look_s
                commands.append(Look(actor.process))
            if actor.state is State.ABSENT and now >= actor.start_at:
                commands.append(actor.start())
        commands += self._move(now)
        if self._describing or self._owed:
            self._check_that_somebody_comes(now)
            commands += self._ask_for_what_is_owed(now)
            if now - self._news_at > self.limits.quiet_s:
                self._news_at = now
                owed, total = sorted(self._owed), len(self._samplers)
                waited_s = now - self._asked_at
                commands.append(Log(roster.waiting(waited_s, owed, total, self._actors.values(), self.limits)))
        return commands

    def _check_that_somebody_comes(self, now: float) -> None:
        if self._running():
            return
        missing = sorted(self._actors.values(), key=lambda actor: actor.missing_since)
        if now - missing[-1].missing_since > self.limits.nobody_s:
            raise ClusterError(roster.none_started(missing[0], len(missing), self.limits))

    # ------------------------------------------------------------------ asking

    def _ask_for_what_is_owed(self, now: float) -> list[Command]:
        """Send each running actor one question for the segments that it owes and has not been asked for."""
        if self._describing:
            return self._ask_for_description(now)
        commands: list[Command] = []
        for actor in self._running():
            samplers = (self._owed & actor.samplers) - actor.pending
            if samplers:
                commands.append(self._question(actor, tuple(sorted(samplers)), now))
        return commands

    def _ask_for_description(self, now: float) -> list[Command]:
        sampler = min(self._samplers)
        actor = next(actor for actor in self._actors.values() if sampler in actor.samplers)
        if actor.state is not State.RUNNING or any(other.asked for other in self._actors.values()):
            return []
        self._questions += 1
        actor.ask(self._questions, (sampler,), now, self.limits, rebuilds=False)
        return [Describe(actor.process, self._questions, sampler)]

    def _question(self, actor: Actor, samplers: tuple[int, ...], now: float) -> Ask:
        assert self._policy is not None
        index, requests = self._index, []
        for sampler in samplers:
            rebuild = None if actor.holds.pop(sampler, 0) == index else self._ledger.rebuild(sampler, index)
            requests.append(SegmentRequest(sampler, index, rebuild))
        actor.holds = {sampler: held for sampler, held in actor.holds.items() if sampler in actor.samplers}
        self._questions += 1
        rebuilds = any(request.rebuild is not None for request in requests)
        actor.ask(self._questions, samplers, now, self.limits, rebuilds=rebuilds)
        checks = (self.spaces, self.expected) if rebuilds or index == 0 else (None, None)
        question = Question(tuple(requests), tuple(sorted(actor.samplers)), *checks)
        return Ask(actor.process, self._questions, question, self._policy)

    # ------------------------------------------------------------------ losing and moving

    def _running(self) -> list[Actor]:
        return [actor for actor in self._actors.values() if actor.state is State.RUNNING]

    def _lose(
        self, actor: Actor, reason: str, now: float, kind: IncidentKind = IncidentKind.ACTOR_LOST
    ) -> list[Command]:
        """Abandon an actor's process; plan a new one, or raise when the restart budget is spent."""
        message = f"actor {actor.actor_id} ({roster.samplers_named(sorted(actor.samplers))}) {reason}"
        self._news_at = now
        kill, delay = actor.end(now), self._budget.spend(actor.actor_id)
        if delay is None:
            raise ClusterError(roster.restarts_spent(message, self.limits))
        actor.start_at = now + delay
        replaced = "replaced" + (f" in {delay:.0f} s" if delay else "")
        return [kill, Log(f"{message}; {replaced}", Incident(kind, message))]

    def _move(self, now: float) -> list[Command]:
        """Move the samplers of actors that cannot be replaced to running actors until they are back."""
        commands: list[Command] = []
        for actor in self._actors.values():
            missing_s = now - actor.missing_since
            patience_s = self.limits.move_after_s if actor.ever_started else self.limits.start_timeout_s
            gone = actor.state is State.LEFT or (actor.state is not State.RUNNING and missing_s > patience_s)
            running = self._running() if gone and actor.samplers else []
            if running:
                moved, actor.samplers, actor.samplers_moved = sorted(actor.samplers), set(), True
                message = roster.moved(actor, missing_s, moved, roster.move(moved, running))
                commands.append(Log(message, Incident(IncidentKind.SAMPLERS_MOVED, message)))
        return commands
