"""The engine's record of each actor (samplers, process, questions, deadline, pace), and messages about it. Pure."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum

from dppo.cluster.collecting.messages import Kill, Limits, Process, Start
from dppo.cluster.wire import Answer, Question
from dppo.envs.activity import Activity
from dppo.errors import counted


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

    segment_s: float = 0.0
    """Seconds for a segment of a sampler; 0 while that is not certain."""
    samplers: int = 1  # of the answer before, from which that was measured
    waited_s: float = 0.0
    """Seconds that the run has waited for it since a sampler moved, because a replay elsewhere would take longer."""
    cost_s: float = 0.0
    """Seconds by which it has made the run longer as the slowest actor."""
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
    samplers: tuple[int, ...] = ()
    """Those that it hosts, running or not, in order; every sampler has one host."""
    process: Process = field(init=False)
    """Its process, or the next one; events from any other are ignored."""
    state: State = State.ABSENT
    start_at: float = 0.0
    missing_since: float = 0.0
    """Time when it was lost, or first requested."""
    ever_started: bool = False
    samplers_moved: bool = False
    """True while other actors host its samplers."""
    due: float = math.inf
    """Deadline of its first answer; questions in the queue behind have none yet."""
    limit: tuple[str, float] = ("segment_timeout_s", math.inf)
    """Name and value of the setting that set that deadline."""
    moved_at: float = 0.0
    """Time of the first look at the place where it is."""
    extended: bool = False
    """True if that deadline waits for a look that was overdue."""
    asked: dict[int, Question] = field(default_factory=dict)
    """Unanswered questions by id, in the order in which the process works through them."""
    holds: dict[int, int] = field(default_factory=dict)
    """Index of the segment that each of its samplers can collect after all questions without being rebuilt."""
    look_at: float = math.inf
    """Time of the next look at its progress."""
    progress: Activity | None = None
    """Result of the last look since its first question was begun."""
    alarm_at: float = math.inf
    """Time of its next alarm with the engine."""
    node: str = ""
    """Name of the node of its process."""
    pace: Pace = field(default_factory=Pace)
    began: float = 0.0
    """Time at which its process began its first question."""
    waits: bool = False
    """True if it is asked for nothing until its queue is empty, because samplers may move then."""

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

    @property
    def rebuilds(self) -> bool:
        """True while it may be replaying episodes."""
        return bool(self.asked and self.first.rebuilds)

    # ------------------------------------------------------------------ its times

    def next_alarm(self, limits: Limits) -> float:
        """Return the earliest time at which something may have to be done about this actor."""
        start_at = self.start_at if self.state is State.ABSENT else math.inf
        return min(self.due, self.look_at, start_at, self.move_at(limits))

    def move_at(self, limits: Limits) -> float:
        """Return the time after which other actors host its samplers."""
        if self.state is State.RUNNING or not self.samplers:
            return math.inf
        if self.state in (State.LEAVING, State.LEFT):
            return -math.inf
        return self.missing_since + (limits.move_after_s if self.ever_started else limits.start_timeout_s)

    # ------------------------------------------------------------------ its process

    def wanted(self, now: float) -> None:
        """Let a process be started now."""
        self.state, self.start_at, self.missing_since = State.ABSENT, now, now

    def start(self) -> Start:
        """Request a new process."""
        self.state = State.STARTING
        return Start(self.process)

    def end(self, now: float) -> Kill:
        """Abandon its process; a new one is due now, unless it is leaving."""
        then = State.LEFT if self.state is State.LEAVING else State.ABSENT
        kill, self.process = Kill(self.process), Process(self.actor_id, self.process.number + 1)
        self.wanted(now)
        self.state = then
        self.asked.clear()
        self.holds.clear()
        self.pace, self.waits = Pace(), False
        self._rest()
        return kill

    # ------------------------------------------------------------------ its questions

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


def waiting(
    waited_s: float, owed: Sequence[int], total: int, actors: Collection[Actor], limits: Limits, slots: object = None
) -> str:
    """Return the message about missing segments of the samplers `owed`, of `total`; if none, about an environment.

    `slots` are shown, if there are any.
    """
    missing = [actor for actor in actors if actor.state in (State.ABSENT, State.STARTING) and actor.samplers]
    starts = _shortened(
        [f"actor {actor.actor_id} is being {'restarted' if actor.ever_started else 'started'}" for actor in missing]
    )
    if not owed:
        return "; ".join([f"waiting for the first environment for {waited_s:.0f} s", *starts])
    samplers = f"{samplers_named(owed[:8])}{' ...' if len(owed) > 8 else ''}"
    segments = f"waiting for {len(owed)} of {total} segments for {waited_s:.0f} s ({samplers})"
    replaying = [actor for actor in actors if actor.rebuilds and actor.progress is not None]
    replays = _shortened([f"actor {actor.actor_id}: {actor.progress}" for actor in replaying])
    rule = f"an actor that makes no progress for {limits.segment_timeout_s:g} s is replaced"
    return "; ".join([segments, *starts, *replays, *([] if slots is None else [str(slots)]), rule])


def none_started(first: Actor, num_actors: int, limits: Limits) -> str:
    """Return the error of a run whose actors never started."""
    return (
        f"actor {first.actor_id} was not started by Ray within {limits.nobody_s:g} s, and no other of the {num_actors} "
        f"is running. If the cluster is full (see `ray status`), lower `num_actors` or `cpus_per_actor`; if starting "
        f"takes longer, raise `segment_timeout_s`."
    )


def wrong(question: Question, answer: Answer) -> str:
    """Return how an answer differs from what was asked for, "" if it does not."""
    asked = [(sampler, question.index, question.version) for sampler in question.samplers]
    got = [(report.sampler_id, report.index, report.policy_version) for report, _ in answer.made]
    return (
        "" if got == asked else f"sent the wrong segments: {got} instead of {asked} (sampler, segment, policy version)"
    )


def hung(actor: Actor, *, describing: bool) -> str:
    """Return why an actor counts as hung."""
    name, seconds = actor.limit
    limit = f"{name}={seconds:g}"
    if describing:
        return f"made no environment within {limit}; if its constructor takes longer, raise {name}"
    standstill = "sent no segment" if actor.progress is None else "made no progress"
    stuck = "" if actor.progress is None else f", was last seen {actor.progress}"
    return f"{standstill} for {limit}{stuck} and counts as hung; if a single step or reset takes longer, raise {name}"


def restarts_spent(lost: str, limits: Limits) -> str:
    """Return the error of an actor that was lost too often in a row; `lost` describes the last time."""
    return (
        f"{lost}\nIt was replaced {counted(limits.max_actor_restarts, 'time')} in a row without making a segment "
        f"(max_actor_restarts={limits.max_actor_restarts}). Look for the reason in the simulator's own log; "
        f"`num_actors=0` runs it in this process, where a debugger can follow."
    )


def moved(actor: Actor, missing_s: float, samplers: Sequence[int], hosts: Sequence[int]) -> str:
    """Return the message about samplers that other actors host for now."""
    known = {State.LEFT: "has left", State.LEAVING: "is leaving"}
    reason = known.get(actor.state, f"has not started for {missing_s:.0f} s")
    return (
        f"actor {actor.actor_id} {reason}; until it is back, its samplers {listed(samplers)} are on actor "
        f"{listed(hosts)}"
    )


def slow(actor: Actor, typical_s: float, share: float) -> str:
    """Return the message about an actor that makes the run longer; `share` of the time is due to it."""
    on_node = f" on node {actor.node}" if actor.node else ""
    return (
        f"actor {actor.actor_id}{on_node} needs {actor.pace.segment_s:.3g} s for a segment, a typical actor "
        f"{typical_s:.3g} s, which costs {share:.0%} of the time. Its samplers move where that saves time. "
        f"Look for other programs on that node, or run fewer actors there."
    )


def samplers_named(samplers: Sequence[int]) -> str:
    """Return `sampler 3`, or `samplers 0, 3, 5`."""
    return f"sampler{'' if len(samplers) == 1 else 's'} {listed(samplers)}"


def listed(numbers: Sequence[int]) -> str:
    """Return `0, 3, 5`."""
    return ", ".join(map(str, numbers))


def _shortened(parts: list[str], most: int = 4) -> list[str]:
    return parts if len(parts) <= most else [*parts[:most], f"and so are {len(parts) - most} more"]
