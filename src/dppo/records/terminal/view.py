"""View: the state of a run that displays show."""

import math
import time
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple

from dppo.ppo.exchange.records import CollectionProgress, Episode
from dppo.records.bottleneck import longest_usual
from dppo.records.metrics.reading import Row, missing_steps
from dppo.records.observer import RunInfo
from dppo.records.terminal.figures import duration

# parts of the time of an iteration, as in the metric perf/env_frac
PHASES = ("env", "act", "wait", "transfer", "update", "other")
RECENT = 32  # iterations from which the time left follows


class ControllerReturns(NamedTuple):
    """Episodes that a controller has begun in place of the policy."""

    episodes: int = 0
    mean_return: float = math.nan

    def plus(self, episode: Episode) -> "ControllerReturns":
        count = self.episodes + 1
        mean = self.mean_return if self.episodes else 0.0
        return ControllerReturns(count, mean + (episode.episode_return - mean) / count)


@dataclass
class View:
    """The state of a run. One thread writes it and another may show it, so fields are replaced as a whole."""

    title: str = ""
    total_steps: int = 0
    batch_size: int = 0  # env steps of one iteration
    actors: int = 0  # the most that the run may have; 0: it collects in this process
    prior_iterations: int = 0  # first iterations, in which a controller acts
    scales_rewards: bool = False  # as in the settings
    called_at: float = 0.0  # time of the call of `train`
    began: float = 0.0  # time at which the first iteration could begin
    row: Row = field(default_factory=dict)  # metrics of the last finished iteration
    row_at: float = 0.0
    evaluation: Row = field(default_factory=dict)  # the row with the last evaluation
    paces: "deque[float]" = field(default_factory=lambda: deque(maxlen=RECENT))
    """Seconds per env step in each of the last iterations; the first one of this call makes the environments."""
    trains: bool = True  # whether the policy learns in the iterations now
    environments: int = 0  # of all samplers
    num_made: int = 0  # environments that exist, as last reported
    busy_processes: int = 0  # processes that work on the present iteration, as last reported
    progress: CollectionProgress | None = None  # progress within a long iteration
    first_progress: CollectionProgress | None = None
    """The first report of that iteration since all actors have made env steps, and none has been lost."""
    process_s: float = 0.0  # time of all processes between these reports
    moved_at: float = 0.0  # time at which `progress` last showed new env steps
    # mean returns after each iteration
    returns: "array[float]" = field(default_factory=lambda: array("d"))
    controller: ControllerReturns = field(default_factory=ControllerReturns)
    finished: bool = False

    def start(self, run: RunInfo) -> None:
        """Set the title, the sizes and the start time of the run."""
        self.title = run.title
        self.total_steps = run.total_steps
        self.batch_size = run.config.batch_size
        self.actors = run.config.most_actors
        self.environments = run.config.num_samplers * run.config.sampling.envs_of_sampler
        self.prior_iterations = run.config.collected_by_prior
        resumed_at = run.resumed_at or 0
        self.trains = run.config.algo != "sac" and resumed_at >= self.prior_iterations
        self.scales_rewards = run.config.scales_rewards
        self.began = time.monotonic()

    def add_row(self, row: Row) -> None:
        """Set the latest row of metrics, of a finished iteration."""
        now = time.monotonic()
        steps: float = max(1, self.batch_size)
        since = self.began
        if self.row:
            steps = row.get("global_step", 0) - self.row.get("global_step", 0)
            since = self.row_at
        self.trains = self.trains or has_trained(row, self.prior_iterations)
        if self.trains and steps:  # a row without steps has the result of an evaluation
            self.paces.append((now - since) / steps)
        self.row = row
        self.row_at = now
        if "eval/episodes" in row:
            self.evaluation = row
        mean_return = row.get("charts/episodic_return", math.nan)
        if math.isfinite(mean_return):
            self.returns.append(mean_return)

    def add_episode(self, episode: Episode) -> None:
        """Count an episode of the controller, while it acts."""
        if self.controller_acts and episode.explored:
            self.controller = self.controller.plus(episode)

    @property
    def q_name(self) -> str:
        """Name of the values of soft actor-critic, which are not in the unit of returns if rewards are scaled."""
        return "scaled Q" if self.scales_rewards else "Q value"

    @property
    def controller_acts(self) -> bool:
        """True if the last finished iteration, or the first one, is the controller's."""
        return self.row.get("iteration", 0) <= self.prior_iterations > 0

    def add_progress(self, progress: CollectionProgress) -> bool:
        """Set the progress of a long iteration; return whether it has more env steps or environments than before."""
        more_environments = progress.environments > self.num_made
        self.busy_processes = progress.processes
        self.num_made = progress.environments
        last = self.progress
        if last is not None and (
            progress.iteration != last.iteration or progress.steps < last.steps
        ):
            last = None
        if last is None or progress.starting:
            self.first_progress = None
        steps_before = 0 if last is None else last.steps
        if progress.steps == steps_before:
            return more_environments
        if last is not None and self.first_progress is not None:
            between_s = progress.elapsed_s - last.elapsed_s
            self.process_s += (last.processes + progress.processes) / 2 * between_s
        elif not progress.starting:
            self.first_progress = progress
            self.process_s = 0.0
        self.progress = progress
        self.moved_at = time.monotonic()
        return True

    @property
    def environments_made(self) -> str:
        """Return `5 of 8` while the first iteration makes environments; "" where that is over, or not known."""
        if self.row or not 0 < self.num_made < self.environments:
            return ""
        return f"{self.num_made:,} of {self.environments:,}"

    @property
    def steps_per_s(self) -> float:
        """Env steps per second of a long iteration, over all processes; NaN while unknown."""
        first = self.first_progress
        last = self.progress
        if first is None or last is None or last.steps < first.steps + 2 * max(1, last.processes):
            # the time of so few steps depends mostly on resets, and on which process was first
            return math.nan
        return (last.steps - first.steps) / (last.elapsed_s - first.elapsed_s)

    @property
    def step_ms(self) -> float:
        """Milliseconds that an env step of a long iteration takes in one process; NaN while unknown."""
        first = self.first_progress
        last = self.progress
        if first is None or last is None or math.isnan(self.steps_per_s):
            return math.nan
        return 1e3 * self.process_s / (last.steps - first.steps)

    @property
    def current_progress(self) -> CollectionProgress | None:
        """The progress of the present iteration, if it takes long."""
        if self.progress is None or self.progress.iteration <= self.row.get("iteration", 0):
            return None
        return self.progress

    @property
    def steps(self) -> int:
        """Env steps so far."""
        progress = self.current_progress
        if progress is None:
            return int(self.row.get("global_step", 0))
        return progress.global_step - missing_steps(self.row, self.batch_size)

    @property
    def expected_steps(self) -> int:
        """Env steps of the whole run, if no more of them are missing."""
        return self.total_steps - missing_steps(self.row, self.batch_size)

    @property
    def usual_s(self) -> float:
        """Seconds of the usual iteration, infinite while unknown: the last one may have had a stall."""
        return self.batch_size * _usual(self.paces)

    def left(self, now: float) -> str:
        """Return the time left as `1:02`, as `at least 1:02` while the policy does not learn, or as `-`."""
        left_s = self.left_s(now)
        at_least = "at least " if not self.trains and math.isfinite(left_s) else ""
        return f"{at_least}{duration(left_s)}"

    def left_s(self, now: float) -> float:
        """Return the seconds left at the speed of the last iterations; NaN while unknown.

        Until there are two, env steps are expected to go on as in the present one, and updates to take as long. The
        time of making the environments and of resetting them says nothing about the rest. While the policy does not
        learn yet, the env steps alone are known: it is a lower bound. Evaluations on actors may end after the training.
        """
        steps = self.row.get("global_step", 0)
        since = self.row_at
        s_per_step = _usual(self.paces)
        if len(self.paces) < 2:
            present_s = 1 / self.steps_per_s
            present_s += self.row.get("perf/update_s", 0.0) / max(1, self.batch_size)
            s_per_step = min(present_s, s_per_step)  # NaN while `present_s` is
            if not self.row and self.progress is not None:
                steps = self.progress.global_step
                since = self.moved_at
        # of an iteration that is late, no more time than expected is over
        # `min` and `max` return NaN only if NaN is their first argument
        worked_s = min(self.batch_size * s_per_step, now - since)
        training_s = (self.expected_steps - steps) * s_per_step - worked_s
        evaluations_s = self.row.get("time/eval_left_s", 0.0) - (now - self.row_at)
        return max(training_s, evaluations_s, 0.0)


def has_trained(row: Row, prior_iterations: int) -> bool:
    """Return whether the policy learned in an iteration; False if a controller acted, or before `learning_starts`."""
    return row.get("iteration", 0) > prior_iterations and row.get("losses/gradient_steps", 1) > 0


def _usual(paces: Sequence[float]) -> float:
    """Return the mean pace, in which no pace counts for more than the longest that is not due to a stall.

    Slow iterations that recur, such as iterations with an evaluation, count.
    """
    if not paces:
        return math.inf
    limit = longest_usual(paces)
    return fmean(min(pace, limit) for pace in paces)
