"""The engine's record of one actor: its process, its unanswered questions and its deadline. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from dppo.cluster.collecting.messages import Limits
from dppo.envs.progress import Progress


class State(Enum):
    """States of an actor."""

    ABSENT = "no process; one will be started at `start_at`"
    STARTING = "a process has been requested"
    RUNNING = "the process accepts questions"
    LEFT = "no process, and no room for one"


@dataclass(slots=True)
class Actor:
    """One actor. Its process may be replaced; its number stays."""

    actor_id: int
    process: int = 0
    """Number of its newest process; events from any other are ignored."""
    state: State = State.ABSENT
    start_at: float = 0.0
    missing_since: float = 0.0
    """Time when it was lost, or first requested."""
    ever_started: bool = False
    samplers_moved: bool = False
    """True while other actors host its samplers."""
    due: float = math.inf
    """Deadline of its next answer."""
    asked: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Samplers of each unanswered question, by the id of the question."""
    holds: dict[int, int] = field(default_factory=dict)
    """Index of the segment that each of its samplers can collect next without being rebuilt."""
    rebuilds: bool = False
    """True while it replays episodes."""
    look_at: float = math.inf
    """Time of the next look at its progress."""
    progress: Progress | None = None
    """Result of the last look since the last question."""

    def ask(self, ask_id: int, samplers: tuple[int, ...], now: float, limits: Limits, *, rebuilds: bool) -> None:
        """Record a question."""
        self.asked[ask_id] = samplers
        self.rebuilds |= rebuilds
        self.progress, self.look_at = None, now + limits.look_s
        self.extend(now, limits)

    def extend(self, now: float, limits: Limits) -> None:
        """Set the deadline after a question or an answer."""
        owed = sum(map(len, self.asked.values()))
        self.due = now + owed * limits.segment_timeout_s if owed else math.inf
        if not owed:
            self.rebuilds, self.progress, self.look_at = False, None, math.inf

    def progressed(self, progress: Progress, now: float, limits: Limits) -> None:
        """Record a look; extend the deadline if the actor has progressed since the last one.

        This ends: a question asks for a finite number of steps and resets.
        """
        if not self.asked:
            return
        before = progress.began if self.progress is None else self.progress.moves
        if progress.moves != before:
            self.due = max(self.due, now + limits.segment_timeout_s)
        self.progress = progress

    def is_late(self, now: float, limits: Limits) -> bool:
        """Return whether the deadline has passed; if a look is overdue as well, extend it until after that look.

        Looks are overdue when the learner was busy with an update while the actor was collecting.
        """
        if now <= self.due:
            return False
        if now >= self.look_at:
            self.due = now + limits.look_s / 2
            return False
        return True

    def end(self, now: float) -> None:
        """Abandon its process; a new one is due now."""
        self.state, self.start_at, self.missing_since = State.ABSENT, now, now
        self.asked.clear()
        self.holds.clear()
        self.due = self.look_at = math.inf
        self.rebuilds, self.progress = False, None
