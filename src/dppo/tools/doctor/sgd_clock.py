"""Time updates by their sums of gradients, and end those that take too long."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dppo.ppo.learning.parallel import Parallel

FEWEST_SUMS = 7  # before an update is ended: two steps of soft actor-critic


class TimeIsUp(Exception):
    """An update was ended, because its remaining time follows from the time so far."""


class SGDClock(Parallel):
    """A single rank, which notes the time of each sum of gradients."""

    def __init__(self) -> None:
        self.seconds: Callable[[], float] = time.thread_time
        """The clock; by default, the CPU time of this thread."""
        self._times: list[float] = []
        self._until = 0.0

    def measure(self, update: Callable[[], Any], sums: int, until: float) -> float:
        """Return the seconds of an update, from the time of its first sums if it is not over at `until`.

        Args:
            sums: sums of gradients in the whole update.
            until: time by `time.monotonic`.
        """
        self._times = []
        self._until = until
        began = self.seconds()
        try:
            update()
        except TimeIsUp:
            first, *_, last = self._times
            return first - began + (last - first) / (len(self._times) - 1) * (sums - 1)
        return self.seconds() - began

    def sum_(self, tensor: Any) -> None:
        """Note the time; raise TimeIsUp if the time is up, and its speed is known."""
        self._times.append(self.seconds())
        if len(self._times) >= FEWEST_SUMS and time.monotonic() > self._until:
            raise TimeIsUp
