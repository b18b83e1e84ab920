"""Pace: the seconds that an actor needs for a segment of a sampler, from its answers. Pure: no Ray, no clock."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 6  # answers
SURE = 3  # answers from which on a pace is known
PATIENCE = 16  # iterations without a sampler after which a slow actor is tried again; later twice as many each time


@dataclass(slots=True)
class Pace:
    """Pace of one process: that of the second fastest of its last answers.

    So neither an outlier nor the slow part of an episode makes an actor slow, and one that is fast again is so at once.
    """

    segment_s: float = 0.0
    """Seconds for a segment; 0 while that is not known."""
    waited_s: float = 0.0
    """Seconds waited so far for an actor with too many samplers because a replay elsewhere would take longer."""
    cost_s: float = 0.0
    """Seconds by which the slowest actor has made the run longer."""
    iterations: int = 0
    """Iterations in which that was worth reporting."""
    first_s: float = 0.0
    """Seconds for a segment in the first answer, which includes the making of environments."""
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _rested: int = 0
    _patience: int = PATIENCE

    def add(self, seconds: float) -> None:
        """Add the seconds for a segment in an answer."""
        self._recent.append(seconds)
        if len(self._recent) >= (1 if self.on_trial else SURE):
            self.segment_s = sorted(self._recent)[:2][-1]

    @property
    def on_trial(self) -> bool:
        """True from the moment when the actor is tried again."""
        return self._patience > PATIENCE

    def rest(self) -> bool:
        """Count an iteration without a sampler; return whether it is time to try the actor again."""
        self._rested += 1
        return self._rested >= self._patience

    def begin_trial(self) -> None:
        """Let the next answer decide how fast the actor is now."""
        self._rested, self._patience = 0, 2 * self._patience
        self._recent.clear()
