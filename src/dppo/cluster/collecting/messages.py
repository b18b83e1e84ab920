"""The words between the engine and a transport: commands in one direction, events in the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dppo.cluster.faults import Fault
from dppo.cluster.wire import Answer
from dppo.errors import DppoError
from dppo.ppo.progress import Progress
from dppo.ppo.segment import Incident, PolicySnapshot, SegmentRequest
from dppo.spaces import Spaces


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines in seconds, and the restart budget."""

    segment_timeout_s: float = math.inf
    """For each segment of a running actor; while it rebuilds samplers, and before its first segment, since it was last
    seen to make progress."""
    max_actor_restarts: int = 0
    """Replacements of an actor in a row that deliver no segment, before the run stops."""
    start_timeout_s: float = 120.0
    """For a process to start; a larger `segment_timeout_s` counts instead where no actor runs at all."""
    move_after_s: float = 20.0
    """An actor that has not been replaced for so long leaves its samplers to the others."""
    quiet_s: float = 30.0
    """Print what the run is waiting for when nothing has come for so long."""

    @property
    def look_s(self) -> float:
        """Interval between looks at the progress of an actor that may be slow."""
        return min(self.segment_timeout_s / 4, self.quiet_s)

    @property
    def nobody_s(self) -> float:
        """Longest time that a run may be without any running actor."""
        return max(self.start_timeout_s, self.segment_timeout_s)


# ------------------------------------------------------------------ commands


@dataclass(frozen=True, slots=True)
class Start:
    """Start process number `process` of an actor."""

    actor_id: int
    process: int


@dataclass(frozen=True, slots=True)
class Kill:
    """End the process of an actor, also if it is believed dead: it must not answer or step a simulator any more."""

    actor_id: int
    process: int


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask a running actor for segments; it gives one answer."""

    actor_id: int
    process: int
    ask_id: int
    requests: tuple[SegmentRequest, ...]
    hosted: tuple[int, ...]
    """All samplers that are the actor's at present; it closes the environments of any other."""
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
    """Count an incident, and print it."""

    incident: Incident
    text: str


@dataclass(frozen=True, slots=True)
class Say:
    """Print a line."""

    text: str


@dataclass(frozen=True, slots=True)
class Fail:
    """End the run with this error; an interruption ends it in good order."""

    error: DppoError | KeyboardInterrupt


ForTransport = Start | Kill | Ask | Describe | Look
Command = ForTransport | Report | Say | Fail


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Started:
    """A process is running and may be asked."""

    actor_id: int
    process: int


@dataclass(frozen=True, slots=True)
class Died:
    """A process has ended, or can no longer be reached."""

    actor_id: int
    process: int
    reason: str
    """Follows "actor 3 (samplers 3, 7)" in a sentence."""
    error: DppoError | None = None
    """Not None: a new process would fail in the same way, so the run ends with this error."""


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
    """The finding of a `Look`; there is none where the actor cannot be looked at."""

    actor_id: int
    process: int
    progress: Progress


@dataclass(frozen=True, slots=True)
class Joined:
    """There is room for this actor, which may be a new one."""

    actor_id: int


@dataclass(frozen=True, slots=True)
class Left:
    """The room of this actor is gone: start no replacement until it has joined again."""

    actor_id: int


Event = Started | Died | Answered | Described | Progressed | Joined | Left
