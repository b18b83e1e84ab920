"""Actor: the engine's record of one actor, with its samplers, process, questions, deadline and pace."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from dppo.engine.deadline import UNSEEN_S, Deadline
from dppo.engine.messages import Kill, Limits, Process, Reply
from dppo.engine.pace import Pace
from dppo.envs.activity import STARTS, Activity, Phase
from dppo.ppo.exchange.questions import Question
from dppo.ppo.exchange.records import FatalStep


class ActorState(Enum):
    """States of an actor."""

    ABSENT = "no process; one will be started at `start_at`"
    STARTING = "a process has been requested"
    RUNNING = "the process accepts questions"
    LEAVING = "the process finishes its questions, accepts no more, and is not replaced"
    LEFT = "no process, and no room for one"


class Place(NamedTuple):
    """A step of a sampler in which a process was lost."""

    sampler_id: int
    step: FatalStep

    def __str__(self) -> str:
        env, episode, step = self.step
        phase = f"step {step}" if step else "the reset"
        return f"{phase} of episode {episode} of env {env} of sampler {self.sampler_id}"


def place_in(activity: Activity | None) -> Place | None:
    """Return the step or reset that a process was in; None if it did something else, or if that is not known."""
    if activity is None or activity.phase not in (Phase.STEP, Phase.RESET):
        return None
    step = activity.length + 1 if activity.phase is Phase.STEP else 0
    return Place(activity.sampler_id, FatalStep(activity.env, activity.episode, step))


@dataclass(slots=True)
class Actor:
    """One actor. Its process may be replaced; its id stays."""

    actor_id: int
    samplers: tuple[int, ...] = ()
    """The samplers that it hosts, running or not, in order. Every sampler has one host."""
    process: Process = field(init=False)
    """The actor's process, or the next one; events from any other process are ignored."""
    state: ActorState = ActorState.ABSENT
    node: str = ""
    """Name of the node of its process."""
    pace: Pace = field(default_factory=Pace)
    deadline: Deadline = field(default_factory=Deadline)
    """The deadline of the first question in its queue; the others have none yet."""
    alarm_at: float = math.inf
    """Time of its next alarm with the engine."""
    start_at: float = 0.0
    missing_since: float = 0.0
    """Time at which its last process was lost, or the first one was requested."""
    ever_started: bool = False
    losses: int = 0
    """Losses in a row without a segment in between."""
    first_loss_at: float = 0.0
    lost_in: Place | None = None
    """The step in which all of these were; None if they were in several, or in none."""
    unwanted: bool = False
    """True while there is no room for another process."""
    samplers_moved: bool = False
    """True while other actors host its samplers."""
    stranded: bool = False
    """True while some of its samplers wait for it, or for room elsewhere."""
    instantiated: tuple[int, ...] = ()
    """The samplers of which its process has environments, as its answers show."""
    queue: dict[int, Question] = field(default_factory=dict)
    """Unanswered questions by id, in the order of work."""
    early_answers: dict[int, Reply] = field(default_factory=dict)
    """Answers by id that came before the answer to the first question."""
    holds: dict[int, int] = field(default_factory=dict)
    """Index of the segment that each of its samplers can collect after all questions without being rebuilt."""
    waits: bool = False
    """True if it is asked for nothing until its queue is empty, because samplers may move then."""

    def __post_init__(self) -> None:
        self.process = Process(self.actor_id, 1)

    @property
    def has_process(self) -> bool:
        """True if its process has been requested."""
        return self.state in (ActorState.STARTING, ActorState.RUNNING, ActorState.LEAVING)

    @property
    def is_missing(self) -> bool:
        """True if it has samplers, and its process has not started."""
        return self.state in (ActorState.ABSENT, ActorState.STARTING) and bool(self.samplers)

    @property
    def current_question(self) -> Question:
        """The question that its process is working on."""
        return next(iter(self.queue.values()))

    def move_at(self, limits: Limits) -> float:
        if self.state is ActorState.RUNNING or not self.samplers or self.stranded:
            return math.inf
        if self.state in (ActorState.LEAVING, ActorState.LEFT):
            return -math.inf
        patience_s = limits.move_after_s if self.ever_started else limits.start_timeout_s
        return self.missing_since + patience_s

    def want_process(self, now: float) -> None:
        """Let a process be started now."""
        self.state = ActorState.ABSENT
        self.start_at = now
        self.missing_since = now
        self.unwanted = False
        self.stranded = False

    def record_start(self, node: str) -> None:
        """Record that its process accepts questions."""
        self.state = ActorState.RUNNING
        self.node = node
        self.ever_started = True
        self.samplers_moved = False

    def end(self, now: float) -> Kill:
        """Abandon its process; a new one is due now, unless there is no room for one."""
        kill = Kill(self.process)
        unwanted = self.unwanted
        self.want_process(now)
        if unwanted:
            self.state = ActorState.LEFT
        self.process = Process(self.actor_id, self.process.number + 1)
        self.queue = {}
        self.early_answers = {}
        self.holds = {}
        self.instantiated = ()
        self.pace = Pace()
        self.waits = False
        self.deadline.end()
        return kill

    def ask(self, ask_id: int, question: Question, now: float, limits: Limits) -> None:
        """Record a question, which the process begins after all earlier ones."""
        self.queue[ask_id] = question
        if len(self.queue) == 1:
            self._begin(question, now, limits)

    def assign(self, samplers: tuple[int, ...], index: int, hosted: tuple[int, ...]) -> list[int]:
        """Record that it makes segments `index`, and closes all samplers but `hosted`; return which to rebuild."""
        holds = self.holds
        to_rebuild = []
        for sampler in samplers:
            if holds.get(sampler, 0) != index:
                to_rebuild.append(sampler)
            holds[sampler] = index + 1
        for sampler in holds.keys() - hosted:
            del holds[sampler]
        return to_rebuild

    def record_answer(self, ask_id: int, now: float, limits: Limits) -> None:
        """Record the answer to the first question."""
        del self.queue[ask_id]
        if self.queue:
            self._begin(self.current_question, now, limits)
        else:
            self.deadline.end()

    def _begin(self, question: Question, now: float, limits: Limits) -> None:
        due = now + len(question.samplers) * limits.segment_timeout_s
        self.deadline.begin(now, due, limits.segment_limit, now + limits.look_s)

    def describe_hang(self, now: float) -> str:
        name, seconds = self.deadline.limit
        progress = self.deadline.progress
        limit = f"{name}={seconds:g}"
        call = "step or reset"
        if self.current_question.index < 0:
            return (
                f"made no environment within {limit}; if its constructor takes longer, raise {name}"
            )
        unseen_s = now - self.deadline.unseen_since
        if progress is None:
            fact = f"sent no segment for {limit}"
        elif progress.phase is Phase.IDLE:
            return f"has not begun its question within {seconds:g} s and counts as hung"
        elif unseen_s > UNSEEN_S:
            return (
                f"has not been seen for {unseen_s:.0f} s ({limit}), was last seen {progress} and counts as lost: its "
                f"host {self.node} may be cut off or stopped"
            )
        else:
            fact = f"made no progress for {limit}, was last seen {progress}"
            if progress.phase in STARTS:
                call = "constructor"
        return f"{fact} and counts as hung; if a single {call} takes longer, raise {name}"
