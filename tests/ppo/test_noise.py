"""Pink noise: unit variance, correlations that last, and the same in any process."""

from __future__ import annotations

import numpy as np

from dppo import streams
from dppo.ppo.acting.noise import BLOCK_STEPS, CORRELATIONS, PinkNoise, pink
from dppo.ppo.distributions.simple import DiagonalGaussian
from dppo.streams import Stream


def noise_of(seed: int = 1, steps: int = 64, envs: int = 2) -> PinkNoise:
    def generator(index: int) -> np.random.Generator:
        return streams.generator(seed, Stream.ACTIONS, 0, index)

    return PinkNoise(generator, DiagonalGaussian(3), (steps, envs), "float32")


def test_each_process_follows_its_recursion() -> None:
    count = len(CORRELATIONS)
    white = np.random.default_rng(1).standard_normal((count, 30, 2))
    expected = np.zeros((30, 2))
    for correlation, noise in zip(CORRELATIONS, white, strict=True):
        share = np.sqrt(1 - correlation**2)
        state = noise[0]
        expected[0] += state
        for step in range(1, 30):
            state = correlation * state + share * noise[step]
            expected[step] += state
    assert np.allclose(pink(white), expected / np.sqrt(count))


def test_its_variance_is_one_and_its_correlations_last() -> None:
    count = len(CORRELATIONS)
    white = np.random.default_rng(2).standard_normal((count, 40, 20_000))
    noise = pink(white)
    assert np.allclose(noise.var(axis=1), 1, atol=0.05)
    for lag in (1, 10):
        powers = [correlation**lag for correlation in CORRELATIONS]
        measured = np.mean(noise[5] * noise[5 + lag])
        assert abs(measured - np.mean(powers)) < 0.05


def test_a_segment_has_the_same_noise_wherever_it_is_drawn() -> None:
    in_order = noise_of()
    segments = []
    for index in range(40):
        segments.append(in_order.of_segment(index).copy())
    first = segments[0]
    assert first.shape == (64, 2, 3)
    assert first.dtype == np.float32
    for index in (39, 3, 17):
        again = noise_of().of_segment(index)
        assert np.array_equal(again, segments[index])
    assert not np.array_equal(first, segments[1])
    other_seed = noise_of(seed=2).of_segment(0)
    assert not np.array_equal(first, other_seed)


def test_segments_of_any_length_join_without_a_break() -> None:
    whole = noise_of(steps=BLOCK_STEPS).of_segment(0)
    short = noise_of(steps=64)
    segments = []
    for index in range(BLOCK_STEPS // 64):
        segments.append(short.of_segment(index))
    assert np.array_equal(np.concatenate(segments), whole)
    long = noise_of(steps=BLOCK_STEPS + 1).of_segment(1)
    assert long.shape == (BLOCK_STEPS + 1, 2, 3)
