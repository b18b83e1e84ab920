"""Differences of returns and their intervals, against hand-worked numbers and printed tables."""

from __future__ import annotations

import math
from typing import Any

import pytest

from dppo.records.differences import Difference, paired_difference, t_quantile, unpaired_difference

PRINTED = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 9: 2.262, 19: 2.093, 30: 2.042, 120: 1.980}
"""t(0.975) by degrees of freedom, as tables print it."""


def about(mean: float, margin: float, episodes: int, *, paired: bool) -> Difference:
    low: Any = pytest.approx(mean - margin, abs=1e-6)
    high: Any = pytest.approx(mean + margin, abs=1e-6)
    return Difference(mean, low, high, episodes, paired=paired)


@pytest.mark.proves("t_quantile")
@pytest.mark.parametrize(("degrees", "printed"), PRINTED.items())
def test_quantiles_are_those_of_printed_tables(degrees: int, printed: float) -> None:
    assert round(t_quantile(degrees), 3) == printed


@pytest.mark.proves("t_quantile")
def test_two_degrees_of_freedom_have_a_closed_form() -> None:
    # P(|t| < x) = x / sqrt(x^2 + 2)
    expected = 0.95 * math.sqrt(2 / (1 - 0.95**2))
    assert t_quantile(2) == pytest.approx(expected, rel=1e-12)
    assert t_quantile(10**6) == t_quantile(1000)


@pytest.mark.proves("paired_difference")
def test_a_paired_interval_is_that_of_the_differences() -> None:
    # differences 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, variance 14 / 3, standard error sqrt(14 / 12)
    policy = {0: 11.0, 1: 102.0, 2: -7.0, 3: 6.0}
    baseline = {0: 10.0, 1: 100.0, 2: -10.0, 3: 0.0}
    difference = paired_difference(policy, baseline)
    assert difference is not None
    margin = 3.1824463 * math.sqrt(14 / 12)
    assert difference == about(3.0, margin, 4, paired=True)
    assert not difference.is_improvement


@pytest.mark.proves("paired_difference")
def test_only_episodes_that_both_have_played_are_compared() -> None:
    policy = {0: 5.0, 2: 7.0, 3: 100.0}
    baseline = {0: 1.0, 1: -100.0, 2: 3.0}
    difference = paired_difference(policy, baseline)
    assert difference == Difference(4.0, 4.0, 4.0, 2, paired=True)
    assert difference.is_improvement  # both differences are equal
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_a_single_episode_has_no_interval() -> None:
    difference = paired_difference({0: 5.0}, {0: 1.0})
    assert difference == Difference(4.0, -math.inf, math.inf, 1, paired=True)
    assert not difference.is_improvement
    assert "too few episodes" in str(difference)


@pytest.mark.proves("unpaired_difference")
def test_an_unpaired_interval_is_that_of_welch() -> None:
    # means 4 and 2; variances 4 / 3 over 3 and 2 over 2: a = 4 / 3, b = 1
    # degrees: (7 / 3)^2 / ((4 / 3)^2 / 2 + 1) = 49 / 17 = 2.88, rounded down to 2
    difference = unpaired_difference([2.0, 4.0, 6.0], [1.0, 3.0])
    assert difference is not None
    margin = 4.3026527 * math.sqrt(7 / 3)
    assert difference == about(2.0, margin, 2, paired=False)
    assert "Welch" in str(difference)
    assert unpaired_difference([], [1.0]) is None


def test_an_unpaired_interval_of_constant_returns_is_a_point() -> None:
    difference = unpaired_difference([3.0, 3.0], [1.0, 1.0])
    assert difference == Difference(2.0, 2.0, 2.0, 2, paired=False)


@pytest.mark.parametrize(
    ("difference", "words", "verdict"),
    [
        (
            Difference(0.012, 0.004, 0.02, 20, paired=True),
            "+0.012 (95 % interval +0.004 to +0.020, 20 pairs of episodes)",
            "better",
        ),
        (
            Difference(-3.7, -4.1, -3.4, 20, paired=False),
            "-3.70 (95 % interval -4.10 to -3.40, 20 episodes each, unpaired (Welch))",
            "worse",
        ),
        (
            Difference(1.0, -math.inf, math.inf, 1, paired=True),
            "+1.00 (too few episodes for an interval)",
            "not clearly different",
        ),
    ],
)
def test_a_difference_is_read_back_from_its_metrics_and_shown_with_the_digits_that_it_needs(
    difference: Difference, words: str, verdict: str
) -> None:
    row = difference.as_metrics() | {"eval/episodes": 20}
    assert Difference.from_row(row) == difference
    assert str(difference) == words
    assert difference.verdict == verdict
    assert Difference.from_row({"eval/episodes": 20}) is None
