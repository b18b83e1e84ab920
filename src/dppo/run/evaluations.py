"""Evaluations: a run plays episodes with its policy now and then, and adds the results to its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dppo.config import Config
from dppo.engine.actor_players import ActorPlayers
from dppo.engine.playing import Outcome
from dppo.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    ControllerFault,
    DppoError,
    EnvironmentFault,
    counted,
)
from dppo.invocation import as_setting_and_flag
from dppo.log import logger
from dppo.policies.bounds import ElementAtBound
from dppo.ppo.exchange.records import ControllerTurn, Episode, PolicySnapshot
from dppo.records.comparison import BaselineComparison
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.run_files import BASELINE, CHECKPOINTS
from dppo.records.observer import Observer
from dppo.records.terminal import figures
from dppo.run.baseline import BASELINE_NUMBER, CHECK_NUMBER, Baseline
from dppo.run.best_evaluation import BestEvaluation, EvaluationScore
from dppo.run.evaluation_pace import EvaluationPace
from dppo.run.evaluation_result import EvaluationResult, result_of
from dppo.run.in_process_players import InProcessPlayers
from dppo.run.learner import PPOLearner
from dppo.run.notices import Notices
from dppo.run.open_evaluation import OpenEvaluation, described
from dppo.run.outputs import call_disk
from dppo.run.parts import RunContext
from dppo.signals import StopRequested

Row = dict[str, float]
WAIT_S = 0.5  # longest single wait for actors at the end of a run
WAITING = (
    "waiting for the %s; an episode may take eval_timeout_s=%g. Ctrl-C ends the run now; --resume "
    "repeats the evaluation"
)
MAX_LOGGED_FAULTS = 3
MAX_REPEATED = 100  # evaluations that a resumed run repeats


class Evaluations(Observer):
    """Begins evaluations when they are due, and adds the results to the rows of the iterations in which they end.

    It is the first of all observers. Where several have ended, the earlier ones get rows of their own, which repeat
    the rest of the present one. The policy of an evaluation that is not over is in the checkpoint of its iteration.
    """

    def __init__(
        self,
        run: RunContext,
        players: InProcessPlayers | ActorPlayers,
        rows: Sequence[Row],
        pace: EvaluationPace,
    ) -> None:
        """Begin the evaluations again that were not over in the checkpoint from which the run is resumed.

        `rows`: rows of metrics.jsonl that earlier processes have written.
        """
        self._pace = pace
        self._observers = run.observers
        self._players = players
        self._on_actors = run.config.num_actors != 0
        self._disk = run.disk
        self._stop = run.stop
        self._config: Config = run.config
        self._learner: PPOLearner = run.parts.learner
        self._path: Path = run.folder.path
        self._steps = self._learner.global_step
        progress: Row = {"iteration": self._learner.iteration, "global_step": self._steps}
        self._row = progress | dict(rows[-1] if rows else {})
        self._notices = Notices()
        if isinstance(players, InProcessPlayers):
            players.on_step = self._on_step
        self._has_begun = False  # True if an evaluation has begun since the last checkpoint
        self._refusal: ConfigError | None = None  # raised once the row of the iteration is written
        self._faults = 0
        self._open: dict[int, OpenEvaluation] = {}  # iteration of the policy -> evaluation
        self.stopped_by: str | None = None
        """The first observer that asked to stop at a row of its own."""
        self._best = BestEvaluation(never_worse=self._config.never_worse)
        self._baseline: Baseline | None = None
        self._actions = run.actions
        # in the last evaluation that is over, if often enough to be reported
        self._element_at_bound: ElementAtBound | None = None
        self._unsaved = set[int]()  # iterations whose checkpoint could not be written
        if self._config.baseline is not None:
            self._baseline = Baseline.from_run(run)
            self._begin_baseline(self._baseline)
        state = run.folder.resumed_from.get("evaluations")
        if state is not None:
            self._load(state)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of evaluations: those that are not over, and the best."""
        waiting = [[number, evaluation.global_step] for number, evaluation in self._open.items()]
        best = self._best.result
        state: dict[str, Any] = {"open": waiting, "best": None}
        if best is not None:
            state["best"] = [best.mean_return, best.iteration, best.global_step]
        comparison = self.comparison()
        if comparison is not None:
            state["comparison"] = comparison.as_json()
        return state

    def comparison(self) -> BaselineComparison | None:
        """Return the comparison of the best evaluation so far with the baseline; None without a baseline."""
        if self._baseline is None:
            return None
        comparison = BaselineComparison(
            name=self._baseline.name,
            mean_return=self._baseline.mean_return,
            iteration=None,
            difference=None,
            never_worse=self._config.never_worse,
            version=self._baseline.version,
        )
        best = self._best.result
        if best is None:
            return comparison
        return replace(comparison, iteration=best.iteration, difference=best.difference)

    def play_baseline(self) -> None:
        """Play the baseline before training: all episodes in process, or on actors the first step.

        On actors, the episodes are then played beside the training.

        Raises:
            ControllerFault: the controller raised, or returned something that is not an action.
        """
        baseline = self._baseline
        if baseline is None:
            return
        self._notices = Notices()
        with suppress(StopRequested):  # the first iteration will end with it
            while not baseline.is_ready:
                self._stop.check()
                self._take_in(self._players.outcomes(WAIT_S))
                if not baseline.is_ready and self._notices.take_due():
                    baseline.play.log_progress(self._config.eval_episodes)

    def drop_unsaved(self, number: int) -> None:
        """Leave out an evaluation whose checkpoint could not be written: the best one must have its checkpoint."""
        self._unsaved.add(number)
        self._best.drop(number)

    def take_waited_s(self) -> float:
        """Return the seconds of waiting for evaluations since the last call, which are no time of training."""
        return self._pace.take_waited_s()

    def check(self) -> None:
        """Raise ConfigError if the evaluations of the last row cannot be played."""
        if self._refusal is not None:
            raise self._refusal

    def take_begun(self) -> bool:
        """Return whether an evaluation has begun since the last call: its policy must be in a checkpoint."""
        has_begun = self._has_begun
        self._has_begun = False
        return has_begun

    def notes(self) -> list[str]:
        lines = self._pace.notes(self._row)
        best = self._best.result
        if best is not None:
            count = counted(self._config.eval_episodes, "episode")
            lines.append(
                f"Best evaluation: {figures.number(best.mean_return)} in {count}, after {best.global_step:,} steps "
                f"(iter_{best.iteration:06d})"
            )
        comparison = self.comparison()
        has_failed = self._baseline is not None and self._baseline.has_failed
        if comparison is not None and not has_failed:
            lines.append(str(comparison))
        if self._element_at_bound is not None:
            lines.append(f"In the last evaluation, {self._element_at_bound}")
        return lines

    def on_iteration(self, row: Row) -> None:
        """Begin an evaluation if one is due; report those that are over."""
        if row is self._row:  # a row that `_report` writes
            return
        number = int(row["iteration"])
        steps = int(row["global_step"])
        is_last = number >= self._config.iterations
        if is_last or self._is_due(number, steps):
            self._begin(number, steps, self._learner.snapshot())
            self._has_begun = True
        self._steps = steps
        self._row = row
        try:
            results = self._take_ended(wait=is_last or not self._on_actors)
        except ConfigError as error:
            self._refusal = error
            return
        row |= self._learner.incident_metrics() | self._pace.wait_time()
        self._pace.add_time_left(row, self._playing())
        if results:
            self._report(results[:-1])
            row |= results[-1]
            self._row = row  # `_report` has set another one

    def _playing(self) -> list[OpenEvaluation]:
        """Return the baseline and the evaluations that are not over, in the order in which they are played."""
        playing = [evaluation for evaluation in self._open.values() if not evaluation.is_played]
        if self._baseline is not None and not self._baseline.is_over:
            playing.insert(0, self._baseline.play)
        return playing

    def _is_due(self, number: int, steps: int) -> bool:
        """Return whether an evaluation is due; the first one of a run with a prior evaluates its clone."""
        every = self._config.eval_every or 1
        collected = self._config.collected_by_prior
        if number <= collected:
            return number == collected
        return steps // every > self._steps // every

    def finish(self) -> bool:
        """Wait for the evaluations that are not over, unless a signal has arrived; return whether there were any."""
        waiting = bool(self._open)
        # a kill may leave the last checkpoint, whose open evaluations are repeated: no row may have their results yet
        self._report(self._take_ended(wait=True, report=False))
        return waiting

    def _load(self, state: Any) -> None:
        try:
            self._load_best(state)
            waiting = [(int(number), int(steps)) for number, steps in state["open"][-MAX_REPEATED:]]
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._path}: its evaluations cannot be read ({error!r})."
            ) from None
        for number, steps in waiting:
            path = self._path / CHECKPOINTS / checkpoints.file_name(number)
            try:
                policy = self._learner.policy_in(checkpoints.load(path).arrays, number)
                self._begin(number, steps, policy)
            except (CheckpointError, KeyError, ValueError) as error:
                logger.warning("the evaluation after %s steps is left out: %s", f"{steps:,}", error)

    def _load_best(self, state: Any) -> None:
        if state["best"] is None:
            return
        mean_return, number, steps = state["best"]
        difference = None
        stored = state.get("comparison")
        if stored is not None and self._baseline is not None:
            difference = self._baseline.difference_in(BaselineComparison.from_json(stored))
        score = EvaluationScore(float(mean_return), int(number), int(steps), difference)
        self._best.add(score)

    def _begin_baseline(self, baseline: Baseline) -> None:
        """Begin the episodes of the baseline unless they are stored; on actors, play its first step before."""
        if baseline.is_over:
            return
        if self._on_actors:
            self._players.begin(CHECK_NUMBER, ControllerTurn(first_step_only=True))
        self._players.begin(BASELINE_NUMBER, ControllerTurn())

    def _look(self) -> None:
        """Measure how long episodes have been played; before the baseline is ready, its process is only starting."""
        is_starting = self._baseline is not None and not self._baseline.is_ready
        self._pace.look(is_playing=not is_starting and bool(self._playing()))

    def _begin(self, number: int, steps: int, policy: PolicySnapshot) -> None:
        self._look()
        self._open[number] = OpenEvaluation(f"evaluation after {steps:,} steps", steps)
        self._players.begin(number, policy)

    def _report(self, results: list[Row]) -> None:
        """Write a row for each result: a copy of the current row, with the metrics of the result."""
        for result in results:
            usual = {name: self._row[name] for name in self._row if not name.startswith("eval/")}
            self._row = usual | result | self._learner.incident_metrics()
            self._pace.add_time_left(self._row, self._playing())
            # also after a stop: this writes the row
            stopped_by = self._observers.iteration(self._row, is_repeated=True)
            self.stopped_by = self.stopped_by or stopped_by

    def _take_ended(self, *, wait: bool, report: bool = True) -> list[Row]:
        """Return the results of the evaluations that are over, in their order; log a wait that is long.

        With `report`, those that end before the last one are reported during the wait.
        """
        try:
            with suppress(StopRequested):  # what is not over is repeated when the run is resumed
                if wait:
                    self._wait_for_all(report=report)
                else:
                    while self._take_in(self._players.outcomes(0.0)):
                        pass
        except ClusterError as error:  # Ray is gone, and the run has ended
            logger.warning("the %s is left out: %s", self.describe_open(), error)
            for evaluation in self._open.values():
                self._count_faults(evaluation)
            self._open.clear()
        return self._take_results()

    def _wait_for_all(self, *, report: bool) -> None:
        self._notices = Notices()
        while self._is_waiting():
            with self._pace.waiting():
                self._stop.check()
                outcomes = self._players.outcomes(WAIT_S)
                if self._on_actors and self._notices.take_due():
                    logger.info(WAITING, self.describe_open(), self._config.eval_timeout_s)
                self._take_in(outcomes)
            if report and self._is_waiting():
                self._report(self._take_results())

    def _on_step(self, length: int) -> None:
        """Log now and then how far the episodes in this process are; the current one has `length` steps."""
        if not self._notices.take_due():
            return
        for evaluation in self._playing()[:1]:
            evaluation.log_progress(self._config.eval_episodes, length)

    def _is_waiting(self) -> bool:
        """Return whether an evaluation is not over: its episodes, or the baseline's, are still played."""
        return bool(self._open and self._playing())

    def _baseline_is_over(self) -> bool:
        return self._baseline is None or self._baseline.is_over

    def _take_in(self, outcomes: list[Outcome]) -> bool:
        """Take in the results of episodes; return whether there may be more outcomes."""
        self._look()
        for number, episode, outcome in outcomes:
            if isinstance(outcome, ConfigError):
                raise outcome
            if self._baseline is not None and number in (CHECK_NUMBER, BASELINE_NUMBER):
                self._take_in_baseline(self._baseline, number, episode, outcome)
            elif number in self._open:
                self._add(self._open[number], episode, outcome)
        return bool(outcomes)

    def _take_in_baseline(
        self, baseline: Baseline, number: int, episode: int, outcome: Episode | DppoError
    ) -> None:
        if isinstance(outcome, ControllerFault) and not baseline.is_ready:
            baseline.has_failed = True
            raise outcome
        if number == CHECK_NUMBER:
            baseline.is_ready = True
            return
        self._add(baseline.play, episode, outcome)
        if not baseline.play.is_played:
            return
        baseline.finish()
        self._count_faults(baseline.play)
        try:
            call_disk(self._disk, f"writing {BASELINE}", baseline.store)
        except (CheckpointError, OSError) as error:
            logger.warning(
                "%s: cannot be written (%s); a resumed run plays it again", BASELINE, error
            )

    def _take_results(self) -> list[Row]:
        """Remove the evaluations that are over, in their order; return their metrics."""
        if not self._baseline_is_over():
            return []
        numbers = [number for number, evaluation in self._open.items() if evaluation.is_played]
        results = []
        for number in numbers:
            evaluation = self._open.pop(number)
            self._count_faults(evaluation)
            result = result_of(number, evaluation, self._baseline, self._config, self._actions)
            self._keep_score(result)
            self._keep_element_at_bound(evaluation.name, result)
            results.append(result.metrics | self._pace.times())
        return results

    def describe_open(self) -> str:
        """Describe the episodes of evaluations and of the baseline that are not over; "" if there are none."""
        return described(self._playing(), self._config.eval_episodes)

    def _add(self, evaluation: OpenEvaluation, episode: int, outcome: Episode | DppoError) -> None:
        """Add the result of an episode, and note whether it is the last one of this evaluation."""
        self._pace.count_episode()
        evaluation.played[episode] = None
        missing = self._config.eval_episodes - len(evaluation.played)
        evaluation.is_played = not missing
        if isinstance(outcome, Episode):
            evaluation.played[episode] = outcome
            return
        left_out = f"episode {episode} is left out"
        if isinstance(outcome, ClusterError):
            evaluation.is_played = True
            if missing:
                left_out += f", and so are {missing} others"
        self._report_fault(evaluation, left_out, outcome)

    def _report_fault(self, evaluation: OpenEvaluation, left_out: str, error: DppoError) -> None:
        if not self._on_actors and isinstance(error, EnvironmentFault) and error.in_constructor:
            elsewhere = as_setting_and_flag("num_actors", 1)
            error.message += (
                f". The samplers have environments of their own in this process; {elsewhere} evaluates in another "
                f"process"
            )
        if self._best.result is None:
            evaluation.check_kwargs(self._config.eval_env_kwargs, error)
        text = f"{evaluation.name}: {left_out}: {error}"
        self._faults += 1
        if self._faults <= MAX_LOGGED_FAULTS:
            logger.warning("%s", text.partition("\n")[0])
        evaluation.add_fault(text)

    def _count_faults(self, evaluation: OpenEvaluation) -> None:
        for fault in evaluation.faults:
            self._learner.count(fault)
            for observer in self._observers:
                observer.on_incident(fault)

    def _keep_score(self, result: EvaluationResult) -> None:
        """Compare a result with the best one, unless it has no episodes, or no checkpoint."""
        number = int(result.metrics["eval/iteration"])
        if "eval/episodic_return" not in result.metrics or number in self._unsaved:
            return
        mean_return = result.metrics["eval/episodic_return"]
        steps = int(result.metrics["eval/global_step"])
        self._best.add(EvaluationScore(mean_return, number, steps, result.difference))

    def _keep_element_at_bound(self, name: str, result: EvaluationResult) -> None:
        """Keep the element that is at a bound too often for the last lines of the run; log the first."""
        if result.element_at_bound is None:
            return
        had_element = self._element_at_bound is not None
        self._element_at_bound = result.element_at_bound if result.reports_element else None
        if result.reports_element and not had_element:
            logger.warning("%s: %s", name, self._element_at_bound)
