"""PlayEngine: decides which actor plays which episode of an evaluation, and what happens when an actor fails. Pure."""

from collections import deque
from dataclasses import dataclass, field

from dppo.engine.actors import ActorState
from dppo.engine.deadline import Deadline
from dppo.engine.messages import (
    LONGEST_QUIET_S,
    Answered,
    Command,
    Died,
    Event,
    Kill,
    Log,
    Look,
    Play,
    Process,
    Progressed,
    Start,
    Started,
)
from dppo.engine.restarts import delay_before
from dppo.errors import ClusterError, DppoError, EnvironmentFault
from dppo.ppo.exchange.records import (
    ControllerTurn,
    Episode,
    Incident,
    IncidentKind,
    PolicySnapshot,
)

START_S = 600.0  # longest start of a process
MAX_TRIES = 3  # attempts to play an episode, until the rest of its evaluation is left out
MAX_LATE_TRIES = 2  # the same, if the last actor was too late
REST_S = 30.0  # until an actor whose constructor has failed tries again, while others play

Outcome = tuple[int, int, Episode | DppoError]
"""The number of an evaluation, the index of an episode, and its result."""


@dataclass(frozen=True, slots=True)
class PlayLimits:
    """The size of an evaluation, and deadlines in seconds."""

    episodes: int
    """Number of episodes of each evaluation."""
    num_actors: int
    timeout_s: float
    """Time limit of an episode, after which its actor ends it by itself."""
    hung_s: float
    """Time limit of one step, reset or constructor."""
    licence_s: float = 0.0
    """Until the licence of a lost process is free."""


@dataclass(slots=True)
class _Task:
    """An episode to be played."""

    evaluation: int
    episode: int
    policy: PolicySnapshot | ControllerTurn
    losses: int = 0
    """Actors that were lost while they played it."""


@dataclass(slots=True)
class _PlayingActor:
    """One actor of evaluations. Its process may be replaced; its id stays."""

    process: Process
    state: ActorState = ActorState.ABSENT
    start_at: float = 0.0
    """Time before which it neither starts a process nor plays an episode."""
    failed_in: int | None = None
    """The evaluation in which its constructor has failed, unless it has played an episode since."""
    task: _Task | None = None
    ask_id: int = 0
    """Id of the question that its process works on; 0 if it has none."""
    deadline: Deadline = field(default_factory=Deadline)


