"""EvaluationPace: how long evaluations take beside the training, and how long it has waited for them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dppo.config import Config
from dppo.log import logger
from dppo.records.bottleneck import MIN_ADVICE_S, evaluations_line, ways_to_evaluate_faster
from dppo.records.metrics.reading import Row
from dppo.records.terminal.figures import duration
from dppo.run.open_evaluation import OpenEvaluation

BACKLOG = 3  # evaluations that are not over: one is played, and two wait for it


class EvaluationPace:
    """Measures episodes of evaluations that actors play, and waits for them; warns once of a backlog."""

    def __init__(self, config: Config, called_at: float) -> None:
        """Begin at the time `called_at` of the call of `train`."""
        self._config = config
        self._called_at = called_at
        self._looked_at = called_at
        self._busy_s = 0.0
        self._num_played = 0
        self._waited_s = 0.0
        self._taken_s = 0.0  # part of it that `take_waited_s` has returned
        self._has_warned = False

    def look(self, *, is_playing: bool) -> None:
        """Measure the time since the last look; `is_playing`: episodes were played meanwhile."""
        now = time.monotonic()
        if is_playing:
            self._busy_s += now - self._looked_at
        self._looked_at = now

    def count_episode(self) -> None:
        """Count an episode that has ended."""
        self._num_played += 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the training, or the end of the run, waits for evaluations."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited_s += time.monotonic() - began

    def take_waited_s(self) -> float:
        """Return the seconds of waiting since the last call, of which the next call counts none."""
        seconds = self._waited_s - self._taken_s
        self._taken_s = self._waited_s
        return seconds

    def times(self) -> Row:
        """Return the metrics of the time of a row about an evaluation that is over."""
        row = {"time/wall_s": time.monotonic() - self._called_at}
        return row | self.wait_time()

    def wait_time(self) -> Row:
        """Return the metric of the time of waiting for evaluations; {} before the first wait."""
        if self._waited_s:
            return {"time/eval_wait_s": self._waited_s}
        return {}

    def notes(self, row: Row) -> list[str]:
        """Return the line about a long wait for evaluations until this row, if it was long."""
        line = evaluations_line(self._waited_s, row.get("time/training_s", 0.0), self._config)
        return [line] if line else []

    def add_time_left(self, row: Row, playing: Sequence[OpenEvaluation]) -> None:
        """Set the time until all evaluations of the run are over in a row, if it is known; warn once of a backlog.

        `playing`: evaluations that have begun and are not over.
        """
        config = self._config
        every = config.eval_every or 1
        later = math.ceil(config.total_steps / every) - int(row["global_step"]) // every
        later = min(later, config.iterations - int(row["iteration"]))
        played = sum(len(evaluation.played) for evaluation in playing)
        unplayed = (later + len(playing)) * config.eval_episodes - played
        row.pop("time/eval_left_s", None)
        if config.num_actors == 0 or not self._num_played or not unplayed:
            return
        left_s = unplayed * self._busy_s / self._num_played
        row["time/eval_left_s"] = left_s
        training_left_s = math.inf  # before the first env step of this call
        if row.get("charts/SPS"):
            training_left_s = (config.total_steps - row["global_step"]) / row["charts/SPS"]
        late_s = left_s - training_left_s
        if self._has_warned or len(playing) < BACKLOG or late_s < MIN_ADVICE_S:
            return
        self._has_warned = True
        logger.warning(
            "evaluations fall behind: %d are not over, and at this speed the last one ends %s after the training. %s",
            len(playing),
            duration(late_s),
            ways_to_evaluate_faster(config, left_s / max(training_left_s, 1.0)),
        )
