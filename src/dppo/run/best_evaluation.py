"""The best evaluation of a run, whose checkpoint is kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dppo.errors import CheckpointError
from dppo.records.comparison import BaselineComparison
from dppo.records.differences import Difference
from dppo.records.files.checkpoint import EvaluatedCheckpoints


@dataclass(frozen=True, slots=True)
class EvaluationScore:
    """The result of an evaluation, by which it is compared with others."""

    mean_return: float
    iteration: int
    global_step: int
    difference: Difference | None = None
    """Difference from the baseline; None without a baseline."""

    @property
    def is_improvement(self) -> bool:
        """True if it shows at 95 % that the policy is better than the baseline."""
        return self.difference is not None and self.difference.is_improvement


class BestEvaluation:
    """The best evaluation so far, and the best one before it.

    With `never_worse`, evaluations that show an improvement on the baseline come before all others.
    """

    def __init__(self, *, never_worse: bool = False) -> None:
        self.result: EvaluationScore | None = None
        self._previous: EvaluationScore | None = None
        self._never_worse = never_worse

    def add(self, score: EvaluationScore) -> None:
        """Compare a score with the best one. Of equal scores, that of the earlier policy is the best."""
        if self.result is None or self._rank(score) > self._rank(self.result):
            self._previous = self.result
            self.result = score

    def drop(self, number: int) -> None:
        """Take the previous best evaluation as the best again, if iteration `number` made the best one."""
        if self.result is not None and self.result.iteration == number:
            self.result = self._previous

    def _rank(self, score: EvaluationScore) -> tuple[bool, float, int]:
        is_proven = self._never_worse and score.is_improvement
        return is_proven, score.mean_return, -score.iteration


def evaluated_checkpoints(state: Any) -> EvaluatedCheckpoints | None:
    """Return the checkpoints to keep for evaluations, whose `state` is in the last one; None if there are none."""
    try:
        if not state:
            return None
        score, best, _ = state["best"] or (None, None, None)
        scores = {number: None for number, _ in state["open"]}
        if best is not None:
            scores[best] = score
        stored = state.get("comparison")
        if stored is None:
            return EvaluatedCheckpoints(scores)
        return EvaluatedCheckpoints(scores, BaselineComparison.from_json(stored).in_best_json())
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the evaluations of the checkpoint cannot be read ({error!r})."
        ) from None
