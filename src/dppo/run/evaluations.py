"""Evaluations: a run plays episodes with its policy now and then, and adds the results to its metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from dppo.config import Config
from dppo.engine.actor_players import ActorPlayers
from dppo.engine.playing import Outcome
from dppo.envs.activity import ActivityRecord
from dppo.envs.silence import SilenceWatch
from dppo.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DppoError,
    EnvironmentFault,
    counted,
)
from dppo.invocation import as_setting_and_flag
from dppo.log import logger
from dppo.policies.bounds import NAMED, AtBound, most_at_bound
from dppo.policies.playing import EpisodePlayer
from dppo.ppo.exchange.records import Episode, Incident, IncidentKind, PolicySnapshot
from dppo.records.files import checkpoint as checkpoints
from dppo.records.files.run_files import CHECKPOINTS
from dppo.records.observer import Observer
from dppo.run.context import RunContext
from dppo.run.learner import PPOLearner
from dppo.signals import StopRequested
from dppo.spaces.actions import boxes

WAIT_S = 0.5  # longest single wait for actors at the end of a run
SAY_S = 10.0  # of waiting, until a line says so; then five times as long
WAITING = (
    "waiting for the evaluation after %s; an episode may take eval_timeout_s=%g. Ctrl-C ends the run now; --resume "
    "plays it again"
)
MAX_LOGGED_FAULTS = 3
MANY = 10  # open evaluations, of which a line warns
MAX_REPEATED = 100  # evaluations that a resumed run repeats

Best = tuple[float, int, int]
"""Mean return, iteration and env steps of an evaluation."""


class InProcessPlayers:
    """Plays the episodes of evaluations here, as `ActorPlayers` does on actors: one each time that it is asked."""

    def __init__(
        self,
        player: EpisodePlayer,
        episodes: int,
        timeout_s: float,
        turn: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Keep the arguments; `turn` returns a context in which a signal ends an episode."""
        self._player = player
        self._episodes = episodes
        self._timeout_s = timeout_s
        self._turn = turn
        self._progress = ActivityRecord()
        player.progress = self._progress
        self._tasks = deque[tuple[int, int, PolicySnapshot]]()

    def begin(self, number: int, policy: PolicySnapshot) -> None:
        """Store the task."""
        self._tasks.extend((number, episode, policy) for episode in range(self._episodes))

    def outcomes(self, wait_s: float) -> list[Outcome]:
        """Play the next episode, or none if `wait_s` is 0."""
        if not self._tasks or not wait_s:
            return []
        number, episode, policy = self._tasks.popleft()
        try:
            with SilenceWatch(self._progress, lambda _: "evaluation"), self._turn():
                return [(number, episode, self._player.play(policy, episode, self._timeout_s))]
        except DppoError as error:
            if isinstance(error, ClusterError):
                self._tasks = deque(task for task in self._tasks if task[0] != number)
            return [(number, episode, error)]


@dataclass(slots=True)
class _Evaluation:
    """An evaluation that is not over."""

    global_step: int
    began: float = field(default_factory=time.monotonic)
    played: dict[int, Episode | None] = field(default_factory=dict)
    """Episodes by index; None for an episode that failed."""

    def episodes(self) -> list[Episode]:
        """Return the episodes that have not failed, in their order."""
        return [episode for _, episode in sorted(self.played.items()) if episode is not None]


class BestEvaluation:
    """The best evaluation so far, and the best one before it."""

    def __init__(self) -> None:
        self.result: Best | None = None
        self._before: Best | None = None

    def add(self, result: Best) -> None:
        """Compare a result. Of equal ones the earlier is the best, whichever has ended first."""
        best = self.result
        if best is None or (result[0], -result[1]) > (best[0], -best[1]):
            self._before = best
            self.result = result

    def drop(self, number: int) -> None:
        """Take the one before as the best again, if the best one is that of iteration `number`."""
        if self.result is not None and self.result[1] == number:
            self.result = self._before


