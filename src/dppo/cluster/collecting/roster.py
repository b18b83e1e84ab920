"""One actor as the engine sees it: its process, the questions that it has not answered, and its deadline. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum

from dppo.cluster.collecting.messages import Limits
from dppo.ppo.progress import Progress


class State(Enum):
    """States of an actor."""

    ABSENT = "no process; one is started at `start_at`"
    STARTING = "a process was asked for"
    RUNNING = "the process takes questions"
    LEFT = "no process, and no room for one"


@dataclass(slots=True)
class Actor:
    """One actor: the process behind it changes, its number does not."""

    actor_id: int
    process: int = 0
    """Number of its newest process; events of any other are ignored."""
    state: State = State.ABSENT
    start_at: float = 0.0
    missing_since: float = 0.0
    """When it was lost, or first wanted."""
    ever_started: bool = False
    given_up: bool = False
    """Its samplers have been moved to others until it is back."""
    due: float = math.inf
    """Time by which its next answer must be here."""
    asked: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The samplers of each question that it has not answered, by the question's id."""
    holds: dict[int, int] = field(default_factory=dict)
    """The index of the segment that each of its samplers would make next without being rebuilt."""
    delivered: bool = False
    """True once its process has made a segment."""
    slow_is_fine: bool = False
    """It makes environments or plays episodes again: as long as that goes on, it is slow, not hung."""
    rebuilds: bool = False
    """It plays episodes again."""
    look_at: float = math.inf
    """Time of the next look at its progress."""
    progress: Progress | None = None
    """The last look, while `slow_is_fine`."""

    def ask(self, ask_id: int, samplers: tuple[int, ...], now: float, limits: Limits, *, rebuilds: bool) -> None:
        """Take note of a question."""
        self.asked[ask_id] = samplers
        self.rebuilds |= rebuilds
        self.slow_is_fine = self.rebuilds or not self.delivered
        self.progress = None
        self.look_at = now + limits.look_s if self.slow_is_fine else math.inf
        self.extend(now, limits)

    def extend(self, now: float, limits: Limits) -> None:
        """Set the deadline anew: an answer came, or a question was asked."""
        owed = sum(map(len, self.asked.values()))
        self.due = now + owed * limits.segment_timeout_s if owed else math.inf
        if not owed:
            self.slow_is_fine, self.rebuilds, self.progress, self.look_at = False, False, None, math.inf

    def progressed(self, progress: Progress, now: float, limits: Limits) -> None:
        """Take note of a look: an actor whose progress has moved since the last one has time again."""
        if not self.slow_is_fine:
            return
        before = progress.began if self.progress is None else self.progress.moves
        if progress.moves != before:
            self.due = max(self.due, now + limits.segment_timeout_s)
        self.progress = progress

    def is_late(self, now: float, limits: Limits) -> bool:
        """Return whether its deadline has passed; if nobody has looked at it for long, it has time until the next look.

        That is so when the learner itself was busy: with an update, while the actor was collecting.
        """
        if now <= self.due:
            return False
        if self.slow_is_fine and now >= self.look_at:
            self.due = now + limits.look_s / 2
            return False
        return True

    def end(self, now: float) -> None:
        """Give up its process; a new one is due now."""
        self.state, self.start_at, self.missing_since = State.ABSENT, now, now
        self.asked.clear()
        self.holds.clear()
        self.delivered = False
        self.due = self.look_at = math.inf
        self.slow_is_fine, self.rebuilds, self.progress = False, False, None
