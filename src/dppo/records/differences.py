"""The difference between the returns of two controllers, with a 95 % interval."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any, Literal

from dppo.records.metrics.reading import Row
from dppo.records.terminal.figures import signed

CONFIDENCE = 0.95
MIN_EPISODES = 2  # fewest episodes for an interval
FEW_EPISODES = 10  # with fewer, an interval depends on the assumption that differences are normal
MAX_DEGREES = 1000  # degrees of freedom; more make an interval at most 0.2 % narrower
HALVINGS = 60  # bisections after which an angle is exact to the last bits


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two controllers' mean returns, with its 95 % interval."""

    mean: float
    low: float
    """Lower end of the interval; -inf with fewer than two episodes."""
    high: float
    """Upper end of the interval; inf with fewer than two episodes."""
    episodes: float
    """Pairs of episodes; if they are not paired, the smaller number of episodes of the two."""
    paired: bool
    """True if episodes with the same seed were compared; False: Welch's interval of independent episodes."""

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for `from_json`; infinity, which JSON does not have, becomes None."""
        values = asdict(self)
        return values | {
            "low": self.low if math.isfinite(self.low) else None,
            "high": self.high if math.isfinite(self.high) else None,
        }

    @classmethod
    def from_json(cls, stored: Any) -> Difference:
        """Return what `as_json` has stored; raise KeyError, TypeError or ValueError for anything else."""
        return cls(
            mean=float(stored["mean"]),
            low=-math.inf if stored["low"] is None else float(stored["low"]),
            high=math.inf if stored["high"] is None else float(stored["high"]),
            episodes=int(stored["episodes"]),
            paired=bool(stored["paired"]),
        )

    @classmethod
    def from_row(cls, row: Row) -> Difference | None:
        """Return the difference in the row of an evaluation; None if it was not compared with a baseline."""
        if "eval/baseline_difference" not in row:
            return None
        pairs = row.get("eval/baseline_pairs", 0)
        return cls(
            mean=row["eval/baseline_difference"],
            low=row.get("eval/baseline_difference_low", -math.inf),
            high=row.get("eval/baseline_difference_high", math.inf),
            episodes=pairs or row.get("eval/episodes", 0),
            paired=pairs > 0,
        )

    def as_metrics(self) -> Row:
        """Return the metrics that the row of an evaluation has for `from_row`; without an interval, no ends of it."""
        row = {"eval/baseline_difference": self.mean}
        if math.isfinite(self.low):
            row["eval/baseline_difference_low"] = self.low
            row["eval/baseline_difference_high"] = self.high
        row["eval/baseline_pairs"] = self.episodes if self.paired else 0
        return row

    @property
    def is_improvement(self) -> bool:
        """True if the whole interval is above zero."""
        return self.low > 0

    @property
    def verdict(self) -> Literal["better", "worse", "not clearly different"]:
        """Return whether the interval is above zero, below zero, or contains zero, in words about the policy."""
        if self.is_improvement:
            return "better"
        if self.high < 0:
            return "worse"
        return "not clearly different"

    @property
    def interval(self) -> str:
        """Return the ends of the interval as `+4.10 to +9.10`; "" if there are too few episodes for one."""
        if not math.isfinite(self.low):
            return ""
        return f"{signed(self.low)} to {signed(self.high)}"

    def __str__(self) -> str:
        """Format as `+6.60 (95 % interval +4.10 to +9.10, 20 pairs of episodes)`."""
        if not self.interval:
            return f"{signed(self.mean)} (too few episodes for an interval)"
        compared = f"{self.episodes:.0f} pairs of episodes"
        if not self.paired:
            compared = f"{self.episodes:.0f} episodes each, unpaired (Welch)"
        return f"{signed(self.mean)} (95 % interval {self.interval}, {compared})"


def paired_difference(
    returns: Mapping[int, float], baseline: Mapping[int, float]
) -> Difference | None:
    """Compare episodes that have the same index, and so the same seed.

        d_i = return_i - baseline_i;  mean(d) +- t(0.975, n - 1) std(d) / sqrt(n)

    The standard deviation is divided by n - 1.

    Source: Student (W. S. Gosset), "The probable error of a mean" (1908); NIST/SEMATECH
    e-Handbook of Statistical Methods, section 7.3.1.1.

    Args:
        returns: by the index of the episode; `baseline` likewise. Episodes that only one of them has are left out.

    Returns:
        The difference; None without a pair.
    """
    differences = [
        returns[episode] - baseline[episode] for episode in sorted(returns.keys() & baseline.keys())
    ]
    if not differences:
        return None
    count = len(differences)
    margin = math.inf
    if count >= MIN_EPISODES:
        margin = t_quantile(count - 1) * stdev(differences) / math.sqrt(count)
    mean = fmean(differences)
    return Difference(mean, mean - margin, mean + margin, count, paired=True)


def unpaired_difference(returns: Sequence[float], baseline: Sequence[float]) -> Difference | None:
    """Compare independent episodes.

        mean(x) - mean(y) +- t(0.975, v) sqrt(a + b)  with  a = var(x) / n, b = var(y) / m

        v = (a + b)^2 / (a^2 / (n - 1) + b^2 / (m - 1)), rounded down

    Source: Welch, "The generalization of Student's problem when several different population variances are involved"
    (1947); NIST/SEMATECH e-Handbook of Statistical Methods, section 7.3.1.

    Returns:
        The difference; None if one of them has no episode.
    """
    if not returns or not baseline:
        return None
    mean = fmean(returns) - fmean(baseline)
    count = min(len(returns), len(baseline))
    margin = math.inf
    if count >= MIN_EPISODES:
        margin = _welch_margin(returns, baseline)
    return Difference(mean, mean - margin, mean + margin, count, paired=False)


def _welch_margin(returns: Sequence[float], baseline: Sequence[float]) -> float:
    error = stdev(returns) ** 2 / len(returns)
    baseline_error = stdev(baseline) ** 2 / len(baseline)
    both_errors = error + baseline_error
    if not both_errors:
        return 0.0
    degrees = both_errors**2 / (
        error**2 / (len(returns) - 1) + baseline_error**2 / (len(baseline) - 1)
    )
    return t_quantile(int(degrees)) * math.sqrt(both_errors)


@cache
def t_quantile(degrees: int) -> float:
    """Return t such that a variable with Student's distribution is within -t and t with the probability CONFIDENCE.

    The probability has a closed form in the angle atan(t / sqrt(degrees)), which is found by halving.

    Source: Abramowitz, Stegun, "Handbook of Mathematical Functions" (1964), 26.7.3 and 26.7.4.
    """
    degrees = max(1, min(degrees, MAX_DEGREES))
    low = 0.0
    high = math.pi / 2
    for _ in range(HALVINGS):
        angle = (low + high) / 2
        if _probability_within(angle, degrees) < CONFIDENCE:
            low = angle
        else:
            high = angle
    return math.sqrt(degrees) * math.tan(low)


def _probability_within(angle: float, degrees: int) -> float:
    """Compute the probability of |t| < sqrt(degrees) tan(angle)."""
    cosine = math.cos(angle)
    is_odd = degrees % 2
    term = cosine if is_odd else 1.0
    total = 0.0
    for power in range(2 + is_odd, degrees + 1, 2):
        total += term
        term *= cosine**2 * (power - 1) / power
    if is_odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
