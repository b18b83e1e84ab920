"""TrainingTimes: the times of a run in its metrics and its result."""

import time


class TrainingTimes:
    """Measures a run. Waiting for an evaluation is no training, and left out."""

    def __init__(self) -> None:
        """Begin with the call of `train`."""
        self.called_at = time.monotonic()
        self._began = self.called_at
        self._iteration_ended = self.called_at

    def begin(self) -> None:
        """Begin to measure: the first segments are requested now."""
        self._began = time.monotonic()
        self._iteration_ended = self._began

    def end_iteration(self, ended: float) -> float:
        """Return the seconds that the iteration took which has ended at the time `ended`."""
        iteration_s = ended - self._iteration_ended
        self._iteration_ended = ended
        return iteration_s

    def leave_out(self, seconds: float) -> None:
        """Leave out a pause after the last iteration."""
        self._began += seconds
        self._iteration_ended += seconds

    @property
    def training_s(self) -> float:
        """Seconds of training until the end of the last iteration."""
        return self._iteration_ended - self._began

    @property
    def wall_s(self) -> float:
        """Seconds from the call of `train` until the end of the last iteration."""
        return self._iteration_ended - self.called_at
