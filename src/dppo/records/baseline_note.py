"""BaselineNote: an observer that warns when the policy falls below the baseline, the user's controller."""

from collections.abc import Iterable
from typing import NamedTuple

from dppo.config import Config
from dppo.invocation import as_setting_and_flag
from dppo.log import logger
from dppo.records.clone_note import CLEAR, longer_prior
from dppo.records.differences import Difference
from dppo.records.metrics.reading import Row
from dppo.records.observer import Observer
from dppo.records.terminal.figures import number, signed


class _Evaluated(NamedTuple):
    """The mean return of an evaluation, and the env steps of its policy."""

    mean_return: float
    global_step: int

    def __str__(self) -> str:
        return f"{number(self.mean_return)} after {self.global_step:,}"


class BaselineNote(Observer):
    """Logs once for each fall that the policy has become worse than the baseline, and which policy is kept.

    A fall is an evaluation that shows at 95 % that the policy is worse, by a tenth of the return or more, after one
    that did not. A run with a `prior` starts at the level of its controller: the evaluation of the clone is left to
    `CloneNote`.
    """

    def __init__(self, config: Config, rows: Iterable[Row] = ()) -> None:
        """Start after the earlier `rows` of a resumed run, whose falls were logged then."""
        self._config = config
        self._is_level = config.prior is not None
        """True while the policy has not fallen since it was as good as the baseline."""
        self._level: _Evaluated | None = None
        """The last evaluation before the fall."""
        self._best: _Evaluated | None = None
        self._proven: _Evaluated | None = None
        """The best evaluation that shows an improvement on the baseline."""
        for row in rows:
            self.note(row)

    def on_iteration(self, row: Row) -> None:
        """Log the note that is due after this row, if any."""
        note = self.note(row)
        if note:
            logger.warning("%s", note)

    def note(self, row: Row) -> str:
        """Return the note that is due after `row`, the next one of the run; "" if none is."""
        difference = Difference.from_row(row)
        if difference is None:
            return ""
        evaluated = _Evaluated(row["eval/episodic_return"], int(row["eval/global_step"]))
        if self._best is None or evaluated.mean_return > self._best.mean_return:
            self._best = evaluated
        if difference.is_improvement and (
            self._proven is None or evaluated.mean_return > self._proven.mean_return
        ):
            self._proven = evaluated
        is_of_clone = row["eval/iteration"] <= self._config.collected_by_prior
        has_fallen = self._is_level and _is_clearly_below(difference, row) and not is_of_clone
        text = ""
        if has_fallen:
            text = self._text(evaluated, row, difference)
            self._is_level = False
        elif difference.verdict != "worse":
            self._is_level = True
        if self._is_level:
            self._level = evaluated
        return text

    def _text(self, evaluated: _Evaluated, row: Row, difference: Difference) -> str:
        level_before = "" if self._level is None else f", {self._level}"
        return (
            f"the policy has fallen below the baseline {self._config.baseline_name}: mean return {evaluated} env "
            f"steps{level_before}; baseline {number(row['eval/baseline_return'])}, difference "
            f"{signed(difference.mean)} (95 % {difference.interval}). "
            f"{self._deployed_policy()}.{self._advice()}"
        )

    def _deployed_policy(self) -> str:
        if not self._config.never_worse:
            flag = as_setting_and_flag("never_worse", True)
            return (
                f"checkpoints/best.json names the best policy so far, {self._best}; the newest one is deployed unless "
                f"you use {flag}, also on resume"
            )
        if self._proven is None:
            return "never_worse deploys the baseline until an evaluation shows an improvement"
        return f"never_worse deploys the best policy so far, {self._proven}"

    def _advice(self) -> str:
        """Return what to try in a new run that starts from a controller; "" if this one did not."""
        config = self._config
        if config.prior is None:
            return ""
        ways = []
        longer = longer_prior(config)
        if longer:
            ways.append(f"{longer}, which holds it near the controller for longer")
        if config.algo == "sac":
            flag = as_setting_and_flag("algo", "ppo")
            ways.append(f"{flag}, which is better at keeping a good controller")
        if not ways:
            return ""
        return f" If it does not recover, start a new run with {'; or with '.join(ways)}"


def _is_clearly_below(difference: Difference, row: Row) -> bool:
    """Return whether an evaluation shows that the policy is worse than the baseline, and clearly so."""
    size = max(abs(row["eval/episodic_return"]), abs(row["eval/baseline_return"]))
    return difference.verdict == "worse" and -difference.mean > CLEAR * size
