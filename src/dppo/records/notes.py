"""LearningNotes: an observer that logs signs that a run does not learn."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dppo.config import Config
from dppo.config.resolve import value_of
from dppo.log import logger
from dppo.records.flat import Score, flat_note
from dppo.records.greedy import greedy_note
from dppo.records.metrics.reading import Row
from dppo.records.observer import Observer
from dppo.spaces.actions import Actions, BoxActions, boxes, continuous_width

PATIENCE = 30  # iterations in a row that must show a sign: a slow start and chance last shorter
ROWS_AT_ONCE = 10  # rows that are examined together
MAX_SCORES = 1000  # scores that are kept of a run, fewer of earlier iterations
# steps of each environment in which no episode has ended, before a note
MIN_STEPS_WITHOUT_END = 1000
MIN_EPISODES = 50  # finished episodes before a mean return counts
RISE = 0.2  # rise of the mean return relative to its size: more than the noise of MIN_EPISODES episodes
# nats. Usual are 1e-3 to 2e-2, and a hundredth of these values at a tenth of the learning rate.
MIN_KL = 1e-6
ANNEALED = 0.1  # below this share of the first learning rate, small changes are intended
CERTAIN = 0.01  # share of the first entropy: the less likely of two choices then has a probability of 0.0006
NARROW_STD = 0.01  # standard deviation of continuous actions, which starts at 1; useful ones are rarely below 0.05
MIN_ENTROPY_FALL = 2.0  # nats for each component of a continuous action
FALLEN = 0.5  # share of the rise of the mean return that is lost again
UNEXPLAINED = 0.05  # explained variance; useful value estimates reach 0.3 and more
EQUAL = 1e-9  # relative spread of returns below which they count as equal
# A value head moves by about 0.02 in an SGD step, so values of hundreds take thousands: Acrobot's -100 are learned,
# LunarLander's 200 and Pendulum's 600 are learned better normalized. Small ones drown in the noise of untrained values.
MAX_RETURN = 150.0
MIN_RETURN = 1e-3

NOTES = {
    "endless": "no episode has ended in {steps:,} steps of each environment, so there is no return to judge by, and an "
    "evaluation would not end. Return truncated=True at a time limit, as gymnasium.wrappers.TimeLimit does",
    "still": "the policy hardly changes: approx_kl is {kl:.1g}. Raise learning_rate ({row[charts/learning_rate]:.2g} "
    "now) or update_epochs, and check that actions affect rewards",
    "certain": "the policy has become deterministic, and returns have not risen: its entropy fell from {first:.3g} to "
    "{row[losses/entropy]:.3g}. Raise ent_coef ({bonus:g} now), or lower learning_rate",
    "unexplained": "the value estimates do not explain the returns: explained_variance is "
    "{row[losses/explained_variance]:.2g}. Use norm_obs and norm_reward if they are off, otherwise more update_epochs, "
    "or memory",
    "constant": "all returns are {row[charts/episodic_return]:g} in {row[global_step]:,} env steps "
    "({row[charts/episodes]:,} episodes): there is nothing to learn from. Reward progress on the way, or explore more "
    "({explore})",
    "scale": "discounted returns are about {size:.3g}, and value networks learn best from numbers of about 1. Use "
    "norm_reward=True (--norm-reward)",
    "fallen": "the mean return has fallen from {best:.4g}, after {at:,} env steps, to "
    "{row[charts/episodic_return]:.4g}. If it does not recover, batches may be too small: begin again, from "
    "scratch or from an earlier checkpoint (init_from), with more num_steps ({config.num_steps} now) or a lower "
    "learning_rate ({row[charts/learning_rate]:.2g} now)",
}


class _Figures(NamedTuple):
    """The metrics of a row by which learning is judged; NaN for a metric that the row lacks."""

    mean_return: float
    return_std: float
    length: float
    episodes: float
    learning_rate: float
    approx_kl: float
    entropy: float
    explained_variance: float


FIGURES = (
    "charts/episodic_return",
    "charts/episodic_return_std",
    "charts/episodic_length",
    "charts/episodes",
    "charts/learning_rate",
    "losses/approx_kl",
    "losses/entropy",
    "losses/explained_variance",
)
"""The metrics of `_Figures`, in its order."""


class LearningNotes(Observer):
    """Logs, once each, signs that a run does not learn or has lost half of the rise of its mean return.

    After the mean return has risen, only its fall counts: a solved task also has small updates, a deterministic policy
    and a low explained variance.
    """

    def __init__(
        self,
        config: Config,
        actions: Actions | None,
        rows: Iterable[Row] = (),
        solved_at: float | None = None,
    ) -> None:
        """Start after the earlier `rows` of a resumed run; notes that were due there are not repeated.

        `actions` are None if they are not known. `solved_at` is the mean return from which on the task counts as
        solved, if it is known.
        """
        self.action_dims = 1  # a guess
        if actions is not None:
            self.action_dims = continuous_width(actions)
        self._config = config
        self._actions = actions
        self._solved_at = solved_at
        self._scores: list[Score] = []
        self._evaluations: list[Score] = []
        self._certainty = _Certainty(actions)
        is_ppo = config.algo == "ppo"
        self._entropy_weight = 0.0
        if is_ppo:
            self._entropy_weight = value_of("ent_coef", config, self.action_dims)
        self._explore = "ent_coef" if is_ppo else "noise=wide"
        self._first_entropy = math.nan
        self._first_return = math.nan  # mean return once there are MIN_EPISODES
        self._lowest_return = math.inf
        self._highest_return = -math.inf
        self._best_return = -math.inf  # highest mean return of at least MIN_EPISODES
        self._best_step = 0  # env steps at the best return
        self._iteration = math.nan
        self._times_in_a_row = Counter[str]()
        self._reported = set[str]()
        self._unread: list[Row] = []
        for row in rows:
            self.follow(row)

    def on_iteration(self, row: Row) -> None:
        """Read the rows of ten iterations together: a sign lasts for many."""
        self._unread.append(row)
        if len(self._unread) == ROWS_AT_ONCE:
            self._log_notes()

    def _log_notes(self) -> None:
        """Log the notes that are due after the rows that have not been read."""
        for row in self._unread:
            for note in self.follow(row):
                logger.warning("%s", note)
        self._unread.clear()

    def closing_notes(self) -> list[str]:
        """Return notes on the last third of the run: flat returns, or worse ones without noise; read the last rows."""
        self._log_notes()
        flat = flat_note(
            self._scores, self._config, self._actions, self._solved_at, self._evaluations
        )
        greedy = greedy_note(self._scores, self._config, self._evaluations)
        return [note for note in (flat, greedy) if note is not None]

    def follow(self, row: Row) -> list[str]:
        """Take in `row`, the next one of the run; return the notes that are due after it."""
        _keep(Score.from_evaluation(row), self._evaluations)
        # a second row of an iteration adds an evaluation, and repeats the figures of training
        if row["iteration"] == self._iteration:
            return []
        self._iteration = row["iteration"]
        figures = _Figures(*(row.get(name, math.nan) for name in FIGURES))
        self._track(figures, row)
        self._times_in_a_row = Counter(
            {sign: self._times_in_a_row[sign] + 1 for sign in self._signs(figures)}
        )
        # this sign has lasted since the first row
        if not figures.episodes and self._steps_of_each_env(row) >= MIN_STEPS_WITHOUT_END:
            self._times_in_a_row["endless"] = PATIENCE
        due = [
            sign
            for sign, times in self._times_in_a_row.items()
            if times >= PATIENCE and sign not in self._reported
        ]
        self._reported.update(due)
        return [self._text(sign, figures, row) for sign in due]

    def _steps_of_each_env(self, row: Row) -> int:
        num_envs = self._config.num_samplers * self._config.envs_per_sampler
        return int(row["global_step"]) // num_envs

    def _text(self, sign: str, figures: _Figures, row: Row) -> str:
        facts = {
            "row": row,
            "config": self._config,
            "steps": self._steps_of_each_env(row),
            "kl": abs(figures.approx_kl),
            "first": self._first_entropy,
            "bonus": self._entropy_weight,
            "explore": self._explore,
            "size": self._discounted_return(figures),
            "best": self._best_return,
            "at": self._best_step,
        }
        return NOTES[sign].format(**facts)

    def _track(self, figures: _Figures, row: Row) -> None:
        """Update the first, lowest, highest and best figures so far."""
        _keep(Score.from_row(row), self._scores)
        mean_return = figures.mean_return
        if math.isnan(self._first_entropy):
            self._first_entropy = figures.entropy
        self._lowest_return = min(self._lowest_return, mean_return)
        self._highest_return = max(self._highest_return, mean_return)
        if figures.episodes >= MIN_EPISODES:
            if math.isnan(self._first_return):
                self._first_return = mean_return
            if mean_return > self._best_return:
                self._best_return = mean_return
                self._best_step = int(row["global_step"])

    def _signs(self, figures: _Figures) -> Iterator[str]:
        """Yield the names of the notes whose condition these figures meet; NaN meets none."""
        mean_return = figures.mean_return
        return_scale = max(abs(mean_return), abs(self._first_return))
        has_risen = mean_return - self._first_return > RISE * return_scale
        if not has_risen:
            min_rate = ANNEALED * self._config.learning_rate
            if abs(figures.approx_kl) < MIN_KL and figures.learning_rate >= min_rate:
                yield "still"
            is_certain = self._certainty.reached(figures.entropy, self._first_entropy)
            if is_certain and self._config.algo == "ppo":
                yield "certain"
            if figures.explained_variance < UNEXPLAINED and self._config.vf_coef > 0:
                yield "unexplained"
            spread = max(self._highest_return - self._lowest_return, figures.return_std)
            if figures.episodes >= MIN_EPISODES and spread <= EQUAL * max(1.0, abs(mean_return)):
                yield "constant"
            size = self._discounted_return(figures)
            if not self._config.scales_rewards and (size > MAX_RETURN or 0 < size < MIN_RETURN):
                yield "scale"
        rise = self._best_return - self._first_return
        best_scale = max(abs(self._best_return), abs(self._first_return))
        had_risen = rise > RISE * best_scale
        if had_risen and self._best_return - mean_return > FALLEN * rise:
            yield "fallen"

    def _discounted_return(self, figures: _Figures) -> float:
        """Estimate the size of discounted returns, as if all rewards of an episode were equal."""
        # the discount horizon, 1 / (1 - gamma) steps, as a share of the episode; 1e-9 avoids a division by zero
        horizon_share = 1 / max(1e-9, (1 - self._config.gamma) * figures.length)
        return abs(figures.mean_return) * min(1.0, horizon_share)


def _keep(score: Score | None, scores: list[Score]) -> None:
    """Add a score, if there is one, and thin out the list if it gets long."""
    if score is not None:
        scores.append(score)
    if len(scores) > MAX_SCORES:
        del scores[1::2]


class _Certainty:
    """The entropy below which a policy is as good as deterministic."""

    def __init__(self, actions: Actions | None) -> None:
        self._share_of_first = CERTAIN
        self._offset = 0.0
        self._min_fall = 0.0
        if isinstance(actions, BoxActions):
            # The entropy of a Gaussian with NARROW_STD. A policy may start narrow, or wide before it is squashed, so
            # its entropy must also have fallen.
            self._share_of_first = 0.0
            self._offset = actions.width * 0.5 * math.log(2 * math.pi * math.e * NARROW_STD**2)
            self._min_fall = MIN_ENTROPY_FALL * actions.width
        elif actions is None or any(boxes(actions)):
            # Unknown actions, or discrete and continuous ones: no threshold is known, and nothing is below NaN.
            self._share_of_first = math.nan

    def reached(self, entropy: float, first_entropy: float) -> bool:
        threshold = self._offset + self._share_of_first * first_entropy
        return entropy < min(threshold, first_entropy - self._min_fall)
