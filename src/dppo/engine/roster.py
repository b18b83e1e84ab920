"""The engine's record of each actor (samplers, process, questions, deadline, pace), and its patience. Pure."""

import math
from dataclasses import dataclass, field
from enum import Enum
from heapq import heappop, heappush

from dppo.engine.messages import Kill, Limits, Process
from dppo.envs.activity import Activity, Phase
from dppo.errors import DppoError
from dppo.hosts.wire import Answer, Question
from dppo.spaces.spaces import Spaces

TIMES = 20  # the longest seen
MEASURED = 8  # answers before that counts
LEAST_S = {Phase.MAKE: 300.0, Phase.RESET: 300.0, Phase.STEP: 60.0, Phase.IDLE: 60.0}
SETTINGS = {Phase.MAKE: "start_timeout_s", Phase.RESET: "reset_timeout_s", Phase.STEP: "step_timeout_s"}


class State(Enum):
    """States of an actor."""

    ABSENT = "no process; one will be started at `start_at`"
    STARTING = "a process has been requested"
    RUNNING = "the process accepts questions"
    LEAVING = "the process finishes its questions, accepts no more, and is not replaced"
    LEFT = "no process, and no room for one"


@dataclass(slots=True)
class Pace:
    """Pace of a process: that of the fastest quarter of its last segments.

    A slow actor makes all of them slowly. An outlier, or a part of an episode in which a simulator has more to compute,
    says nothing about the actor, and several samplers say more than one.
    """

    segment_s: float = 0.0  # for a segment of a sampler; 0 while that is not certain
    samplers: int = 1  # of the answer before, from which that was measured
    waited_s: float = 0.0  # by the run since a sampler moved, because a replay elsewhere would take longer
    cost_s: float = 0.0  # by which it has made the run longer as the slowest actor
    iterations: int = 0  # in which that was worth a line
    rested: int = 0  # iterations without a sampler
    patience: int = 8  # how many of them there are before it is tried again; twice as many each time
    evidence: int = 0
    enough: int = 20  # evidence
    recent: tuple[float, ...] = ()  # of the last 16 answers

    def add(self, samplers: int, fastest_s: float) -> None:
        """Add an answer with segments of some samplers, of which the fastest took `fastest_s`."""
        self.recent = (*self.recent[-15:], fastest_s)
        self.samplers = samplers
        self.evidence += samplers**2
        if self.evidence >= self.enough:
            self.segment_s = sorted(self.recent)[len(self.recent) // 4]


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

    def will_make(self, samplers: tuple[int, ...], index: int, hosted: tuple[int, ...]) -> list[int]:
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


class Patience:
    """Limits that are set, and for all others the twentyfold of what was measured, `segment_timeout_s` at most.

    An actor that has just been replaced gets the whole of that, so that something slow that is rare costs a replay and
    not the run.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits, self._answers, self._said = limits, 0, False
        self._longest_s = dict.fromkeys(LEAST_S, 0.0)

    def limit(self, phase: Phase, *, replaced: bool) -> tuple[str, float]:
        """Return the name of the setting that limits the time of a phase, and that time in seconds."""
        phase = Phase.STEP if phase is Phase.REPLAY else phase
        whole_s = self._limits.segment_timeout_s
        given = self._limits.of_phases.get(SETTINGS.get(phase, ""))
        if given is not None:
            return SETTINGS[phase], given
        measured_s = max(LEAST_S.get(phase, math.inf), TIMES * self._longest_s.get(phase, math.inf))
        if replaced or self._answers < MEASURED or measured_s >= whole_s:
            return "segment_timeout_s", whole_s
        return SETTINGS.get(phase, ""), measured_s

    def looked(self, actor: Actor, progress: Activity, now: float) -> None:
        """Note what an actor was seen to do; if it has progressed, its deadline counts from now."""
        unsure = actor.losses > 0 or self._limits.max_actor_restarts == 0 or progress.moves == 0  # it may still import
        stood_s = actor.progressed(progress, now, self.limit(progress.phase, replaced=unsure))
        if not stood_s:
            self.went_on(actor)
        actor.stood = progress.phase, stood_s * (progress.phase is not Phase.IDLE)

    def went_on(self, actor: Actor) -> None:
        """Count the time for which an actor stood in a place, now that it has gone on: it did not hang there."""
        self._saw(*actor.stood)

    def answered(self, answer: Answer, after_s: float = 0.0) -> None:
        """Note the time of a mean step, and what messages took of the time since the question."""
        self._saw(Phase.IDLE, after_s - answer.timings.total_s)
        self._saw(Phase.STEP, max(report.env_s / max(1, report.steps) for report, _ in answer.made))
        self._answers += 1

    def _saw(self, phase: Phase, seconds: float) -> None:
        if phase in self._longest_s:
            self._longest_s[phase] = max(self._longest_s[phase], seconds)

    def news(self) -> list[str]:
        """Return a line about the limits, once, when they are those of what was measured."""
        if self._said or self._answers < MEASURED:
            return []
        self._said, limits = True, [self.limit(phase, replaced=False) for phase in SETTINGS]
        said = ", ".join(f"{name}={seconds:.3g}" for name, seconds in limits if name != "segment_timeout_s")
        return [f"Hung actors are replaced after {said}."] if said else []


class Alarms:
    """A heap with the next alarm of each actor, so that a tick attends to those that are due and to no others."""

    def __init__(self, actors: dict[int, Actor], limits: Limits) -> None:
        self._actors, self._limits = actors, limits
        self._heap: list[tuple[float, int]] = []  # times, and ids of actors; some are out of date

    def set(self, actor: Actor) -> None:
        """Set the alarm of an actor whose times have changed; if the next one is later than before, it may wait."""
        start_at = actor.start_at if actor.state is State.ABSENT else math.inf
        when = min(actor.due, actor.look_at, start_at, actor.move_at(self._limits))
        if when < actor.alarm_at:
            actor.alarm_at = when
            heappush(self._heap, (when, actor.actor_id))

    def due(self, now: float) -> list[Actor]:
        """Return the actors whose alarms are due, and forget these alarms."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            when, actor_id = heappop(self._heap)
            actor = self._actors[actor_id]
            if when == actor.alarm_at:  # else an earlier one has been set since
                actor.alarm_at = math.inf
                due.append(actor)
        return due
