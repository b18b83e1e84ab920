"""Running statistics: merging parts equals computing them at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dppo.ppo.exchange.scales import Moments, ObsScale, Statistics, ValueScale


def chunks(seed: int, sizes: list[int], shape: tuple[int, ...] = (3,)) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(rng.normal() * 10, 1 + rng.random() * 5, (size, *shape)) for size in sizes]


@pytest.mark.proves("Moments.merge")
@given(st.integers(0, 2**32 - 1), st.lists(st.integers(0, 30), max_size=6))
def test_merging_equals_one_stream(seed: int, sizes: list[int]) -> None:
    parts = chunks(seed, [*sizes, 5])  # a segment may contain no transitions
    merged = Moments.empty((3,))
    for part in parts:
        merged = merged.merge(Moments.of(part))
    everything = np.concatenate(parts)
    mean, std = merged.mean_and_std()
    assert merged.count == len(everything)
    np.testing.assert_allclose(mean, everything.mean(axis=0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(std, np.sqrt(everything.var(axis=0) + 1e-8), rtol=1e-10)


def test_variance_is_accurate_with_a_large_mean() -> None:
    parts = [part + 1e8 for part in chunks(1, [1000, 1000], ())]
    merged = Moments.of(parts[0]).merge(Moments.of(parts[1]))
    exact = np.concatenate(parts).astype(np.longdouble).std()
    assert float(merged.mean_and_std()[1]) == pytest.approx(float(exact), rel=1e-6)


def test_one_sample_does_not_divide_by_zero() -> None:
    mean, std = Moments.of(np.array([[2.0, 3.0]])).mean_and_std()
    np.testing.assert_array_equal(mean, [2, 3])
    np.testing.assert_allclose(std, 1e-4)
    np.testing.assert_array_equal(
        ObsScale(mean, std).normalize(np.array([[2.0, 4.0]]), "float64"), [[0, 10]]
    )


def test_samples_of_any_dtype_are_summed_in_float64_and_not_modified() -> None:
    samples = np.full((1000, 2), 0.1, np.float32)
    moments = Moments.of(samples)
    assert moments.mean.dtype == np.float64
    np.testing.assert_allclose(moments.mean, np.float64(np.float32(0.1)), rtol=1e-14)
    np.testing.assert_array_equal(samples, np.float32(0.1))
    assert Moments.of(np.full((4, 2), 200, np.uint8)).mean.tolist() == [200, 200]


def test_a_normalizer_that_is_off_stays_off() -> None:
    segment_statistics = Statistics(Moments.of(chunks(4, [5])[0]), Moments.of(np.ones(5)))
    assert Statistics().merged([segment_statistics]) == Statistics()
    merged = Statistics(obs=Moments.empty((3,))).merged([segment_statistics, Statistics()])
    assert merged.returns is None
    assert merged.obs is not None
    assert merged.obs.count == 5
    assert merged.reward_scale() is None


@pytest.mark.parametrize("power", [-30, -100, 30, 100])
def test_the_unit_of_all_numbers_changes_nothing_in_what_is_learned_from(power: int) -> None:
    samples = chunks(3, [200])[0]
    unit = 2.0**power
    ordinary = Moments.of(samples)
    scaled = Moments.of(samples * unit)
    (mean, std) = ordinary.mean_and_std()
    (scaled_mean, scaled_std) = scaled.mean_and_std()
    np.testing.assert_allclose(scaled_mean, mean * unit, rtol=1e-12)
    # of which an ordinary unit has EPSILON more
    np.testing.assert_allclose(scaled_std, std * unit, rtol=1e-8)
    again = Moments.of(samples * unit / 16).mean_and_std()[1]
    if power < 0:
        np.testing.assert_array_equal(again * 16, scaled_std)  # among tiny units to the bit


def test_a_tiny_number_beside_ordinary_ones_and_a_constant_are_no_signal() -> None:
    rng = np.random.default_rng(4)
    beside = np.stack([rng.normal(size=99), 1e-9 * rng.normal(size=99)], axis=1)
    np.testing.assert_allclose(Moments.of(beside).mean_and_std()[1][1], 1e-4)
    still = 0.1 + 1e-17 * rng.normal(size=(999, 1))  # its mean is rounded
    np.testing.assert_allclose(Moments.of(still).mean_and_std()[1], 1e-4)
    with_constant = np.stack([1e-9 * rng.normal(size=99), np.full(99, 1e-9)], axis=1)
    assert 0 < Moments.of(with_constant).mean_and_std()[1][1] < 1e-12


def test_value_targets_in_tiny_units_are_standardized() -> None:
    targets = chunks(5, [50], ())[0]
    scale = ValueScale.of(Moments.of(targets))
    tiny = ValueScale.of(Moments.of(targets * 2.0**-40))
    assert (tiny.mean, tiny.std) == pytest.approx(
        (scale.mean * 2.0**-40, scale.std * 2.0**-40), rel=1e-12
    )


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
    good = Statistics(obs=Moments.of(chunks(5, [7])[0])).arrays()
    loaded = here.loaded(good).arrays()
    assert all(np.array_equal(loaded[name], good[name]) for name in good)
    with pytest.raises(ValueError, match="obs has statistics of"):
        here.loaded(good | stored)
