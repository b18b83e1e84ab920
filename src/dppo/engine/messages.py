"""Messages between the engine and a transport: commands in one direction, events in the other."""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dppo.envs.activity import Activity
from dppo.errors import ClusterError, DppoError
from dppo.ppo.exchange.questions import Answer, Question
from dppo.ppo.exchange.records import Incident, PolicySnapshot
from dppo.spaces.spaces import Spaces

LONGEST_QUIET_S = 30.0  # between two lines about the same wait, and two looks at an actor


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, and the restart budget."""

    segment_timeout_s: float = math.inf  # for each segment that an actor owes; later, from its last observed progress
    max_actor_restarts: int = 0  # replacements of an actor in a row without a segment before the run stops
    start_timeout_s: float = 120.0
    """For a process to start. While no actor runs at all, the larger of this and `segment_timeout_s` counts."""
    move_after_s: float = 20.0  # an actor that has been without a process for longer loses its samplers to the others
    quiet_s: float = 10.0  # log what the run is waiting for after so long without an event, later less often
    backup_requests: bool = False  # ask idle actors for late segments as well
    fewest_actors: int = 1  # with fewer running, nothing is asked for
    of_phases: Mapping[str, float | None] = field(default_factory=dict)
    """Those set for a step, a reset and a constructor, by the name of the setting: see `Patience`."""
    most_actors: int = sys.maxsize  # that there may ever be
    samplers_per_actor: int | None = None  # most in a process; None: no limit, until an answer shows one
    elastic: bool = False  # True if actors join and leave: then enough of them are waited for without a deadline
    most_hosted: int = sys.maxsize  # samplers whose environments exist at once: see `Slots`
    start_s: float = 0.0  # seconds that the start of the environments of a sampler takes, at the rate that is allowed

    @property
    def look_s(self) -> float:
        """Interval between two looks at the progress of an actor that has a question."""
        return min([self.segment_timeout_s / 4, LONGEST_QUIET_S, *(one / 4 for one in self.of_phases.values() if one)])


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
class Look:
    """Look at the progress of a running process, which may be too busy to answer."""

    process: Process


@dataclass(frozen=True, slots=True)
class Log:
    """Log a line, and count an incident if it is about one."""

    text: str
    incident: Incident | None = None


IN_WORDS: dict[type, str] = {
    Start: "starting an actor",
    Kill: "ending an actor",
    Ask: "asking an actor",
    Describe: "asking an actor",
}
"""The commands for which a transport calls Ray, for messages about calls that do not end."""

ForTransport = Start | Kill | Ask | Describe | Look
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
    error: DppoError | None = None  # set if a new process would fail in the same way: the run ends with this error


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to an `Ask` or a `Describe`."""

    process: Process
    ask_id: int
    answer: Answer | Spaces | DppoError


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
    """There is no room for this actor any more, or will soon be none: it is not replaced until it joins again.

    It finishes the questions in its queue, if it lives long enough. As long as no other actor is running, the event has
    no effect, and should be repeated.
    """

    actor_id: int


Event = Started | Died | Answered | Progressed | Joined | Left