class Evaluations(Observer):
    """Begins evaluations when they are due, and adds the results to the rows of the iterations in which they end.

    It is the first of all observers. Where several have ended, the earlier ones get rows of their own, which repeat
    the rest of the present one. The policy of an evaluation that is not over is in the checkpoint of its iteration.
    """

    def __init__(self, run: RunContext, players: InProcessPlayers | ActorPlayers) -> None:
        """Begin the evaluations again that were not over in the checkpoint from which the run is resumed."""
        self._observers = run.observers
        self._players = players
        self._stop = run.stop
        self._config: Config = run.config
        self._learner: PPOLearner = run.learner
        self._path: Path = run.path
        self._steps = self._learner.global_step
        self._row: dict[str, float] = {
            "iteration": self._learner.iteration,
            "global_step": self._steps,
        }
        if run.rows:
            self._row |= run.rows[-1]
        self._waited_s = 0.0
        self._begun = False  # since the last checkpoint
        self._faults = 0
        self._open: dict[int, _Evaluation] = {}  # by the iteration of the policy
        self.stopped_by: str | None = None
        """The first observer that asked to stop at a row of its own."""
        self._best = BestEvaluation()
        self._actions = run.actions
        self._at_bound: AtBound | None = (
            None  # in the last evaluation that is over, if often enough to be named
        )
        self._unsaved = set[int]()  # iterations whose checkpoint could not be written
        state = run.resumed_from.get("evaluations")
        if state is not None:
            self._load(state)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of evaluations: those that are not over, and the best."""
        waiting = [[number, evaluation.global_step] for number, evaluation in self._open.items()]
        return {"open": waiting, "best": self._best.result}

    def not_saved(self, number: int) -> None:
        """Leave out an evaluation whose checkpoint could not be written: that of the best one must exist."""
        self._unsaved.add(number)
        self._best.drop(number)

    def take_waited_s(self) -> float:
        """Return the seconds of waiting for evaluations since the last call, which are no time of training."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def take_begun(self) -> bool:
        """Return whether an evaluation has begun since the last call: its policy must be in a checkpoint."""
        begun = self._begun
        self._begun = False
        return begun

    def notes(self) -> list[str]:
        lines = []
        if self._best.result is not None:
            score, number, steps = self._best.result
            count = counted(self._config.eval_episodes, "episode")
            lines.append(
                f"Best evaluation: {score:.1f} in {count}, after {steps:,} steps (iter_{number:06d})"
            )
        if self._at_bound is not None:
            lines.append(f"In the last evaluation, {self._at_bound}")
        return lines

    def on_iteration(self, row: dict[str, float]) -> None:
        """Begin an evaluation if one is due; report those that are over."""
        if row is self._row:  # a row of its own
            return
        number = int(row["iteration"])
        steps = int(row["global_step"])
        every = self._config.eval_every or 1
        is_last = number >= self._config.iterations
        if is_last or steps // every > self._steps // every:
            self._begin(number, steps, self._learner.snapshot())
            self._begun = True
        self._steps = steps
        self._row = row
        results = self._over(wait=is_last or self._config.num_actors == 0)
        if results:
            self._report(results[:-1])
            row |= results[-1]
        self._row = row

    def finish(self) -> bool:
        """Wait for the evaluations that are not over, unless a signal has arrived; return whether there were any."""
        waiting = bool(self._open)
        self._report(self._over(wait=True))
        return waiting

    def _load(self, state: Any) -> None:
        try:
            score, number, steps = state["best"] or (None, 0, 0)
            if score is not None:
                self._best.result = (float(score), int(number), int(steps))
            waiting = [(int(number), int(steps)) for number, steps in state["open"][-MAX_REPEATED:]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{self._path}: its evaluations cannot be read ({error!r})."
            ) from None
        for number, steps in waiting:
            path = self._path / CHECKPOINTS / checkpoints.file_name(number)
            try:
                self._begin(
                    number, steps, self._learner.policy_in(checkpoints.load(path).arrays, number)
                )
            except (CheckpointError, KeyError, ValueError) as error:
                logger.warning("the evaluation after %s steps is left out: %s", f"{steps:,}", error)

    def _begin(self, number: int, steps: int, policy: PolicySnapshot) -> None:
        self._open[number] = _Evaluation(steps)
        self._players.begin(number, policy)
        if len(self._open) == MANY:
            logger.warning(
                "%d evaluations are waiting: use more eval_actors, or a larger eval_every", MANY
            )

    def _report(self, results: list[dict[str, float]]) -> None:
        """Write a row of its own for each result: the rest of the present row, with these metrics."""
        for result in results:
            training = {
                name: value for name, value in self._row.items() if not name.startswith("eval/")
            }
            self._row = training | result
            # also after a stop: this writes the row
            stopped_by = self._observers.iteration(self._row)
            self.stopped_by = self.stopped_by or stopped_by

    def _over(self, *, wait: bool) -> list[dict[str, float]]:
        """Return the results of the evaluations that are over, in their order; log a wait that is long."""
        began = time.monotonic()
        results: list[dict[str, float]] = []
        try:
            with suppress(StopRequested):  # what is not over is repeated when the run is resumed
                if wait:
                    self._wait_for_all(results, began)
                else:
                    while self._take_in(self._players.outcomes(0.0), results):
                        pass
        except ClusterError as error:  # Ray is gone, and the run has ended
            logger.warning("evaluation after %s is left out: %s", self._describe_open(), error)
            self._open.clear()
        if wait:
            self._waited_s += time.monotonic() - began
        return results

    def _wait_for_all(self, results: list[dict[str, float]], began: float) -> None:
        say_s = SAY_S
        while self._open:
            self._stop.check()
            outcomes = self._players.outcomes(WAIT_S)
            if time.monotonic() - began > say_s:
                say_s *= 5
                logger.info(WAITING, self._describe_open(), self._config.eval_timeout_s)
            self._take_in(outcomes, results)

    def _take_in(self, outcomes: list[Outcome], results: list[dict[str, float]]) -> bool:
        """Add the results of evaluations that these episodes end; return whether there may be more outcomes."""
        for number, episode, outcome in outcomes:
            if number in self._open and self._is_last(number, episode, outcome):
                evaluation = self._open.pop(number)
                results.append(self._result(number, evaluation) | self._share_at_bound(evaluation))
        return bool(outcomes) and bool(self._open)

    def _describe_open(self) -> str:
        episodes = self._config.eval_episodes
        return ", ".join(
            f"{evaluation.global_step:,} steps ({len(evaluation.played)} of {episodes} episodes)"
            for evaluation in self._open.values()
        )

    def _is_last(self, number: int, episode: int, outcome: Episode | DppoError) -> bool:
        """Take in the result of an episode; return whether there will be no others of this evaluation."""
        if isinstance(outcome, ConfigError):
            raise outcome
        evaluation = self._open[number]
        evaluation.played[episode] = outcome if isinstance(outcome, Episode) else None
        missing = self._config.eval_episodes - len(evaluation.played)
        is_given_up = isinstance(outcome, ClusterError)
        if not isinstance(outcome, Episode):
            left_out = f"episode {episode} is left out"
            if is_given_up and missing:
                left_out += f", and so are {missing} others"
            self._report_fault(evaluation, left_out, outcome)
        return is_given_up or not missing

    def _report_fault(self, evaluation: _Evaluation, left_out: str, error: DppoError) -> None:
        if (
            isinstance(error, EnvironmentFault)
            and error.in_constructor
            and self._config.num_actors == 0
        ):
            elsewhere = as_setting_and_flag("num_actors", 1)
            error.message += (
                f". The samplers have others in this process; {elsewhere} evaluates in another one"
            )
        text = f"evaluation after {evaluation.global_step:,} steps: {left_out}: {error}"
        self._faults += 1
        if self._faults <= MAX_LOGGED_FAULTS:
            logger.warning("%s", text.partition("\n")[0])
        fault = Incident(IncidentKind.EVALUATION_FAULT, text)
        self._learner.count(fault)
        for observer in self._observers:
            observer.on_incident(fault)

    def _result(self, number: int, evaluation: _Evaluation) -> dict[str, float]:
        """Return the metrics of an evaluation that is over; note whether it is the best."""
        episodes = evaluation.episodes()
        row: dict[str, float] = {
            "eval/iteration": number,
            "eval/global_step": evaluation.global_step,
            "eval/episodes": len(episodes),
            "eval/s": time.monotonic() - evaluation.began,
        }
        if not episodes:
            return row
        row |= _metrics(episodes, self._config.info_keys)
        if number not in self._unsaved:
            self._best.add((row["eval/episodic_return"], number, evaluation.global_step))
        return row

    def _share_at_bound(self, evaluation: _Evaluation) -> dict[str, float]:
        """Return the metric of actions at a bound, if the policy was greedy with continuous actions; log the first."""
        most = most_at_bound(self._actions, evaluation.episodes())
        if most is None or not any(boxes(self._actions)):
            return {}
        is_first = self._at_bound is None
        self._at_bound = most if most.share >= NAMED else None
        if is_first and self._at_bound is not None:
            logger.warning("evaluation after %s steps: %s", f"{evaluation.global_step:,}", most)
        return {"eval/at_bound_frac": most.share}


