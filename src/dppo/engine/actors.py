"""Actor: the engine's record of one actor, with its samplers, process, questions, deadline and pace."""

import math
from dataclasses import dataclass, field
from enum import Enum

from dppo.engine.messages import Kill, Limits, Process
from dppo.engine.pace import Pace
from dppo.envs.activity import Activity, Phase
from dppo.errors import DppoError
from dppo.ppo.exchange.questions import Answer, Question
from dppo.spaces.spaces import Spaces


class State(Enum):
    """States of an actor."""

    ABSENT = "no process; one will be started at `start_at`"
    STARTING = "a process has been requested"
    RUNNING = "the process accepts questions"
    LEAVING = "the process finishes its questions, accepts no more, and is not replaced"
    LEFT = "no process, and no room for one"


@dataclass(slots=True)
class Actor:
    """One actor. Its process may be replaced; its id stays."""

    actor_id: int
    samplers: tuple[int, ...] = ()  # those that it hosts, running or not, in order; every sampler has one host
    process: Process = field(init=False)  # its process, or the next one; events from any other are ignored
    state: State = State.ABSENT
    node: str = ""  # name of that of its process
    pace: Pace = field(default_factory=Pace)
    start_at: float = 0.0
    missing_since: float = 0.0  # when it was lost, or first requested
    ever_started: bool = False
    losses: int = 0  # in a row, without a segment in between
    unwanted: bool = False  # there is no room for another process
    samplers_moved: bool = False  # while other actors host them
    stranded: bool = False  # while some of its samplers wait for it, or for room elsewhere
    made: set[int] = field(default_factory=set)
    """The samplers of which its process has environments, as its answers show."""
    asked: dict[int, Question] = field(default_factory=dict)  # unanswered questions by id, in the order of work
    early: dict[int, Answer | Spaces | DppoError] = field(default_factory=dict)
    """Answers that came before that to the first question, by id."""
    holds: dict[int, int] = field(default_factory=dict)
    """Index of the segment that each of its samplers can collect after all questions without being rebuilt."""
    waits: bool = False  # True if it is asked for nothing until its queue is empty, because samplers may move then
    began: float = 0.0  # time at which its process began its first question
    progress: Activity | None = None  # at the last look since then
    moved_at: float = 0.0  # time of the first look at the place where it is
    stood: tuple[Phase, float] = (Phase.IDLE, 0.0)  # that place, and for how long it has been seen there
    due: float = math.inf  # deadline of its first answer; questions in the queue behind have none yet
    limit: tuple[str, float] = ("segment_timeout_s", math.inf)  # name and value of the setting that set that deadline
    extended: bool = False  # while that deadline waits for a look that was overdue
    look_at: float = math.inf  # time of the next look at its progress
    alarm_at: float = math.inf  # time of its next alarm with the engine

    def __post_init__(self) -> None:
        self.process = Process(self.actor_id, 1)

    @property
    def has_process(self) -> bool:
        """True if its process has been requested."""
        return self.state in (State.STARTING, State.RUNNING, State.LEAVING)

    @property
    def first(self) -> Question:
        """The question that its process is working on."""
        return next(iter(self.asked.values()))

    def move_at(self, limits: Limits) -> float:
        """Return the time after which other actors host its samplers."""
        if self.state is State.RUNNING or not self.samplers or self.stranded:
            return math.inf
        if self.state in (State.LEAVING, State.LEFT):
            return -math.inf
        return self.missing_since + (limits.move_after_s if self.ever_started else limits.start_timeout_s)

    def wanted(self, now: float) -> None:
        """Let a process be started now."""
        self.state, self.start_at, self.missing_since, self.unwanted = State.ABSENT, now, now, False
        self.stranded = False

    def end(self, now: float) -> Kill:
        """Abandon its process; a new one is due now, unless there is no room for one."""
        unwanted, kill = self.unwanted, Kill(self.process)
        self.wanted(now)
        self.state = State.LEFT if unwanted else State.ABSENT
        self.process = Process(self.actor_id, self.process.number + 1)
        self.asked, self.early, self.holds, self.made = {}, {}, {}, set()
        self.pace, self.waits = Pace(), False
        self._rest()
        return kill

    def ask(self, ask_id: int, question: Question, now: float, limits: Limits) -> None:
        """Record a question, which the process begins after all earlier ones."""
        self.asked[ask_id] = question
        if len(self.asked) == 1:
            self._begin(now, limits)

    def assign(self, samplers: tuple[int, ...], index: int, hosted: tuple[int, ...]) -> list[int]:
        """Record that it makes segments `index`, and closes all but `hosted`; return the samplers to rebuild first."""
        rebuilt = [sampler for sampler in samplers if self.holds.get(sampler, 0) != index]
        for sampler in self.holds.keys() - hosted:  # its process closes the others
            del self.holds[sampler]
        self.holds.update(dict.fromkeys(samplers, index + 1))
        return rebuilt

    def answered(self, ask_id: int, now: float, limits: Limits) -> None:
        """Record the answer to the first question."""
        del self.asked[ask_id]
        if self.asked:
            self._begin(now, limits)
        else:
            self._rest()

    def _begin(self, now: float, limits: Limits) -> None:
        self.progress, self.began, self.look_at, self.extended = None, now, now + limits.look_s, False
        self.stood = Phase.IDLE, 0.0
        self.limit, self.moved_at = ("segment_timeout_s", limits.segment_timeout_s), now
        self.due = now + len(self.first.samplers) * limits.segment_timeout_s

    def _rest(self) -> None:
        self.progress, self.due, self.look_at = None, math.inf, math.inf

    def progressed(self, progress: Activity, now: float, limit: tuple[str, float]) -> float:
        """Record a look; if the actor has progressed since the last one, its deadline counts from now, with this limit.

        This ends: a question asks for a finite number of steps and resets. Return the seconds without progress.
        """
        if not self.asked:
            return 0.0
        before, steps = (progress.began, 0) if self.progress is None else (self.progress.moves, self.progress.steps)
        if (progress.moves, progress.steps) != (before, steps):
            self.limit, self.due, self.extended, self.moved_at = limit, now + limit[1], False, now
        self.progress = progress
        return now - self.moved_at

    def is_late(self, now: float, limits: Limits) -> bool:
        """Return whether the deadline has passed; if a look is overdue as well, extend it once until after that look.

        Looks are overdue when the learner was busy with an update while the actor was collecting.
        """
        if self.due < now and self.look_at <= now and not self.extended:
            self.due, self.extended = now + limits.look_s / 2, True
        return self.due < now

    def hung(self) -> str:
        """Return why it counts as hung."""
        name, seconds = self.limit
        limit = f"{name}={seconds:g}"
        if self.first.index < 0:
            return f"made no environment within {limit}; if its constructor takes longer, raise {name}"
        if self.progress is not None and self.progress.phase is Phase.IDLE:
            return f"has not begun its question within {seconds:g} s and counts as hung"
        seen = "sent no segment" if self.progress is None else "made no progress"
        last = "" if self.progress is None else f", was last seen {self.progress}"
        return f"{seen} for {limit}{last} and counts as hung; if a single step or reset takes longer, raise {name}"
