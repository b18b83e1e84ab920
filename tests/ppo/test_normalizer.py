"""Running statistics: merging parts equals computing them at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from dppo.ppo.exchange.scales import Moments, ObsScale, Statistics, ValueScale


def chunks(seed: int, sizes: list[int], shape: tuple[int, ...] = (3,)) -> list[np.ndarray]:
    """Return samples of these sizes, each with a mean and a deviation of its own."""
    rng = default_rng(seed)
    parts = []
    for size in sizes:
        mean = 10 * rng.normal()
        std = 1 + 5 * rng.random()
        parts.append(rng.normal(mean, std, (size, *shape)))
    return parts


def std_of(samples: np.ndarray) -> np.ndarray:
    _, std = Moments.of(samples).mean_and_std()
    return np.asarray(std)


@pytest.mark.proves("Moments.merge")
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 30), max_size=6))
def test_merging_equals_one_stream(seed: int, sizes: list[int]) -> None:
    parts = chunks(seed, [*sizes, 5])  # a segment may contain no transitions
    merged = Moments.empty((3,))
    for part in parts:
        merged = merged.merge(Moments.of(part))
    mean, std = merged.mean_and_std()

    everything = np.concatenate(parts)
    variance = everything.var(axis=0)
    assert merged.count == len(everything)
    assert_allclose(mean, everything.mean(axis=0), rtol=1e-10, atol=1e-12)
    assert_allclose(std, np.sqrt(variance + 1e-8), rtol=1e-10)


def test_variance_is_accurate_with_a_large_mean() -> None:
    samples = np.concatenate(chunks(1, [1000, 1000], ())) + 1e8
    first = Moments.of(samples[:1000])
    second = Moments.of(samples[1000:])
    _, std = first.merge(second).mean_and_std()
    exact = samples.astype(np.longdouble).std()
    assert float(std) == pytest.approx(float(exact), rel=1e-6)


def test_one_sample_does_not_divide_by_zero() -> None:
    sample = np.array([[2.0, 3.0]])
    mean, std = Moments.of(sample).mean_and_std()
    assert_array_equal(mean, [2, 3])
    assert_allclose(std, 1e-4)
    scale = ObsScale(mean, std)
    other = np.array([[2.0, 4.0]])
    assert_array_equal(scale.normalize(other, "float64"), [[0, 10]])


def test_samples_of_any_dtype_are_summed_in_float64_and_not_modified() -> None:
    tenth = np.float32(0.1)
    samples = np.full((1000, 2), tenth)
    moments = Moments.of(samples)
    assert moments.mean.dtype == np.float64
    assert_allclose(moments.mean, np.float64(tenth), rtol=1e-14)
    assert_array_equal(samples, tenth)

    pixels = np.full((4, 2), 200, np.uint8)
    assert Moments.of(pixels).mean.tolist() == [200, 200]


def test_a_normalizer_that_is_off_stays_off() -> None:
    (obs,) = chunks(4, [5])
    segment_statistics = Statistics(Moments.of(obs), Moments.of(np.ones(5)))
    off = Statistics()
    assert off.merged([segment_statistics]) == off

    without_returns = Statistics(obs=Moments.empty((3,)))
    merged = without_returns.merged([segment_statistics, off])
    assert merged.returns is None
    assert merged.obs is not None
    assert merged.obs.count == 5
    assert merged.reward_scale() is None


@pytest.mark.parametrize("power", [-30, -100, 30, 100])
def test_the_unit_of_all_numbers_changes_nothing_in_what_is_learned_from(power: int) -> None:
    (samples,) = chunks(3, [200])
    unit = 2.0**power
    in_unit = samples * unit
    mean, std = Moments.of(samples).mean_and_std()
    scaled_mean, scaled_std = Moments.of(in_unit).mean_and_std()
    assert_allclose(scaled_mean, mean * unit, rtol=1e-12)
    # of which an ordinary unit has EPSILON more
    assert_allclose(scaled_std, std * unit, rtol=1e-8)

    again = std_of(in_unit / 16)
    if power < 0:
        assert_array_equal(again * 16, scaled_std)  # among tiny units to the bit


def test_a_tiny_number_beside_ordinary_ones_and_a_constant_are_no_signal() -> None:
    rng = default_rng(4)
    ordinary = rng.normal(size=99)
    tiny = 1e-9 * rng.normal(size=99)
    constant = np.full(99, 1e-9)
    beside_ordinary = np.stack([ordinary, tiny], axis=1)
    assert_allclose(std_of(beside_ordinary)[1], 1e-4)

    still = 0.1 + 1e-17 * rng.normal(size=(999, 1))  # its mean is rounded
    assert_allclose(std_of(still), 1e-4)

    beside_constant = np.stack([tiny, constant], axis=1)
    assert 0 < std_of(beside_constant)[1] < 1e-12


def test_value_targets_in_tiny_units_are_standardized() -> None:
    (targets,) = chunks(5, [50], ())
    unit = 2.0**-40
    scale = ValueScale.of(Moments.of(targets))
    tiny = ValueScale.of(Moments.of(targets * unit))
    assert_allclose(tiny.mean, scale.mean * unit, rtol=1e-12)
    assert_allclose(tiny.std, scale.std * unit, rtol=1e-12)


@pytest.mark.parametrize(
    "stored",
    [
        {"obs.mean": np.zeros(4)},
        {"obs.m2": np.zeros((1, 3))},
        {"obs.m2": np.array([1.0, -1.0, 1.0])},
        {"obs.count": np.array(-1.0)},
        {"obs.count": np.array(np.nan)},
    ],
    ids=str,
)
def test_statistics_that_do_not_fit_are_refused(stored: dict[str, np.ndarray]) -> None:
    here = Statistics(obs=Moments.empty((3,)))
    (obs,) = chunks(5, [7])
    good = Statistics(obs=Moments.of(obs)).arrays()
    loaded = here.loaded(good).arrays()
    for name, array in good.items():
        assert_array_equal(loaded[name], array)
    with pytest.raises(ValueError, match="obs has statistics of"):
        here.loaded(good | stored)
