"""Notes about a run that does not learn: each once in a run, in one line, with a remedy."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping

from dppo.config import Config
from dppo.log import logger
from dppo.records.observer import Observer
from dppo.spaces.actions import Actions, BoxActions, boxes

ITERATIONS = 30  # in a row; a slow start and chance are shorter
FEW = 50  # episodes, for a first mean return
RISE = 0.2  # of the mean return, relative to its size: more than the noise of so many episodes
STILL_KL = 1e-6  # nats; usual are 1e-3 to 2e-2, and a hundredth of these at a tenth of the learning rate
ANNEALED = 0.1  # below this share of the first learning rate, small changes are intended
CERTAIN = 0.01  # share of the first entropy: the less likely of two choices then has a probability of 0.0006
NARROW_STD = 0.01  # of real-valued actions, which starts at 1; useful ones are rarely below 0.05
UNEXPLAINED = 0.05  # explained variance; values that help reach 0.3 and more
# A value head moves by about 0.02 in an SGD step, so values of hundreds take thousands: Acrobot's -100 are learned,
# LunarLander's 200 and Pendulum's 600 are learned better normalized. Small ones drown in the noise of untrained values.
LARGE, SMALL = 150.0, 1e-3

NOTES = {
    "still": "the policy hardly changes: approx_kl is {kl:.1g}. Raise learning_rate ({rate:.2g} now) or update_epochs, "
    "and check that actions affect rewards",
    "certain": "the policy has become deterministic, and returns have not risen: its entropy fell from {first:.3g} to "
    "{entropy:.3g}. Raise ent_coef ({ent_coef:g} now), or lower learning_rate",
    "unexplained": "the values explain nothing of the returns: explained_variance is {explained:.2g}. Use norm_obs and "
    "norm_reward if they are off, else more update_epochs, or memory",
    "constant": "no return other than {mean:g} in {steps:,} env steps ({episodes:,} episodes): there is nothing to "
    "learn from. Reward progress on the way, or explore more (ent_coef)",
    "scale": "discounted returns are about {size:.3g}, and values learn best from numbers of about 1. Use "
    "norm_reward=True (--norm-reward)",
}


class LearningNotes(Observer):
    """Logs what speaks against a run whose mean return has not risen. Reads rows of metrics only, and changes nothing.

    In a run that has got better, small changes, a certain policy and poor values may be those of a solved task.
    """

    def __init__(self, config: Config, actions: Actions, rows: Iterable[Mapping[str, float]] = ()) -> None:
        """Begin after the earlier `rows` of a run that is resumed, whose notes are not repeated."""
        self._config, self._actions = config, actions
        self._entropy = self._first = math.nan  # of the first row; the mean return of the first few episodes
        self._lowest, self._highest = math.inf, -math.inf  # mean return so far
        self._in_a_row, self._given = Counter[str](), set[str]()
        for row in rows:
            self.notes(row)

    def on_iteration(self, row: dict[str, float]) -> None:
        """Log the notes that are due after this row."""
        for note in self.notes(row):
            logger.warning("%s", note)

    def notes(self, row: Mapping[str, float]) -> list[str]:
        """Return the notes that are due after `row`, the next one of the run."""
        of, charts = self._config, ("episodic_return", "episodic_length", "episodes", "learning_rate")
        mean, length, episodes, rate = (row.get(f"charts/{name}", math.nan) for name in charts)
        losses = ("approx_kl", "entropy", "explained_variance")
        kl, entropy, explained = (row.get(f"losses/{name}", math.nan) for name in losses)
        self._entropy = first = entropy if math.isnan(self._entropy) else self._entropy
        if math.isnan(self._first) and episodes >= FEW:
            self._first = mean
        self._lowest, self._highest = min(self._lowest, mean), max(self._highest, mean)
        size = abs(mean) * min(1.0, 1 / max(1e-9, (1 - of.gamma) * length))
        scaled = of.norm_reward or of.norm_value or of.sign_reward or of.clip_reward or of.scale_reward != 1
        signs = {
            "still": abs(kl) < STILL_KL and rate >= ANNEALED * of.learning_rate,
            "certain": self._is_certain(entropy),
            "unexplained": explained < UNEXPLAINED and of.vf_coef > 0,
            "constant": self._highest - self._lowest <= 1e-9 * max(1.0, abs(mean)) and episodes >= FEW,
            "scale": not scaled and (size > LARGE or 0 < size < SMALL),
        }
        risen = mean - self._first > RISE * max(abs(mean), abs(self._first))
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name, seen in signs.items() if seen and not risen})
        due = [name for name, times in self._in_a_row.items() if times >= ITERATIONS and name not in self._given]
        self._given.update(due)
        facts = {"kl": abs(kl), "rate": rate, "first": first, "entropy": entropy, "explained": explained, "mean": mean}
        facts |= {"steps": row.get("global_step", 0), "episodes": episodes, "size": size, "ent_coef": of.ent_coef}
        return [NOTES[name].format(**facts) for name in due]

    def _is_certain(self, entropy: float) -> bool:
        """Return whether nearly all actions are the likeliest; False for choices and real numbers side by side."""
        if isinstance(self._actions, BoxActions):
            return entropy < self._actions.width * 0.5 * math.log(2 * math.pi * math.e * NARROW_STD**2)
        return entropy < CERTAIN * self._entropy and not any(boxes(self._actions))
