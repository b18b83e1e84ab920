"""Collecting: decides which actor collects which segment, and what happens when an actor fails.

Pure: no Ray, no clock, no waiting. An `ActorCollector` passes in events with the time at which they arrived, and lets a
transport execute the commands that come back.
"""

from collections.abc import Iterable, Sequence

from dppo.cluster.collecting import messages
from dppo.cluster.collecting.balancing import Backups, Balancing
from dppo.cluster.collecting.collector import Requests
from dppo.cluster.collecting.hosting import Hosting
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import Ask, Command, Event, Kill, Limits, Log, Process
from dppo.cluster.collecting.roster import Actor, Alarms, Patience, State, listed, samplers_named
from dppo.cluster.faults import Recycled, delay_before
from dppo.cluster.wire import Answer, Question
from dppo.errors import ClusterError, DppoError, counted
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot
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
        self.limits, self._ledger = limits, ledger
        self.spaces: Spaces | None = None
        """The answer to `describe`."""
        self.expected: Expected | None = None  # the numerics that every actor must have
        self._actors = {actor_id: Actor(actor_id, tuple(samplers)) for actor_id, samplers in enumerate(shares)}
        self._hosting = Hosting(self._actors, limits)
        self.requests = Requests(len(self._hosting.places))
        """The segments that have been requested and not been taken."""
        self.patience, self._alarms = Patience(limits), Alarms(self._actors, limits)
        self.balancing = Balancing(self._actors, self._hosting, ledger)
        self.backups = Backups(self._hosting, self.balancing) if limits.backup_requests else None
        self._early: dict[int, Answer | Spaces | DppoError] = {}  # before that to the actor's first question, by id
        self._questions, self._news_at = 0, 0.0

    # ------------------------------------------------------------------ requests of the learner

    def describe(self, now: float) -> list[Command]:
        """Start all actors; ask one of them for the spaces of the environments.

        Only one is asked, so that a failing constructor runs once and is reported once.
        """
        self.requests.began = self._news_at = now
        for actor in self._actors.values():
            actor.wanted(now)
            self._alarms.set(actor)
        return self.tick(now)

    def request(self, policy: PolicySnapshot, index: int, now: float) -> list[Command]:
        """Ask for segment `index` of every sampler, collected with `policy`; earlier ones may be on their way."""
        self._news_at = now
        if self.requests.add(policy, index, now):
            self._hosting.begin(index)
        lines = self.balancing.plan(self.requests.end, now)
        self._hosting.ready(*self._hosting.running.values())
        return [*lines, *self._ask_all_ready(now)]

    def working(self) -> dict[Process, bool]:
        """Return the processes that are working, and whether on the segments to be taken next or on later ones."""
        busy = [actor for actor in self._hosting.running.values() if actor.asked]
        return {actor.process: actor.first.index == self.requests.index for actor in busy}

    def renew(self, now: float) -> list[Command]:
        """Replace every process and drop all requests: segments were lost, and processes may be too."""
        commands: list[Command] = [self._abandon(actor, now) for actor in self._actors.values() if actor.has_process]
        self.requests.clear()
        return commands

    def heard(self, now: float) -> None:
        """Note that actors are making env steps, so that no message about waiting is due."""
        self._news_at = now

    @property
    def running(self) -> int:
        """The number of actors that accept questions."""
        return len(self._hosting.running)

    # ------------------------------------------------------------------ events

    def on(self, event: Event, now: float) -> list[Command]:
        """Process one event and return the commands that follow from it. Call `tick` after a batch of events."""
        if isinstance(event, messages.Joined | messages.Left):
            return self._join_or_leave(event, now)
        actor = self._actors[event.process.actor_id]
        if event.process != actor.process:
            return []  # from an abandoned process
        match event:
            case messages.Answered(ask_id=ask_id, answer=answer) if ask_id in actor.asked:  # else a duplicate
                return self._answered(actor, ask_id, answer, now)
            case messages.Started(node=node):
                return self._started(actor, node)
            case messages.Died(error=DppoError() as error):
                raise error
            case messages.Died(reason=reason):
                return self._lose(actor, reason, now)
            case messages.Progressed(progress=progress):
                self.patience.looked(actor, progress, now)
        return []

    def _started(self, actor: Actor, node: str) -> list[Command]:
        commands: list[Command] = [Log(f"actor {actor.actor_id} is back")] if actor.samplers_moved else []
        actor.state, actor.ever_started, actor.samplers_moved, actor.node = State.RUNNING, True, False, node
        self._hosting.started(actor)
        return commands

    def _answered(self, actor: Actor, ask_id: int, answer: Answer | Spaces | DppoError, now: float) -> list[Command]:
        """Take in this answer and those that came too early; a large answer may arrive after the one behind it."""
        self._news_at, self._early[ask_id] = now, answer
        commands: list[Command] = []
        while (first := next(iter(actor.asked), 0)) in self._early:
            commands += self._take_in(actor, first, self._early.pop(first), now)
        return commands

    def _take_in(self, actor: Actor, ask_id: int, answer: Answer | Spaces | DppoError, now: float) -> list[Command]:
        if isinstance(answer, Answer):
            question = actor.asked[ask_id]
            asked = [(sampler, question.index, question.version) for sampler in question.samplers]
            got = [(report.sampler_id, report.index, report.policy_version) for report, _ in answer.made]
            if got != asked:
                wrong = f"sent the wrong segments: {got} instead of {asked} (sampler, segment, policy version)"
                return self._lose(actor, wrong, now)
            self.balancing.measure(actor, question, answer)
            self.patience.answered(answer)
            made = self.backups.counted(actor, ask_id, answer) if self.backups else answer.made
            for report, _ in made:
                self._ledger.record(report)
                self._hosting.arrived(report.sampler_id, question.index, self.requests.end)
            self.requests.arrived(question.index, actor.actor_id, made, answer.timings)
            actor.losses = 0
        elif isinstance(answer, Recycled):
            return self._lose(actor, f"{answer} (recycle_after)", now, IncidentKind.ACTOR_RECYCLED)
        elif isinstance(answer, ClusterError):
            return self._lose(actor, f"was refused: {answer}", now)
        elif isinstance(answer, DppoError):
            raise answer
        else:
            self.spaces = answer
        actor.answered(ask_id, now, self.limits)
        if actor.state is State.LEAVING and not actor.asked:
            return [self._abandon(actor, now)]
        if actor.waits:
            self._hosting.ready(actor)
        return []

    def _join_or_leave(self, event: messages.Joined | messages.Left, now: float) -> list[Command]:
        actor = self._actors.setdefault(event.actor_id, Actor(event.actor_id, state=State.LEFT))
        if isinstance(event, messages.Joined) and actor.state is State.LEFT:
            actor.losses = 0  # the nodes that it was lost with are gone
            actor.wanted(now)
        elif isinstance(event, messages.Left) and self._hosting.leave(actor) and actor.has_process and not actor.asked:
            return [self._abandon(actor, now)]
        self._alarms.set(actor)
        return []

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Command]:
        """Return the commands that are due: kills, starts, looks, moves, questions."""
        commands: list[Command] = []
        alarmed = self._alarms.due(now)
        for actor in alarmed:
            if actor.is_late(now, self.limits):
                commands += self._lose(actor, actor.hung(), now, IncidentKind.ACTOR_HUNG)
            if now >= actor.look_at:
                actor.look_at = now + self.limits.look_s
                commands.append(messages.Look(actor.process))
            if actor.state is State.ABSENT and now >= actor.start_at:
                commands.append(actor.start())
        commands += self._move([actor for actor in alarmed if now > actor.move_at(self.limits)], now)
        for actor in alarmed:
            self._alarms.set(actor)
        if self.spaces is None or self.requests.owed:
            commands += self._hosting.check_enough(now)
            commands += self._ask_all_ready(now)
            commands += [self._abandon(actor, now) for actor in self._hosting.slots.idle_holders()]
            late = list(self.backups.due(self.requests.index, now)) if self.backups else []
            commands += [self._question(actor, self.requests.index, those, now, True) for actor, those in late]
            if now - self._news_at > self.limits.quiet_s and not self._hosting.said_to_wait:
                self._news_at = now
                commands.append(Log(self._waiting(now - self.requests.began)))
        return commands

    def _waiting(self, waited_s: float) -> str:
        """Return the message about missing segments, or about the first environment."""
        actors = self._actors.values()
        missing = [actor for actor in actors if actor.state in (State.ABSENT, State.STARTING) and actor.samplers]
        starts = [f"actor {one.actor_id} is being {'restarted' if one.ever_started else 'started'}" for one in missing]
        if self.spaces is None:
            return "; ".join([f"waiting for the first environment for {waited_s:.0f} s", *_shortened(starts)])
        owed, total = self._hosting.missing(self.requests.index), len(self._hosting.places)
        samplers = f"{samplers_named(owed[:8])}{' ...' if len(owed) > 8 else ''}"
        segments = f"waiting for {len(owed)} of {total} segments for {waited_s:.0f} s ({samplers})"
        replays = [f"actor {one.actor_id}: {one.progress}" for one in actors if one.rebuilds and one.progress]
        slots = [str(self._hosting.slots)] if self._hosting.slots.limited else []
        rule = f"an actor that makes no progress for {self.limits.segment_timeout_s:g} s is replaced"
        return "; ".join([segments, *_shortened(starts), *_shortened(replays), *slots, rule])

    # ------------------------------------------------------------------ asking

    def _ask_all_ready(self, now: float) -> list[Command]:
        """Ask the actors that may have something new to do."""
        if self.spaces is None:
            return self._ask_for_description(now)
        if not self._hosting.enough:
            return []
        questions = self.balancing.questions(self.requests.end, now)
        return [self._question(actor, index, samplers, now) for actor, index, samplers in questions]

    def _ask_for_description(self, now: float) -> list[Command]:
        actor, asked = self._hosting.places[0].host, self._hosting.places[0].maker
        slots = self._hosting.slots
        if actor.state is not State.RUNNING or (asked and asked.asked) or not slots.grant(actor, (0,), now):
            return []
        self._hosting.asked((0,), -1, actor)
        return [messages.Describe(actor.process, self._queue(actor, Question(-1, (0,), (0,)), now), 0)]

    def _question(self, actor: Actor, index: int, samplers: tuple[int, ...], now: float, backup: bool = False) -> Ask:
        """Ask an actor for segments; with `backup`, for some that another one is making."""
        hosted = tuple(sorted({*actor.samplers, *samplers})) if backup else actor.samplers
        rebuilt = actor.will_make(samplers, index, hosted)
        if not backup:
            self._hosting.asked(samplers, index, actor)
        rebuilds = {one: rebuild for one in rebuilt if (rebuild := self._ledger.rebuild(one, index)) is not None}
        checks = (self.spaces, self.expected) if rebuilt or index == 0 else (None, None)
        policy = self.requests.policies[index]
        question = Question(index, samplers, hosted, policy.version, rebuilds, *checks)
        return Ask(actor.process, self._queue(actor, question, now), question, policy)

    def _queue(self, actor: Actor, question: Question, now: float) -> int:
        """Put a question into an actor's queue; return its id."""
        self._questions += 1
        actor.ask(self._questions, question, now, self.limits)
        self._alarms.set(actor)
        return self._questions

    # ------------------------------------------------------------------ losing and moving

    def _abandon(self, actor: Actor, now: float) -> Kill:
        """Abandon an actor's process and its queue; a new one is due now, unless it is leaving."""
        if self.backups:
            self.backups.ended(actor)
        for ask_id in actor.asked:
            self._early.pop(ask_id, None)
        self._hosting.ended(actor)
        kill = actor.end(now)
        self._alarms.set(actor)
        return kill

    def _lose(
        self, actor: Actor, reason: str, now: float, kind: IncidentKind = IncidentKind.ACTOR_LOST
    ) -> list[Command]:
        """Abandon an actor's process; plan a new one, or raise when the restart budget is spent."""
        if actor.state is State.LEAVING:
            return [self._abandon(actor, now)]
        message = f"actor {actor.actor_id} ({samplers_named(actor.samplers)}) {reason}"
        self._news_at, kill, most = now, self._abandon(actor, now), self.limits.max_actor_restarts
        if actor.losses == most:
            raise ClusterError(
                f"{message}\nIt was replaced {counted(most, 'time')} in a row without making a segment "
                f"(max_actor_restarts={most}). Look for the reason in the simulator's own log; `num_actors=0` runs it "
                f"in this process, where a debugger can follow."
            )
        actor.losses += 1
        delay = delay_before(actor.losses)
        actor.start_at = now + delay
        replaced = "; replaced" + (f" in {delay:.0f} s\n" if delay else "\n")
        return [kill, Log(f"{message}\n".replace("\n", replaced, 1).rstrip(), Incident(kind, message))]

    def _move(self, gone: Iterable[Actor], now: float) -> list[Command]:
        """Move the samplers of actors that cannot be replaced to running actors until they are back."""
        commands: list[Command] = []
        for number, actor in enumerate(gone if self._hosting.running else ()):
            moved, actor.samplers_moved = actor.samplers, True
            hosts = self._hosting.move(moved)
            known = {State.LEFT: "has left", State.LEAVING: "is leaving"}
            reason = known.get(actor.state, f"has not started for {now - actor.missing_since:.0f} s")
            places = f"its samplers {listed(moved)} are on actor {listed(hosts)}"
            message = f"actor {actor.actor_id} {reason}; until it is back, {places}"
            text = (message, "and so do those of other actors", "")[min(2, max(0, number - 3))]
            commands.append(Log(text, Incident(IncidentKind.SAMPLERS_MOVED, message)))
        return commands


def _shortened(parts: list[str], most: int = 4) -> list[str]:
    return parts if len(parts) <= most else [*parts[:most], f"and so are {len(parts) - most} more"]
