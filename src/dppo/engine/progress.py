"""Reports of the progress of a collection, about once a second."""

import math
import time
from collections.abc import Callable

from dppo.engine.collector import OnProgress
from dppo.ppo.exchange.records import CollectionProgress

PROGRESS_S = 1.0  # shortest interval between two reports of progress
SPARE = 20.0  # the same, in units of the time that a report takes


class ProgressReports:
    """Calls `on_progress` about once a second while the segments of an iteration are being collected."""

    def __init__(
        self, on_progress: OnProgress, batch_size: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_progress = on_progress
        self._batch_size = batch_size  # env steps of an iteration
        self._clock = clock
        self._index = 0
        self._began = 0.0
        self._due_at = math.inf

    def begin(self, index: int, began: float) -> None:
        """Note that the segments of iteration `index` have been waited for since `began`."""
        self._index = index
        self._began = began
        self._due_at = began + PROGRESS_S

    @property
    def due(self) -> bool:
        """True when it is time for a report."""
        return self._clock() >= self._due_at

    def send(
        self,
        steps: int,
        processes: int,
        took_s: float = 0.0,
        starting: int = 0,
        environments: int = 0,
    ) -> None:
        """Report that `processes` have made `steps` env steps for the request; it took `took_s` to find out.

        Steps of a segment that two processes make count twice until one has sent it, but never beyond the batch.
        """
        if self._batch_size:
            steps = min(steps, self._batch_size)
        now = self._clock()
        self._due_at = now + max(PROGRESS_S, SPARE * took_s)
        progress = CollectionProgress(
            self._index + 1,
            steps,
            self._index * self._batch_size + steps,
            processes,
            now - self._began,
            starting,
            environments,
        )
        self._on_progress(progress)
