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
from dppo.errors import CheckpointError, ClusterError, ConfigError, DppoError, EnvironmentFault, counted
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

WAIT_S, SAY_S = 0.5, 10.0  # longest single wait for actors at the end of a run; of all, until it is said, and again
WAITING = "waiting for the evaluation after %s; an episode may take eval_timeout_s=%g."
SAID, MANY, MOST = 3, 10, 100  # faults that are logged one by one; evaluations at a time; those that are repeated


class InProcessPlayers:
    """Plays the episodes of evaluations here, as `ActorPlayers` does on actors: one each time that it is asked."""

    def __init__(
        self, player: EpisodePlayer, episodes: int, timeout_s: float, turn: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Keep the arguments; `turn` returns a context in which a signal ends an episode."""
        self._player, self._episodes, self._timeout_s, self._turn = player, episodes, timeout_s, turn
        self._progress = player.progress = ActivityRecord()
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
    """By index; None for an episode that failed."""


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
        self._of: Config = run.config
        self._learner: PPOLearner = run.learner
        self._path: Path = run.path
        self._steps = self._learner.global_step
        self._row: dict[str, float] = {"iteration": self._learner.iteration, "global_step": self._steps}
        if run.rows:
            self._row |= run.rows[-1]
        self._waited_s = 0.0
        self._begun = False  # since the last checkpoint
        self._faults, self._open = 0, dict[int, _Evaluation]()
        self.stopped_by: str | None = None  # the first observer that asked to stop at a row of its own
        self._best: tuple[float, int, int] | None = None  # mean return, iteration and env steps
        self._before: tuple[float, int, int] | None = None  # the best before it
        self._actions = run.actions
        self._at_bound: AtBound | None = None  # in the last evaluation that is over, if often enough to be named
        self._unsaved = set[int]()  # iterations whose checkpoint could not be written
        state = run.resumed_from.get("evaluations")
        if state is not None:
            self._load(state)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds of evaluations: those that are not over, and the best."""
        return {"open": [[number, one.global_step] for number, one in self._open.items()], "best": self._best}

    def not_saved(self, number: int) -> None:
        """Leave out an evaluation whose checkpoint could not be written: that of the best one must exist."""
        self._unsaved.add(number)
        if self._best is not None and self._best[1] == number:
            self._best = self._before

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
        """Return lines for the end of the run."""
        lines = []
        if self._best is not None:
            score, number, steps = self._best
            count = counted(self._of.eval_episodes, "episode")
            lines.append(f"Best evaluation: {score:.1f} in {count}, after {steps:,} steps (iter_{number:06d})")
        if self._at_bound is not None:
            lines.append(f"In the last evaluation, {self._at_bound}")
        return lines

    def on_iteration(self, row: dict[str, float]) -> None:
        """Begin an evaluation if one is due; report those that are over."""
        if row is self._row:  # a row of its own
            return
        number, steps, every = int(row["iteration"]), int(row["global_step"]), self._of.eval_every or 1
        last = number >= self._of.iterations
        if last or steps // every > self._steps // every:
            self._begin(number, steps, self._learner.snapshot())
            self._begun = True
        self._steps, self._row = steps, row
        *others, newest = self._over(wait=last or self._of.num_actors == 0) or [{}]
        self._report(others)
        row |= newest
        self._row = row

    def finish(self) -> bool:
        """Wait for the evaluations that are not over, unless a signal has arrived; return whether there were any."""
        waiting = bool(self._open)
        self._report(self._over(wait=True))
        return waiting

    def _load(self, state: Any) -> None:
        try:
            score, number, steps = state["best"] or (None, 0, 0)
            self._best = None if score is None else (float(score), int(number), int(steps))
            waiting = [(int(number), int(steps)) for number, steps in state["open"][-MOST:]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self._path}: its evaluations cannot be read ({error!r}).") from None
        for number, steps in waiting:
            path = self._path / CHECKPOINTS / checkpoints.file_name(number)
            try:
                self._begin(number, steps, self._learner.policy_in(checkpoints.load(path).arrays, number))
            except (CheckpointError, KeyError, ValueError) as error:
                logger.warning("the evaluation after %s steps is left out: %s", f"{steps:,}", error)

    def _begin(self, number: int, steps: int, policy: PolicySnapshot) -> None:
        self._open[number] = _Evaluation(steps)
        self._players.begin(number, policy)
        if len(self._open) == MANY:
            logger.warning("%d evaluations are waiting: use more eval_actors, or a larger eval_every", MANY)

    def _report(self, results: list[dict[str, float]]) -> None:
        for result in results:
            self._row = {key: value for key, value in self._row.items() if not key.startswith("eval/")} | result
            asked = self._observers.iteration(self._row)  # also after a stop: this writes the row
            self.stopped_by = self.stopped_by or asked

    def _over(self, *, wait: bool) -> list[dict[str, float]]:
        """Return the results of the evaluations that are over, in their order; log a wait that is long."""
        began, found, say_s = time.monotonic(), list[dict[str, float]](), SAY_S
        try:
            with suppress(StopRequested):  # what is not over is repeated when the run is resumed
                while self._open:
                    if wait:
                        self._stop.check()
                    outcomes = self._players.outcomes(WAIT_S if wait else 0.0)
                    if wait and time.monotonic() - began > say_s:
                        say_s *= 5
                        limit_s = self._of.eval_timeout_s
                        logger.info(
                            f"{WAITING} Ctrl-C ends the run now; --resume plays it again", self._where(), limit_s
                        )
                    for number, episode, outcome in outcomes:
                        if number in self._open and self._is_last(number, episode, outcome):
                            evaluation = self._open.pop(number)
                            found.append(self._result(number, evaluation) | self._share_at_bound(evaluation))
                    if not outcomes and not wait:
                        break
        except ClusterError as error:  # Ray is gone, and the run has ended
            logger.warning("evaluation after %s is left out: %s", self._where(), error)
            self._open.clear()
        if wait:
            self._waited_s += time.monotonic() - began
        return found

    def _where(self) -> str:
        played = ((one.global_step, len(one.played)) for one in self._open.values())
        return ", ".join(f"{at:,} steps ({count} of {self._of.eval_episodes} episodes)" for at, count in played)

    def _is_last(self, number: int, episode: int, outcome: Episode | DppoError) -> bool:
        """Take in the result of an episode; return whether there will be no others of this evaluation."""
        if isinstance(outcome, ConfigError):
            raise outcome
        evaluation, whole = self._open[number], self._of.eval_episodes
        evaluation.played[episode] = outcome if isinstance(outcome, Episode) else None
        rest, given_up = whole - len(evaluation.played), isinstance(outcome, ClusterError)
        if not isinstance(outcome, Episode):
            if isinstance(outcome, EnvironmentFault) and outcome.in_constructor and self._of.num_actors == 0:
                elsewhere = as_setting_and_flag("num_actors", 1)
                outcome.message += f". The samplers have others in this process; {elsewhere} evaluates in another one"
            where = f"evaluation after {evaluation.global_step:,} steps: episode {episode} is left out"
            text = f"{where}{f', and so are {rest} others' if given_up and rest else ''}: {outcome}"
            self._faults += 1
            if self._faults <= SAID:
                logger.warning("%s", text.partition("\n")[0])
            self._learner.count(fault := Incident(IncidentKind.EVALUATION_FAULT, text))
            for observer in self._observers:
                observer.on_incident(fault)
        return given_up or not rest

    def _result(self, number: int, evaluation: _Evaluation) -> dict[str, float]:
        """Return the metrics of an evaluation that is over; note whether it is the best."""
        played = [one for _, one in sorted(evaluation.played.items()) if one is not None]
        row: dict[str, float] = {"eval/iteration": number, "eval/global_step": evaluation.global_step}
        row |= {"eval/episodes": len(played), "eval/s": time.monotonic() - evaluation.began}
        if not played:
            return row
        returns = [one.episode_return for one in played]
        row |= {"eval/episodic_return": fmean(returns), "eval/return_std": pstdev(returns)}
        row |= {"eval/return_min": min(returns), "eval/return_max": max(returns)}
        row["eval/episodic_length"] = fmean(one.length for one in played)
        for key in self._of.info_keys:
            if infos := [one.measured[key] for one in played if key in one.measured]:
                row[f"eval/info/{key}_sum"] = fmean(info.total for info in infos)
                row[f"eval/info/{key}"] = fmean(info.mean for info in infos)
                row[f"eval/info/{key}_last"] = fmean(info.last for info in infos)
        if successes := [one.success for one in played if one.success is not None]:
            row["eval/success_rate"] = fmean(successes)
        found, best = (row["eval/episodic_return"], number, evaluation.global_step), self._best
        # Of equal ones the earlier is the best, whichever has ended first.
        if number not in self._unsaved and (best is None or (found[0], -number) > (best[0], -best[1])):
            self._before, self._best = best, found
        return row

    def _share_at_bound(self, evaluation: _Evaluation) -> dict[str, float]:
        """Return the metric of actions at a bound, if the policy was greedy and has real-valued ones; log the first."""
        episodes = [episode for episode in evaluation.played.values() if episode is not None]
        most = most_at_bound(self._actions, episodes)
        if most is None or not any(boxes(self._actions)):
            return {}
        is_first = self._at_bound is None
        self._at_bound = most if most.share >= NAMED else None
        if is_first and self._at_bound is not None:
            logger.warning("evaluation after %s steps: %s", f"{evaluation.global_step:,}", most)
        return {"eval/at_bound_frac": most.share}


def chosen_of(state: Any) -> checkpoints.Chosen | None:
    """Return the checkpoints to keep for evaluations, whose `state` is in the last one; None if there are none."""
    try:
        if not state:
            return None
        score, best, _ = state["best"] or (None, None, None)
        return {number: None for number, _ in state["open"]} | ({} if best is None else {best: score})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"the evaluations of the checkpoint cannot be read ({error!r}).") from None
