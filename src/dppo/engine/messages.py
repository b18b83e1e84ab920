"""Messages between the engine and a transport: commands in one direction, events in the other."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dppo.envs.activity import Activity
from dppo.errors import ClusterError, DppoError
from dppo.ppo.exchange.questions import Answer, Question
from dppo.ppo.exchange.records import ControllerTurn, Episode, Incident, PolicySnapshot
from dppo.spaces.spaces import Spaces

LONGEST_QUIET_S = 30.0  # between two lines about the same wait, and between two looks at an actor


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, and the restart budget."""

    segment_timeout_s: float = math.inf
    """Time limit for each segment that an actor owes; later, from its last observed progress."""
    max_actor_restarts: int = 0
    """Replacements of an actor in a row without a segment before the run stops."""
    start_timeout_s: float = 120.0
    """Time limit for the start of a process; while no actor runs, at least `segment_timeout_s`."""
    move_after_s: float = 20.0
    """An actor that has been without a process for longer loses its samplers to the others."""
    quiet_s: float = 10.0
    """Time without an event after which the log says what the run waits for; later less often."""
    backup_requests: bool = False
    """Ask idle actors for late segments as well."""
    fewest_actors: int = 1
    """Number of running actors below which no segments are requested."""
    phase_timeouts_s: Mapping[str, float | None] = field(default_factory=dict)
    """Configured timeouts of a step, a reset and a constructor, by the name of the setting: see `Patience`."""
    most_actors: int = sys.maxsize
    """Maximum number of actors that there may ever be."""
    samplers_per_actor: int | None = None
    """Maximum number of samplers of a process; None: no limit, until an answer shows one."""
    elastic: bool = False
    """True if actors join and leave: then enough of them are waited for without a deadline."""
    most_hosted: int = sys.maxsize
    """Maximum number of samplers whose environments exist at once: see `InstanceSlots`."""
    start_s: float = 0.0
    """Seconds that the start of the environments of a sampler takes, at the rate that is allowed."""
    resumed_at: int | None = None
    """Iterations before this call; None: a new run, of which no constructor is known to work."""
    look_s: float = field(init=False)
    """Interval between two looks at the progress of an actor that has a question."""
    segment_limit: tuple[str, float] = field(init=False)
    """The name of the setting `segment_timeout_s`, and its value."""

    def __post_init__(self) -> None:
        timeouts_s = [self.segment_timeout_s, *self.phase_timeouts_s.values()]
        look_s = min([LONGEST_QUIET_S, *(timeout_s / 4 for timeout_s in timeouts_s if timeout_s)])
        object.__setattr__(self, "look_s", look_s)
        object.__setattr__(self, "segment_limit", ("segment_timeout_s", self.segment_timeout_s))


class Recycled(ClusterError):
    """An actor is to be replaced before it makes the next segment: see the setting recycle_after."""


class Process(NamedTuple):
    """One process of an actor: the actor keeps its id, its processes are numbered 1, 2, ..."""

    actor_id: int
    number: int


# ------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Start:
    """Start a process."""

    process: Process


@dataclass(frozen=True, slots=True)
class Kill:
    """End a process, even if it seems dead: it must no longer answer or step a simulator."""

    process: Process


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a running process for segments; it sends one answer."""

    process: Process
    ask_id: int
    question: Question
    policy: PolicySnapshot


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask a running process for the spaces of a sampler's environments; it sends one answer."""

    process: Process
    ask_id: int
    sampler_id: int


@dataclass(frozen=True, slots=True)
class Play:
    """Ask a running process to play an episode of an evaluation; it sends one answer."""

    process: Process
    ask_id: int
    episode: int
    timeout_s: float
    """Seconds after which the process ends the episode."""
    policy: PolicySnapshot | ControllerTurn


@dataclass(frozen=True, slots=True)
class Look:
    """Look at the progress of a running process, which may be too busy to answer."""

    process: Process


@dataclass(frozen=True, slots=True)
class Log:
    """Log a line, and count an incident if it is about one."""

    text: str
    """The line; "" to count the incident alone."""
    incident: Incident | None = None


IN_WORDS: dict[type, str] = {
    Start: "starting an actor",
    Kill: "ending an actor",
    Ask: "asking an actor",
    Describe: "asking an actor",
    Play: "asking an actor of evaluations",
}
"""The commands for which a transport calls Ray, for messages about calls that do not end."""

ForTransport = Start | Kill | Ask | Describe | Play | Look
Command = ForTransport | Log


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Started:
    """A process is running and accepts questions."""

    process: Process
    node: str = ""  # name of its node


@dataclass(frozen=True, slots=True)
class Died:
    """A process has ended or cannot be reached any more."""

    process: Process
    reason: str
    """Continues a sentence that begins with "actor 3 (samplers 3, 7)"."""
    # set if a new process would fail in the same way: the run ends with this error
    error: DppoError | None = None
    activity: Activity | None = None
    """Its last activity, if it is known."""


Reply = Answer | Spaces | Episode | DppoError


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to an `Ask`, a `Describe` or a `Play`."""

    process: Process
    ask_id: int
    answer: Reply


@dataclass(frozen=True, slots=True)
class Progressed:
    """The result of a `Look`; not sent if the progress cannot be read."""

    process: Process
    progress: Activity


@dataclass(frozen=True, slots=True)
class Joined:
    """There is room for this actor, which may be new."""

    actor_id: int


@dataclass(frozen=True, slots=True)
class Left:
    """The actor's resources are gone or about to go: it is not replaced until it joins again.

    It finishes the questions in its queue, if it lives long enough. The event is ignored while no other actor is
    running; the sender repeats it.
    """

    actor_id: int


Event = Started | Died | Answered | Progressed | Joined | Left