class PlayEngine:
    """Lets actors play the episodes of evaluations, one each at a time, in the order in which these were begun.

    An actor that dies, hangs in a step or is late is replaced, and plays its episode again. After some such losses in a
    row, the rest of the evaluation is left out.
    """

    def __init__(self, limits: PlayLimits) -> None:
        self._limits = limits
        self._look_s = min(limits.hung_s / 4, LONGEST_QUIET_S)
        self._actors = {
            actor_id: _PlayingActor(Process(actor_id, 1)) for actor_id in range(limits.num_actors)
        }
        self._tasks = deque[_Task]()
        self._outcomes: list[Outcome] = []
        self._commands: list[Command] = []
        self._last_ask_id = 0

    def start(self, now: float) -> list[Command]:
        """Start all actors."""
        for actor in self._actors.values():
            self._start(actor, now)
        return self._take_commands()

    def begin(self, evaluation: int, policy: PolicySnapshot | ControllerTurn) -> None:
        """Queue the episodes of a policy, or of the user's controller, after those of earlier evaluations."""
        episodes = self._limits.episodes
        if isinstance(policy, ControllerTurn) and policy.first_step_only:
            episodes = 1
        self._tasks.extend(_Task(evaluation, episode, policy) for episode in range(episodes))

    def take_outcomes(self) -> list[Outcome]:
        """Return the results of episodes since the last call, in the order in which they ended."""
        outcomes = self._outcomes
        self._outcomes = []
        return outcomes

    def give_up(self, error: ClusterError) -> None:
        """Leave out all that has been begun and is not over, because of `error`."""
        tasks = [actor.task for actor in self._actors.values() if actor.task is not None]
        for task in [*tasks, *self._tasks]:
            self._outcomes.append((task.evaluation, task.episode, error))
        self._tasks.clear()

    def on(self, event: Event, now: float) -> list[Command]:
        """Process one event and return the commands that follow from it. Call `tick` after a batch of events."""
        assert isinstance(event, Started | Died | Answered | Progressed), (
            "actors of evaluations are fixed"
        )
        actor = self._actors[event.process.actor_id]
        if event.process != actor.process:  # it has been replaced
            return []
        if isinstance(event, Started):
            actor.state = ActorState.RUNNING
            actor.deadline.end()
        elif isinstance(event, Died):
            self._lose(actor, event.reason, now, IncidentKind.ACTOR_LOST)
        elif isinstance(event, Progressed):
            if actor.ask_id:
                actor.deadline.record_look(event.progress, now, ("", self._limits.hung_s))
        elif event.ask_id == actor.ask_id:
            self._finish(actor, event, now)
        return self._take_commands()

    def tick(self, now: float) -> list[Command]:
        """Decide what is due by now: kills, starts, looks, questions."""
        for actor in self._actors.values():
            actor.deadline.wait_for_look(now, self._look_s)
            if actor.deadline.has_passed(now):
                self._lose(actor, self._describe_delay(actor), now, IncidentKind.ACTOR_HUNG)
            if actor.deadline.is_look_due(now):
                actor.deadline.send_look(now, self._look_s)
                self._commands.append(Look(actor.process))
        running_first = sorted(
            self._actors.values(), key=lambda actor: actor.state is not ActorState.RUNNING
        )
        for actor in running_first:
            if actor.task is None and self._tasks and now >= actor.start_at:
                actor.task = self._tasks.popleft()
            if actor.task is None:
                continue
            if actor.state is ActorState.ABSENT and now >= actor.start_at:
                self._start(actor, now)
            elif actor.state is ActorState.RUNNING and not actor.ask_id:
                self._ask(actor, actor.task, now)
        return self._take_commands()

    def _take_commands(self) -> list[Command]:
        commands = self._commands
        self._commands = []
        return commands

    def _start(self, actor: _PlayingActor, now: float) -> None:
        actor.state = ActorState.STARTING
        actor.deadline.begin(now, now + START_S, ("", START_S), look_at=float("inf"))
        self._commands.append(Start(actor.process))

    def _ask(self, actor: _PlayingActor, task: _Task, now: float) -> None:
        self._last_ask_id += 1
        actor.ask_id = self._last_ask_id
        limits = self._limits
        # deadline until looks show progress; the progress of some processes cannot be read
        due = now + limits.timeout_s + limits.hung_s
        actor.deadline.begin(now, due, ("eval_timeout_s", limits.timeout_s), now + self._look_s)
        self._commands.append(
            Play(actor.process, actor.ask_id, task.episode, limits.timeout_s, task.policy)
        )

    def _finish(self, actor: _PlayingActor, event: Answered, now: float) -> None:
        task = actor.task
        result = event.answer
        assert task is not None
        assert isinstance(result, Episode | DppoError)
        actor.task = None
        actor.ask_id = 0
        actor.deadline.end()
        if isinstance(result, EnvironmentFault) and result.in_constructor:
            self._rest(actor, task, result, now)
        else:
            actor.failed_in = None
            self._end(task, result)

    def _rest(self, actor: _PlayingActor, task: _Task, fault: EnvironmentFault, now: float) -> None:
        """Leave an episode to other actors, unless the constructors of all have failed in its evaluation.

        An actor that fails at once would leave out all episodes while others play their first ones.
        """
        is_first = actor.failed_in != task.evaluation
        actor.failed_in = task.evaluation
        if all(other.failed_in == task.evaluation for other in self._actors.values()):
            self._end(task, fault)
            return
        self._tasks.appendleft(task)
        actor.start_at = now + REST_S
        if is_first:
            reason = fault.message.splitlines()[0]
            subject = f"actor {actor.process.actor_id} of evaluations"
            self._commands.append(Log(f"{subject} leaves its episodes to the others: {reason}"))

    def _end(self, task: _Task, result: Episode | DppoError) -> None:
        """Deliver the result of an episode; after a ClusterError, leave out the later episodes of its evaluation."""
        self._outcomes.append((task.evaluation, task.episode, result))
        if isinstance(result, ClusterError):
            self._tasks = deque(
                waiting for waiting in self._tasks if waiting.evaluation != task.evaluation
            )

    def _describe_delay(self, actor: _PlayingActor) -> str:
        setting, seconds = actor.deadline.limit
        if actor.task is None or not actor.ask_id:
            return f"was not started by Ray within {seconds:g} s"
        if setting:
            return f"did not end episode {actor.task.episode} within {setting}={seconds:g}"
        return (
            f"was in one step, reset or constructor of episode {actor.task.episode} for {seconds:g} s, the longest of "
            f"the timeouts of a segment's phases"
        )

    def _lose(self, actor: _PlayingActor, reason: str, now: float, kind: IncidentKind) -> None:
        """Replace the process of an actor: for its episode, or later for the next one."""
        self._commands.append(Kill(actor.process))
        actor.process = Process(actor.process.actor_id, actor.process.number + 1)
        actor.state = ActorState.ABSENT
        actor.ask_id = 0
        actor.deadline.end()
        actor.start_at = now + self._limits.licence_s
        task = actor.task
        if task is None:
            return
        task.losses += 1
        message = f"actor {actor.process.actor_id} of evaluations {reason}"
        max_tries = MAX_LATE_TRIES if kind is IncidentKind.ACTOR_HUNG else MAX_TRIES
        if task.losses >= max_tries:
            actor.task = None
            self._end(task, ClusterError(message))
            return
        actor.start_at = now + max(delay_before(task.losses), self._limits.licence_s)
        text = f"{message}; it is replaced, and the episode is played again"
        self._commands.append(Log(text, Incident(kind, message)))
