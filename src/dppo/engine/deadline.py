"""Deadline: when an actor that works on a question counts as hung."""

import math
from dataclasses import dataclass

from dppo.envs.activity import Activity, Phase

Limit = tuple[str, float]
"""The name of a setting, and the seconds that it allows or that follow from it."""

# a look takes a moment, or some seconds if it is the first one on a node
UNSEEN_S = 10.0
NOWHERE = (Phase.IDLE, 0.0)
"""Stands for an actor that no look has found in a place yet."""


@dataclass(slots=True)
class Deadline:
    """The deadline of the question that an actor works on. Each observed progress postpones it."""

    due: float = math.inf
    limit: Limit = ("segment_timeout_s", math.inf)
    """The setting that `due` follows from."""
    look_at: float = math.inf
    """Time of the next look at the actor's progress."""
    began: float = 0.0
    """Time at which the actor began the question."""
    progress: Activity | None = None
    """Activity of the actor at the last look since then."""
    moved_at: float = 0.0
    """Time of the first look that found the actor where it is now."""
    standstill: tuple[Phase, float] = NOWHERE
    """Phase in which the actor is, and the seconds for which looks have found it in the same place."""
    unseen_since: float = math.inf
    """Time of the first look whose result has not arrived."""
    extended: bool = False
    """True while `due` waits for a look that was overdue."""

    def begin(self, now: float, due: float, limit: Limit, look_at: float) -> None:
        """Start with a new question."""
        self.due = due
        self.limit = limit
        self.look_at = look_at
        self.began = now
        self.progress = None
        self.moved_at = now
        self.standstill = NOWHERE
        self.unseen_since = math.inf
        self.extended = False

    def end(self) -> None:
        """Wait for nothing."""
        self.due = math.inf
        self.look_at = math.inf
        self.progress = None
        self.unseen_since = math.inf

    def look_sent(self, now: float) -> None:
        """Record that a look has been sent."""
        self.unseen_since = min(self.unseen_since, now)

    def record_look(self, progress: Activity, now: float, limit: Limit) -> float:
        """Record a look; if the actor has progressed since the last one, its deadline counts from now, with `limit`.

        This ends: a question asks for a finite number of steps and resets. Return the seconds without progress.
        """
        self.unseen_since = math.inf
        calls_before = progress.began
        steps_before = 0
        if self.progress is not None:
            calls_before = self.progress.num_calls
            steps_before = self.progress.steps
        if progress.num_calls != calls_before or progress.steps != steps_before:
            self.limit = limit
            self.due = now + limit[1]
            self.extended = False
            self.moved_at = now
        self.progress = progress
        return now - self.moved_at

    def wait_for_look(self, now: float, look_s: float) -> None:
        """Extend a deadline that has passed once, by half of `look_s`, if the look after `look_s` is overdue as well.

        Looks are overdue when the learner was busy with an update while the actor was collecting.
        """
        if self.has_passed(now) and self.is_look_due(now) and not self.extended:
            self.due = now + look_s / 2
            self.extended = True

    def has_passed(self, now: float) -> bool:
        return self.due < now

    def is_look_due(self, now: float) -> bool:
        return self.look_at <= now

    def send_look(self, now: float, look_s: float) -> None:
        """Record that a look is sent; the next one is due after `look_s`."""
        self.look_at = now + look_s
        self.look_sent(now)
