"""Messages between the engine and a transport: commands in one direction, events in the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppo.cluster.faults import Fault
from dppo.cluster.wire import Answer
from dppo.envs.progress import Progress
from dppo.errors import DppoError
from dppo.ppo.exchange.records import Incident, PolicySnapshot, SegmentRequest
from dppo.spaces.spaces import Spaces


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, and the restart budget."""

    segment_timeout_s: float = math.inf
    """For each segment that an actor owes; later, from its last observed progress."""
    max_actor_restarts: int = 0
    """Replacements of an actor in a row without a segment before the run stops."""
    start_timeout_s: float = 120.0
    """For a process to start. While no actor runs at all, the larger of this and `segment_timeout_s` counts."""
    move_after_s: float = 20.0
    """An actor that has been without a process for longer loses its samplers to the others."""
    quiet_s: float = 30.0
    """Log what the run is waiting for after so long without an event."""

    @property
    def look_s(self) -> float:
        """Interval between two looks at the progress of an actor that has a question."""
        return min(self.segment_timeout_s / 4, self.quiet_s)

    @property
    def nobody_s(self) -> float:
        """Longest time without any running actor."""
        return max(self.start_timeout_s, self.segment_timeout_s)


# ------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Start:
    """Start process number `process` of an actor."""

    actor_id: int
    process: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process of an actor, even if it seems dead: it must no longer answer or step a simulator."""

    actor_id: int
    process: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a running actor for segments; it sends one answer."""

    actor_id: int
    process: int
    ask_id: int
    requests: tuple[SegmentRequest, ...]
    hosted: tuple[int, ...]
    """All samplers that the actor hosts now; it closes the environments of all others."""
    policy: PolicySnapshot
    spaces: Spaces | None = None
    """Those that every sampler must have; None where none is built for this question."""


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask a running actor for the spaces of a sampler's environments."""

    actor_id: int
    process: int
    ask_id: int
    sampler_id: int


@dataclass(frozen=True, slots=True)
class Look:
    """Look at the progress of a running actor, which may be too busy to answer."""

    actor_id: int
    process: int


@dataclass(frozen=True, slots=True)
class Report:
    """Count an incident, and log it."""

    incident: Incident
    text: str


@dataclass(frozen=True, slots=True)
class Log:
    """Log a line."""

    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run with this error; a `KeyboardInterrupt` stops it like Ctrl-C."""

    error: DppoError | KeyboardInterrupt


ForTransport = Start | Kill | Ask | Describe | Look
Command = ForTransport | Report | Log | Fail


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Started:
    """A process is running and accepts questions."""

    actor_id: int
    process: int


@dataclass(frozen=True, slots=True)
class Died:
    """A process has ended or cannot be reached any more."""

    actor_id: int
    process: int
    reason: str
    """Continues a sentence that begins with "actor 3 (samplers 3, 7)"."""
    error: DppoError | None = None
    """Set if a new process would fail in the same way: the run ends with this error."""


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to an `Ask`."""

    actor_id: int
    process: int
    ask_id: int
    answer: Answer | Fault


@dataclass(frozen=True, slots=True)
class Described:
    """The answer to a `Describe`."""

    actor_id: int
    process: int
    ask_id: int
    answer: Spaces | Fault


@dataclass(frozen=True, slots=True)
class Progressed:
    """The result of a `Look`; not sent if the progress of the actor cannot be read."""

    actor_id: int
    process: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Joined:
    """There is room for this actor, which may be new."""

    actor_id: int


@dataclass(frozen=True, slots=True)
class Left:
    """There is no room for this actor any more: start no replacement until it joins again."""

    actor_id: int


Event = Started | Died | Answered | Described | Progressed | Joined | Left
