"""CollectionEngine: decides which actor collects which segment, and what happens when an actor fails.

Pure: no Ray, no clock, no waiting. An `ActorCollector` passes in events with the time at which they arrived, and lets a
transport execute the commands that come back.
"""

import math
from collections.abc import Iterable, Sequence

from dppo.engine import messages
from dppo.engine.actors import Actor, State
from dppo.engine.alarms import Alarms
from dppo.engine.backups import Backups
from dppo.engine.balancing import Balancing
from dppo.engine.hosting import Hosting, listed, samplers_named
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import LONGEST_QUIET_S, Ask, Command, Event, Limits, Log, Recycled
from dppo.engine.patience import Patience
from dppo.engine.requests import Requests
from dppo.engine.restarts import delay_before
from dppo.envs.activity import Phase
from dppo.errors import ClusterError, DppoError, EnvironmentFault, counted
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.questions import Answer, Question
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot
from dppo.spaces.spaces import Spaces

TICKS_S = 1.0  # from one tick to the next at most, while somebody waits for segments


class CollectionEngine:
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
        self.limits, self._ledger = limits, ledger
        self.spaces: Spaces | None = None  # the answer to `describe`
        self.expected: Expected | None = None  # the numerics that every actor must have
        self._actors = {actor_id: Actor(actor_id, tuple(samplers)) for actor_id, samplers in enumerate(shares)}
        self.hosting = Hosting(self._actors, limits)
        self.requests = Requests(len(self.hosting.positions))  # segments requested and not yet taken
        self.patience, self._alarms = Patience(limits), Alarms(self._actors, limits)
        self.balancing = Balancing(self._actors, self.hosting, ledger)
        self.backups = Backups(self.hosting, self.balancing) if limits.backup_requests else None
        self._commands: list[Command] = []  # not yet returned
        self._questions = 0
        self.news_at = 0.0  # time of the last sign of progress
        self._quiet_index, self._quiet_s = -2, limits.quiet_s  # seconds without one until a line; for these segments
        self._ticked_at = 0.0  # time of the last tick

    # ------------------------------------------------------------------ requests of the learner

    def describe(self, now: float) -> list[Command]:
        """Start all actors; ask one of them for the spaces of the environments.

        Only one is asked, so that a failing constructor runs once and is reported once.
        """
        self.requests.began = self.news_at = now
        for actor in self._actors.values():
            actor.wanted(now)
            self._alarms.set(actor)
        return self.tick(now)

    def request(self, policy: PolicySnapshot, index: int, now: float) -> list[Command]:
        """Ask for segment `index` of every sampler, collected with `policy`; earlier ones may be on their way."""
        self.news_at = now
        if self.requests.add(policy, index, now):
            self.hosting.begin(index)
        self._commands += self.balancing.plan(self.requests.end, now)
        self.hosting.ready(*self.hosting.running.values())
        self._ask_all_ready(now)
        return self._due()

    def renew(self, now: float) -> list[Command]:
        """Replace every process and drop all requests: segments were lost, and processes may be too."""
        for actor in self._actors.values():
            if actor.has_process:
                self._abandon(actor, now)
        self.requests.pending.clear()
        return self._due()

    def _due(self) -> list[Command]:
        """Return the commands since the last call."""
        due, self._commands = self._commands, []
        return due

    # ------------------------------------------------------------------ events

    def on(self, event: Event, now: float) -> list[Command]:
        """Process one event and return the commands that follow from it. Call `tick` after a batch of events."""
        if isinstance(event, messages.Joined | messages.Left):
            self._join_or_leave(event, now)
        elif event.process == (actor := self._actors[event.process.actor_id]).process:  # else it has been abandoned
            match event:
                case messages.Answered(ask_id=ask_id, answer=answer) if ask_id in actor.asked:  # else a duplicate
                    self.news_at, actor.early[ask_id] = now, answer  # large ones may arrive after those behind them
                    while (first := next(iter(actor.asked), 0)) in actor.early:
                        self._take_in(actor, first, actor.early.pop(first), now)
                case messages.Started(node=node):
                    if actor.samplers_moved or actor.stranded:
                        self._commands.append(Log(f"actor {actor.actor_id} is back"))
                    actor.state, actor.ever_started, actor.samplers_moved, actor.node = State.RUNNING, True, False, node
                    self.hosting.started(actor)
                    self._move(self.hosting.take_stranded(), now)
                case messages.Died(error=DppoError() as error):
                    raise error
                case messages.Died(reason=reason):
                    self._lose(actor, reason, now)
                case messages.Progressed(progress=progress):
                    self.patience.looked(actor, progress, now)
        return self._due()

    def _take_in(self, actor: Actor, ask_id: int, answer: Answer | Spaces | DppoError, now: float) -> None:
        if isinstance(answer, Recycled):
            self._lose(actor, f"{answer} (recycle_after)", now, IncidentKind.ACTOR_RECYCLED)
        elif isinstance(answer, ClusterError):
            self._lose(actor, f"was refused: {answer}", now)
        elif isinstance(answer, EnvironmentFault) and self._is_crowded(actor, ask_id, answer):
            self._make_room(actor, answer, now)
        elif self._may_be_busy(actor, ask_id, answer):
            assert isinstance(answer, EnvironmentFault)
            self._lose(actor, f"was refused: {answer.message.splitlines()[0]}", now, fault=answer)
        elif isinstance(answer, DppoError):
            raise answer
        elif isinstance(answer, Answer) and (wrong := answer.mismatch(actor.asked[ask_id])):
            self._lose(actor, wrong, now)
        else:
            if isinstance(answer, Answer):
                self._record(actor, ask_id, answer)
            else:
                self.spaces = answer
            actor.answered(ask_id, now, self.limits)
            if actor.state is State.LEAVING and not actor.asked:
                self._abandon(actor, now)
            elif actor.waits:
                self.hosting.ready(actor)

    def _is_crowded(self, actor: Actor, ask_id: int, fault: EnvironmentFault) -> bool:
        """Return whether a constructor raised because its process had too many samplers, and fewer in each would do.

        It is no such fault if any process has had more, or if there can never be enough actors for so few in each.
        Where actors join and leave, a limit makes a run wait for others: a licence that may be busy is tried again.
        """
        limit = fault.place.samplers_beside if fault.place is not None and fault.in_constructor else 0
        if limit < max(1, self.hosting.most_held):
            return False
        if self.limits.elastic and not self.hosting.most_held and self._may_be_busy(actor, ask_id, fault):
            return False
        most_actors = self.limits.most_actors if self.limits.elastic else len(self._actors)
        return limit * most_actors >= len(self.hosting.positions)

    def _make_room(self, actor: Actor, fault: EnvironmentFault, now: float) -> None:
        """Replace a process that could not make a further sampler; from now on, none gets more than it had.

        Its samplers, and those of others, go back to actors with room. The limit sinks with each such answer but those
        to questions that were asked before.
        """
        place = fault.place
        assert place is not None
        limit = min(place.samplers_beside, self.hosting.limit)
        learned = limit < self.hosting.limit
        named = f"actor {actor.actor_id} ({samplers_named(actor.samplers)})"
        had = counted(place.others, "other instance")
        moved = self.hosting.limit_to(limit)  # while it is known which samplers the process has
        self._abandon(actor, now)
        self.hosting.ready(*self.hosting.running.values())
        self.news_at = now
        message = f"{named}: {fault.message.splitlines()[0]}, in a process that had {had}"
        text = f"{message}; replaced"
        if moved:
            text += f", and {samplers_named(moved)} go{'es' * (len(moved) == 1)} back"
        if learned:
            text += (
                f". From now on a process gets at most {counted(limit, 'sampler')}; samplers_per_actor={limit} "
                f"(--samplers-per-actor {limit}) says so from the start"
            )
        self._commands.append(Log(text, Incident(IncidentKind.ACTOR_LOST, message)))

    def _may_be_busy(self, actor: Actor, ask_id: int, answer: object) -> bool:
        """Return whether an environment could not be made, perhaps as a lost process still holds its licence."""
        if not (isinstance(answer, EnvironmentFault) and answer.in_constructor) or self.spaces is None:
            return False
        return actor.asked[ask_id].index > 0 or any(one.process.number > 1 for one in self._actors.values())

    def _record(self, actor: Actor, ask_id: int, answer: Answer) -> None:
        """Keep the segments of an answer that count."""
        question = actor.asked[ask_id]
        self.balancing.measure(actor, question, answer)
        self.hosting.held(actor, question)
        self.patience.went_on(actor)
        read_at = min(self.news_at, self._ticked_at + TICKS_S)  # later, it waited while the learner computed
        self.patience.answered(answer, read_at - actor.began)
        made = self.backups.counted(actor, ask_id, answer) if self.backups else answer.made
        for report, _ in made:
            self._ledger.record(report)
            self.hosting.arrived(report.sampler_id, question.index, self.requests.end)
        self.requests.arrived(question.index, actor.actor_id, made, answer.timings)
        actor.losses = 0

    def _join_or_leave(self, event: messages.Joined | messages.Left, now: float) -> None:
        actor = self._actors.setdefault(event.actor_id, Actor(event.actor_id, state=State.LEFT))
        if isinstance(event, messages.Joined):
            actor.unwanted = False
            if actor.state is State.LEFT:
                actor.losses = 0  # the nodes that it was lost with are gone
                actor.wanted(now)
        elif isinstance(event, messages.Left) and self.hosting.leave(actor) and actor.has_process and not actor.asked:
            self._abandon(actor, now)
        self._alarms.set(actor)

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Command]:
        """Return the commands that are due: kills, starts, looks, moves, questions."""
        self._ticked_at, alarmed = now, self._alarms.due(now)
        for actor in alarmed:
            if actor.is_late(now, self.limits):
                self._lose(actor, actor.hung(), now, IncidentKind.ACTOR_HUNG)
            if now >= actor.look_at:
                actor.look_at = now + self.limits.look_s
                self._commands.append(messages.Look(actor.process))
            if actor.state is State.ABSENT and now >= actor.start_at:
                actor.state = State.STARTING
                self._commands.append(messages.Start(actor.process))
        self._move([actor for actor in alarmed if now > actor.move_at(self.limits)], now)
        for actor in alarmed:
            self._alarms.set(actor)
        if self.spaces is None or self.requests.owed:
            self._commands += self.hosting.check_enough(now)
            self._ask_all_ready(now)
            for actor in self.hosting.slots.idle_holders(self.hosting.running.values()):
                self._abandon(actor, now)
            for actor, samplers in list(self.backups.due(self.requests.index, now)) if self.backups else ():
                self._ask(actor, self.requests.index, samplers, now, backup=True)
            if not self.hosting.said_to_wait:
                self._say_what_is_waited_for(now)
        return self._due()

    def _say_what_is_waited_for(self, now: float) -> None:
        """Log it once nothing has happened for a while, and again after twice that; in each iteration anew."""
        index = self.requests.index if self.spaces else -1
        if index != self._quiet_index:
            self._quiet_index, self._quiet_s = index, self.limits.quiet_s
        if now - self.news_at > self._quiet_s:
            self.news_at = now
            self._quiet_s = max(self.limits.quiet_s, min(2 * self._quiet_s, LONGEST_QUIET_S))
            _, limit_s = self.patience.limit(Phase.STEP, replaced=False)
            self._commands.append(Log(self.hosting.waiting(now - self.requests.began, index, limit_s)))

    # ------------------------------------------------------------------ asking

    def _ask_all_ready(self, now: float) -> None:
        """Ask the actors that may have something new to do; or, at first, one of them for the spaces."""
        if self.spaces is not None:
            if self.hosting.enough:
                for actor, index, samplers in self.balancing.questions(self.requests.end, now):
                    self._ask(actor, index, samplers, now)
            return
        actor, asked = self.hosting.positions[0].host, self.hosting.positions[0].maker
        free = actor.state is State.RUNNING and not (asked and asked.asked)
        if free and self.hosting.slots.grant(actor, (0,), now):
            self.hosting.asked((0,), -1, actor)
            ask_id = self._queue(actor, Question(-1, (0,), (0,)), now)
            self._commands.append(messages.Describe(actor.process, ask_id, 0))

    def _ask(self, actor: Actor, index: int, samplers: tuple[int, ...], now: float, *, backup: bool = False) -> None:
        """Ask an actor for segments; with `backup`, for some that another one is making."""
        hosted = tuple(sorted({*actor.samplers, *samplers})) if backup else actor.samplers
        rebuilt = actor.assign(samplers, index, hosted)
        if not backup:
            self.hosting.asked(samplers, index, actor)
        rebuilds = {one: rebuild for one in rebuilt if (rebuild := self._ledger.rebuild(one, index)) is not None}
        checks = (self.spaces, self.expected) if rebuilt or index == 0 else (None, None)
        policy = self.requests.pending[index].policy
        question = Question(index, samplers, hosted, policy.version, rebuilds, *checks)
        self._commands.append(Ask(actor.process, self._queue(actor, question, now), question, policy))

    def _queue(self, actor: Actor, question: Question, now: float) -> int:
        """Put a question into an actor's queue; return its id."""
        self._questions += 1
        actor.ask(self._questions, question, now, self.limits)
        self._alarms.set(actor)
        return self._questions

    # ------------------------------------------------------------------ losing and moving

    def _abandon(self, actor: Actor, now: float) -> None:
        """Abandon an actor's process and its queue; a new one is due now, unless there is no room for one."""
        if self.backups:
            self.backups.ended(actor)
        self.hosting.ended(actor)
        self._commands.append(actor.end(now))
        self._alarms.set(actor)

    def _lose(
        self,
        actor: Actor,
        reason: str,
        now: float,
        kind: IncidentKind = IncidentKind.ACTOR_LOST,
        fault: EnvironmentFault | None = None,
    ) -> None:
        """Abandon an actor's process; plan a new one, or raise if there have been too many in a row.

        `fault`: of the constructor that raised in it.
        """
        unwanted = actor.unwanted
        self._abandon(actor, now)
        if unwanted:
            return
        message = f"actor {actor.actor_id} ({samplers_named(actor.samplers)}) {reason}"
        most = self.limits.max_actor_restarts
        if actor.losses == most and kind is not IncidentKind.ACTOR_RECYCLED:
            raise ClusterError(
                f"{message}\nIt was replaced {counted(most, 'time')} in a row without making a segment "
                f"(max_actor_restarts={most}). {self._remedy(fault)}"
            )
        actor.losses += kind is not IncidentKind.ACTOR_RECYCLED  # which has delivered
        self.news_at, delay = now, delay_before(max(1, actor.losses))
        actor.start_at = now + delay
        replaced = "; replaced" + (f" in {delay:.0f} s\n" if delay else "\n")
        text = f"{message}\n".replace("\n", replaced, 1).rstrip()
        self._commands.append(Log(text, Incident(kind, message)))

    def _remedy(self, fault: EnvironmentFault | None) -> str:
        """Return what to do about an actor that was lost too often, at last with the `fault` of a constructor."""
        beside = 0 if fault is None or fault.place is None else fault.place.samplers_beside
        if not beside:
            return (
                "Look for the reason in the simulator's own log; `num_actors=0` runs it in this process, where a "
                "debugger can follow."
            )
        had, needed = counted(beside, "sampler"), math.ceil(len(self.hosting.positions) / beside)
        return (
            f"The process of that constructor had the environments of {had}. If it may have no more, use "
            f"`num_actors={needed}` and `samplers_per_actor={beside}`; if licences are in use, free them."
        )

    def _move(self, gone: Iterable[Actor], now: float) -> None:
        """Move the samplers of actors that cannot be replaced to running actors until they are back."""
        for number, actor in enumerate(gone if self.hosting.running else ()):
            samplers = actor.samplers
            hosts = self.hosting.move(samplers)
            moved = [sampler for sampler in samplers if sampler not in actor.samplers]
            known = {State.LEFT: "has left", State.LEAVING: "is leaving"}
            reason = known.get(actor.state, f"has not started for {now - actor.missing_since:.0f} s")
            if actor.samplers:
                if not actor.stranded:
                    rule = f"no other actor has room (samplers_per_actor={self.hosting.limit})"
                    who = samplers_named(actor.samplers)
                    self._commands.append(Log(f"actor {actor.actor_id} {reason}; {who} must wait for it: {rule}"))
                self.hosting.strand(actor)
            if not moved:
                continue
            actor.samplers_moved = True
            places = f"its samplers {listed(moved)} are on actor {listed(hosts)}"
            message = f"actor {actor.actor_id} {reason}; until it is back, {places}"
            text = (message, "and so do those of other actors", "")[min(2, max(0, number - 3))]
            self._commands.append(Log(text, Incident(IncidentKind.SAMPLERS_MOVED, message)))
