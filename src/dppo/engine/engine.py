"""CollectionEngine: decides which actor collects which segment, and what happens when an actor fails.

Pure: no Ray, no clock, no waiting. An `ActorCollector` passes in events with the time at which they arrived, and lets a
transport execute the commands that come back.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from dppo.engine.actors import Actor, ActorState, place_in
from dppo.engine.alarms import Alarms
from dppo.engine.backups import Backups
from dppo.engine.balancing import Balancing
from dppo.engine.constructors import Constructors
from dppo.engine.fatal import FatalSteps
from dppo.engine.hosting import Hosting, samplers_named
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import (
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
    Recycled,
    Reply,
    Start,
    Started,
)
from dppo.engine.patience import Patience
from dppo.engine.requests import Requests
from dppo.engine.restarts import REST_S, Loss, delay_before, describe_loss, too_many_losses
from dppo.engine.wait_log import WaitLog
from dppo.envs.activity import Activity
from dppo.errors import ClusterError, DppoError, EnvironmentFault, counted
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.questions import NO_SEGMENT, Answer, Question
from dppo.ppo.exchange.records import Episode, Incident, IncidentKind, PolicySnapshot, SegmentReport
from dppo.spaces.spaces import Spaces

TICKS_S = 1.0  # longest time between two ticks while the learner waits for segments


class CollectionEngine:
    """Collects segments 0, 1, 2 ... of all samplers from the actors that are available.

    A sampler is asked for a segment as soon as the learner requests it, even while it makes the segment before: an
    actor works through a queue, and does not wait for other actors. An actor that dies or misses its deadline is
    killed and replaced; the new process rebuilds the samplers and collects the same segments. While an actor cannot
    be replaced, its samplers move to the others. Only the first answer for a segment counts, and answers from
    abandoned processes are ignored. Each call raises the error that ends the run, if there is one.

    An event costs the same with 8 and with 10,000 actors: only work that is done once per iteration, or while no actor
    is running, loops over all actors or samplers.
    """

    def __init__(
        self, shares: Sequence[Iterable[int]], ledger: ReplayLedger, limits: Limits
    ) -> None:
        """Create the engine; `shares` contains the first samplers of each actor. `describe` starts the actors."""
        self.limits = limits
        self.spaces: Spaces | None = None
        """The answer to `describe`."""
        self.expected: Expected | None = None
        """The numerics that every actor must have."""
        self._ledger = ledger
        self._actors = {
            actor_id: Actor(actor_id, tuple(samplers)) for actor_id, samplers in enumerate(shares)
        }
        self.hosting = Hosting(self._actors, limits)
        self.requests = Requests(len(self.hosting.positions))
        """Segments that have been requested and not been taken."""
        self.patience = Patience(limits)
        self.balancing = Balancing(self._actors, self.hosting, ledger)
        self.backups = Backups(self.hosting, self.balancing) if limits.backup_requests else None
        self.wait_log = WaitLog(self.hosting, self.requests, self.patience, limits)
        self._alarms = Alarms(self._actors, limits)
        self._fatal = FatalSteps(ledger)
        self._constructors = Constructors(self.hosting, limits)
        self._commands: list[Command] = []  # not yet returned
        self._last_ask_id = 0
        self._ticked_at = 0.0

    # ------------------------------------------------------------------ requests of the learner

    def describe(self, now: float) -> list[Command]:
        """Start all actors; ask one of them for the spaces of the environments, and later the others.

        At first only one is asked, so that a failing constructor runs once and is reported once.
        """
        self.requests.began = now
        self.wait_log.news_at = now
        for actor in self._actors.values():
            actor.want_process(now)
            self._alarms.set(actor)
        return self.tick(now)

    def request(self, policy: PolicySnapshot, index: int, now: float) -> list[Command]:
        """Request segment `index` of every sampler, collected with `policy`; earlier segments may still be missing."""
        self.wait_log.news_at = now
        if self.requests.add(policy, index, now):
            self.hosting.begin(index)
        self._commands += self.balancing.plan(self.requests.end, now)
        self.hosting.mark_ready(*self.hosting.running.values())
        self._ask_all_ready(now)
        return self.take_commands()

    def renew(self, now: float) -> list[Command]:
        """Replace every process and drop all requests, after segments and perhaps processes were lost."""
        for actor in self._actors.values():
            if actor.has_process:
                self._replace(actor, now)
        self.requests.clear()
        return self.take_commands()

    def take_commands(self) -> list[Command]:
        """Return the commands that no call has returned: of one that has raised."""
        commands = self._commands
        self._commands = []
        return commands

    # ------------------------------------------------------------------ events

    def on(self, event: Event, now: float) -> list[Command]:
        """Process one event and return the commands that follow from it. Call `tick` after a batch of events."""
        if isinstance(event, Joined | Left):
            new_actor = Actor(event.actor_id, state=ActorState.LEFT)
            actor = self._actors.setdefault(event.actor_id, new_actor)
            if isinstance(event, Joined):
                self._join(actor, now)
            else:
                self._leave(actor, now)
            self._alarms.set(actor)
        else:
            actor = self._actors[event.process.actor_id]
            if event.process == actor.process:  # events of abandoned processes are ignored
                self._on_process(actor, event, now)
        return self.take_commands()

    def _on_process(
        self, actor: Actor, event: Answered | Started | Died | Progressed, now: float
    ) -> None:
        """Process an event of the current process of an actor."""
        if isinstance(event, Answered):
            if event.ask_id in actor.queue:  # duplicate answers are ignored
                self._on_answer(actor, event, now)
        elif isinstance(event, Progressed):
            self.patience.record_look(actor, event.progress, now)
        elif isinstance(event, Started):
            if actor.samplers_moved or actor.stranded:
                self._commands.append(Log(f"actor {actor.actor_id} is back"))
            actor.record_start(event.node)
            self.hosting.record_start(actor)
            self._commands += self.hosting.vacate(self.hosting.take_stranded(), now)
        elif event.error is not None:
            raise event.error
        else:
            self._lose(actor, Loss(event.reason, activity=event.activity), now)

    def _join(self, actor: Actor, now: float) -> None:
        actor.unwanted = False
        if actor.state is ActorState.LEFT:
            actor.losses = 0  # it was lost on nodes that have left since
            actor.want_process(now)

    def _leave(self, actor: Actor, now: float) -> None:
        if self.hosting.leave(actor) and actor.has_process and not actor.queue:
            self._replace(actor, now)

    # ------------------------------------------------------------------ answers

    def _on_answer(self, actor: Actor, event: Answered, now: float) -> None:
        """Process the answers of an actor in the order of its questions; large answers may arrive late."""
        self.wait_log.news_at = now
        answers = actor.early_answers
        answers[event.ask_id] = event.answer
        # ids begin with 1, so that an empty queue ends the loop
        while (ask_id := next(iter(actor.queue), 0)) in answers:
            self._process_answer(actor, ask_id, answers.pop(ask_id), now)

    def _process_answer(self, actor: Actor, ask_id: int, answer: Reply, now: float) -> None:
        question = actor.queue[ask_id]
        if isinstance(answer, Answer):
            mismatch = answer.mismatch(question)
            if mismatch:
                self._lose(actor, Loss(mismatch), now)
                return
            self._record(actor, ask_id, question, answer)
        elif isinstance(answer, DppoError):
            self._on_error(actor, ask_id, answer, now)
            return
        else:
            # the first question of an actor may ask for spaces
            assert not isinstance(answer, Episode), "it was not asked to play"
            if self.spaces is None:
                self.spaces = answer
        actor.record_answer(ask_id, now, self.limits)
        if actor.state is ActorState.LEAVING and not actor.queue:
            self._replace(actor, now)
        elif actor.waits:
            self.hosting.mark_ready(actor)

    def _record(self, actor: Actor, ask_id: int, question: Question, answer: Answer) -> None:
        """Store the segments of an answer that count, and measure the speed of its actor."""
        self.balancing.measure(actor, question, answer)
        self.hosting.record_instances(actor, question)
        self.patience.record_standstill(actor)
        # An answer may have waited while the learner computed: that time does not count.
        read_at = min(self.wait_log.news_at, self._ticked_at + TICKS_S)
        self.patience.measure(answer, read_at - actor.deadline.began)
        results: Sequence[tuple[SegmentReport, Any]] = answer.results
        if self.backups is not None:
            results = self.backups.counted(actor, ask_id, answer)
        end = self.requests.end
        for report, _ in results:
            self._ledger.record(report)
            self._fatal.record_arrival(report.sampler_id)
            self.hosting.record_arrival(report.sampler_id, question.index, end)
        self.requests.record_answer(question.index, actor.actor_id, results, answer.timings)
        actor.losses = 0

    def _on_error(self, actor: Actor, ask_id: int, error: DppoError, now: float) -> None:
        """Replace an actor whose answer is an error that a new process may avoid; raise all other errors."""
        question = actor.queue[ask_id]
        # no constructor is known to work
        is_first = ask_id == 1 and self.spaces is None and self.limits.resumed_at is None
        if isinstance(error, Recycled):
            loss = Loss(f"{error} (recycle_after)", IncidentKind.ACTOR_RECYCLED)
            self._lose(actor, loss, now)
        elif isinstance(error, ClusterError):
            self._lose(actor, Loss(f"was refused: {error}"), now)
        elif is_first or not isinstance(error, EnvironmentFault):
            raise error
        elif self._constructors.is_crowded(question, error):
            self._make_room(actor, error, now)
        elif error.in_constructor:  # a licence or port may not have been free
            loss = Loss(f"was refused: {error.message.splitlines()[0]}", fault=error)
            self._lose(actor, loss, now)
        else:
            raise error

    def _make_room(self, actor: Actor, fault: EnvironmentFault, now: float) -> None:
        """Replace a process that could not make another sampler; from now on, no process gets more than it had.

        Samplers beyond this limit are moved to actors with room. The limit is never raised again.
        """
        place = fault.place
        assert place is not None
        limit = min(place.samplers_beside, self.hosting.limit)
        is_new = limit < self.hosting.limit
        subject = f"actor {actor.actor_id} ({samplers_named(actor.samplers)})"
        # before `_replace`, after which it is not known which samplers the process had
        moved = self.hosting.limit_to(limit)
        self._replace(actor, now)
        self.hosting.mark_ready(*self.hosting.running.values())
        self.wait_log.news_at = now
        instances = counted(place.others, "other instance")
        message = f"{subject}: {fault.message.splitlines()[0]}, in a process that had {instances}"
        text = f"{message}; replaced"
        if moved:
            verb = "goes" if len(moved) == 1 else "go"
            text += f", and {samplers_named(moved)} {verb} back"
        if is_new:
            text += (
                f". From now on a process gets at most {counted(limit, 'sampler')}; samplers_per_actor={limit} "
                f"(--samplers-per-actor {limit}) says so from the start"
            )
        self._commands.append(Log(text, Incident(IncidentKind.ACTOR_LOST, message)))

    # ------------------------------------------------------------------ time

    def tick(self, now: float) -> list[Command]:
        """Return the commands that are due: kill, start or look at processes, move samplers, ask questions."""
        self._ticked_at = now
        alarmed = self._alarms.due(now)
        if alarmed:
            self._on_alarms(alarmed, now)
        if self.spaces is None or self.requests.owed:
            self._collect(now)
        return self.take_commands()

    def _on_alarms(self, alarmed: list[Actor], now: float) -> None:
        for actor in alarmed:
            actor.deadline.wait_for_look(now, self.limits.look_s)
            if actor.deadline.has_passed(now):
                self._lose(actor, Loss(actor.describe_hang(now), IncidentKind.ACTOR_HUNG), now)
            if actor.deadline.is_look_due(now):
                actor.deadline.send_look(now, self.limits.look_s)
                self._commands.append(Look(actor.process))
            if actor.state is ActorState.ABSENT and now >= actor.start_at:
                actor.state = ActorState.STARTING
                self._commands.append(Start(actor.process))
        missing = [actor for actor in alarmed if now > actor.move_at(self.limits)]
        self._commands += self.hosting.vacate(missing, now)
        for actor in alarmed:
            self._alarms.set(actor)

    def _collect(self, now: float) -> None:
        """Ask for missing segments; check that there are enough actors; log the reason for a long wait."""
        hosting = self.hosting
        self._commands += hosting.check_enough(now)
        self._ask_all_ready(now)
        if hosting.slots.limited:
            for actor in hosting.slots.idle_holders(hosting.running.values()):
                self._replace(actor, now)
        if self.backups is not None:
            for actor, samplers in list(self.backups.due(self.requests.index, now)):
                self._ask(actor, self.requests.index, samplers, now, backup=True)
        if not hosting.logged_wait:
            self._commands += self.wait_log.check(now, described=self.spaces is not None)

    # ------------------------------------------------------------------ asking

    def _ask_all_ready(self, now: float) -> None:
        """Ask the actors that can take further segments; before the spaces are known, ask for these."""
        if self.spaces is None:
            self._ask_for_spaces(now)
        elif self.hosting.may_ask:
            indices = range(self.requests.index, self.requests.end)
            for actor, index, samplers in self.balancing.questions(indices, now):
                self._ask(actor, index, samplers, now)

    def _ask_for_spaces(self, now: float) -> None:
        for actor in self.hosting.first_to_ask(now):
            samplers = actor.samplers[:1]
            if self.hosting.slots.grant(actor, samplers, now):
                self.hosting.record_question(samplers, NO_SEGMENT, actor)
                question = Question(NO_SEGMENT, samplers=samplers, hosted=samplers)
                ask_id = self._enqueue(actor, question, now)
                self._commands.append(Describe(actor.process, ask_id, samplers[0]))

    def _ask(
        self,
        actor: Actor,
        index: int,
        samplers: tuple[int, ...],
        now: float,
        *,
        backup: bool = False,
    ) -> None:
        """Ask an actor for segments; with `backup`, for segments that another actor is already making."""
        hosted = actor.samplers
        if backup:
            hosted = tuple(sorted({*hosted, *samplers}))
        else:
            self.hosting.record_question(samplers, index, actor)
        to_rebuild = actor.assign(samplers, index, hosted)
        rebuilds = {}
        for sampler in to_rebuild:
            rebuild = self._ledger.rebuild(sampler, index)
            if rebuild is not None:
                rebuilds[sampler] = rebuild
        policy = self.requests.pending[index].policy
        is_checked = bool(to_rebuild) or index == 0
        question = Question(
            index=index,
            samplers=samplers,
            hosted=hosted,
            version=policy.version,
            rebuilds=rebuilds,
            fatal=self._fatal.of(samplers, index),
            spaces=self.spaces if is_checked else None,
            expected=self.expected if is_checked else None,
        )
        ask_id = self._enqueue(actor, question, now)
        self._commands.append(Ask(actor.process, ask_id, question, policy))

    def _enqueue(self, actor: Actor, question: Question, now: float) -> int:
        """Put a question into an actor's queue; return its id."""
        self._last_ask_id += 1
        actor.ask(self._last_ask_id, question, now, self.limits)
        self._alarms.set(actor)
        return self._last_ask_id

    # ------------------------------------------------------------------ replacing actors

    def _replace(self, actor: Actor, now: float) -> None:
        """Abandon the process of an actor with its queue; start a new process now, if there is room for one."""
        if self.backups is not None:
            self.backups.record_end(actor)
        # its segments are asked for again, and its slots count until its keeper has ended
        self.hosting.record_end(actor)
        self._commands.append(actor.end(now))  # kills the process, whose later events are ignored
        self._alarms.set(actor)  # at the start of the next process

    def _lose(self, actor: Actor, loss: Loss, now: float) -> None:
        """Replace an actor's process after a delay; after too many losses in a row, give up an episode, or raise."""
        is_unwanted = actor.unwanted
        never_started = actor.state is ActorState.STARTING
        activity = loss.activity or actor.deadline.progress
        self._replace(actor, now)
        if is_unwanted:
            return
        message = f"actor {actor.actor_id} ({samplers_named(actor.samplers)}) {loss.reason}"
        self._report_restarts(message, activity)
        rests = False
        moves: list[Command] = []
        if loss.kind is not IncidentKind.ACTOR_RECYCLED:  # a recycled actor did not fail
            limit = self.limits.max_actor_restarts
            given_up = self._fatal.record_loss(actor, place_in(activity), limit, now)
            if given_up is None:
                actor.missing_since = actor.first_loss_at
                moves = self.hosting.vacate([actor], now)
                # what keeps a process from starting is not the simulator, and others need not stop for it
                rests = never_started and self.hosting.enough and not actor.samplers
                if not rests:
                    raise too_many_losses(message, limit, loss.fault, started=not never_started)
            else:
                message += given_up
        self.wait_log.news_at = now
        delay_s = delay_before(max(1, actor.losses))
        if rests:
            delay_s = REST_S
        actor.start_at = now + delay_s
        line = describe_loss(message, delay_s)
        self._commands += [Log(line, Incident(loss.kind, message)), *moves]

    def _report_restarts(self, message: str, activity: Activity | None) -> None:
        """Record the restarts of programs that the answer of a lost process would have reported."""
        if activity is None:
            return
        text = f"{message}; before, a program restarted"
        restart = Incident(IncidentKind.PROGRAM_RESTARTED, text)
        self._commands += [Log("", restart)] * activity.restarts