def _metrics(episodes: list[Episode], info_keys: tuple[str, ...]) -> dict[str, float]:
    returns = [episode.episode_return for episode in episodes]
    row = {
        "eval/episodic_return": fmean(returns),
        "eval/return_std": pstdev(returns),
        "eval/return_min": min(returns),
        "eval/return_max": max(returns),
        "eval/episodic_length": fmean(episode.length for episode in episodes),
    }
    for key in info_keys:
        infos = [episode.measured[key] for episode in episodes if key in episode.measured]
        if infos:
            row[f"eval/info/{key}_sum"] = fmean(info.total for info in infos)
            row[f"eval/info/{key}"] = fmean(info.mean for info in infos)
            row[f"eval/info/{key}_last"] = fmean(info.last for info in infos)
    successes = [episode.success for episode in episodes if episode.success is not None]
    if successes:
        row["eval/success_rate"] = fmean(successes)
    return row


def chosen_of(state: Any) -> checkpoints.Chosen | None:
    """Return the checkpoints to keep for evaluations, whose `state` is in the last one; None if there are none."""
    try:
        if not state:
            return None
        score, best, _ = state["best"] or (None, None, None)
        return {number: None for number, _ in state["open"]} | (
            {} if best is None else {best: score}
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the evaluations of the checkpoint cannot be read ({error!r})."
        ) from None
