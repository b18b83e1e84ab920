"""Noise of exploration: pink, with correlations that last, and wide; the same in any process."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
from builders import agent_of
from numpy.random import default_rng

from dppo import streams
from dppo.config.parts import Network
from dppo.ppo.acting import wide
from dppo.ppo.acting.noise import BLOCK_STEPS, CORRELATIONS, PinkNoise, WhiteNoise, pink
from dppo.ppo.acting.wide import EVERY, STRETCH_STEPS, WideAgent, WideExploration, hold
from dppo.ppo.distributions.simple import DiagonalGaussian
from dppo.ppo.exchange.records import Episode
from dppo.ppo.networks.choice import choose_network
from dppo.spaces.actions import BoxActions
from dppo.spaces.spaces import Spaces
from dppo.streams import Stream

STRETCH = STRETCH_STEPS // 64  # segments of 64 steps
OBS = np.dtype((np.float32, (3,)))
LOW = np.full(2, -1.0)
HIGH = np.full(2, 2.0)
ACTIONS = BoxActions(LOW, HIGH, bounds="squash")


def noise_of(seed: int = 1, envs: int = 2) -> PinkNoise:
    def generator(index: int) -> np.random.Generator:
        return streams.generator(seed, Stream.ACTIONS, 0, index)

    return PinkNoise(WhiteNoise(generator, DiagonalGaussian(3), envs, "float32"))


def test_each_process_follows_its_recursion() -> None:
    count = len(CORRELATIONS)
    steps = 30
    white = default_rng(1).standard_normal((count, steps, 2))
    expected = np.zeros((steps, 2))

    for correlation, noise in zip(CORRELATIONS, white, strict=True):
        share = np.sqrt(1 - correlation**2)
        state = noise[0]
        expected[0] += state
        for step in range(1, steps):
            state = correlation * state + share * noise[step]
            expected[step] += state

    expected /= np.sqrt(count)
    assert np.allclose(pink(white), expected)


def test_its_variance_is_one_and_its_correlations_last() -> None:
    count = len(CORRELATIONS)
    white = default_rng(2).standard_normal((count, 40, 20_000))
    noise = pink(white)
    variances = noise.var(axis=1)
    assert np.allclose(variances, 1, atol=0.05)

    for lag in (1, 10):
        powers = [correlation**lag for correlation in CORRELATIONS]
        expected = np.mean(powers)
        products = noise[5] * noise[5 + lag]
        measured = np.mean(products)
        assert abs(measured - expected) < 0.05


def test_a_segment_has_the_same_noise_wherever_it_is_drawn() -> None:
    in_order = noise_of()
    segments = []
    for index in range(40):
        noise = in_order.of_segment(index, 64)
        segments.append(noise.copy())
    first = segments[0]
    assert first.shape == (64, 2, 3)
    assert first.dtype == np.float32

    for index in (39, 3, 17):
        again = noise_of().of_segment(index, 64)
        assert np.array_equal(again, segments[index])
    assert not np.array_equal(first, segments[1])

    other_seed = noise_of(seed=2).of_segment(0, 64)
    assert not np.array_equal(first, other_seed)


def test_segments_of_any_length_join_without_a_break() -> None:
    noise = noise_of()
    whole = noise.of_segment(0, BLOCK_STEPS)
    count = BLOCK_STEPS // 64
    segments = []
    for index in range(count):
        segments.append(noise.of_segment(index, 64))
    joined = np.concatenate(segments)
    assert np.array_equal(joined, whole)

    length = BLOCK_STEPS + 1
    longer = noise.of_segment(1, length)
    assert longer.shape == (length, 2, 3)


def covered(exploration: WideExploration, segments: Iterable[int]) -> list[bool]:
    """Return for each segment of sampler 3 whether it explores widely."""
    return [exploration.covers(3, index) for index in segments]


def test_at_any_time_one_sampler_of_four_explores_widely() -> None:
    for index in (0, STRETCH - 1, STRETCH, 9 * STRETCH):
        flags = [WideExploration(64).covers(sampler, index) for sampler in range(8)]
        assert sum(flags) == 8 // EVERY


@pytest.mark.parametrize("num_steps", [64, 100, 3000])
def test_a_sampler_explores_widely_for_a_quarter_of_the_time(num_steps: int) -> None:
    stretch = math.ceil(STRETCH_STEPS / num_steps)
    period = EVERY * stretch
    exploration = WideExploration(num_steps)
    flags = covered(exploration, range(3 * period))
    assert sum(flags) == 3 * stretch

    first_period = flags[:period]
    second_period = flags[period : 2 * period]
    assert first_period == second_period


def test_nothing_is_wide_while_a_controller_acts() -> None:
    segments = (0, 4, 5)
    wide_from_the_start = WideExploration(64)
    flags = covered(wide_from_the_start, segments)
    assert flags == [True, True, True]

    later = WideExploration(64, first_segment=5)
    flags = covered(later, segments)
    assert flags == [False, False, True]


def test_noise_is_held_for_powers_of_two() -> None:
    white = np.arange(4000.0).reshape(2000, 2, 1)
    noise = hold(white, default_rng(1))
    for env in range(2):
        env_noise = noise[:, env, 0]
        values, lengths = np.unique(env_noise, return_counts=True)
        is_drawn = np.isin(values, white[:, env])
        assert is_drawn.all()
        complete = lengths[:-1]
        assert set(complete) == {1, 2, 4, 8, 16, 32}

    # nothing is held from before the segment
    assert np.array_equal(noise[0], white[0])


@pytest.mark.parametrize("samplers", [[True], [False, True, False]])
def test_only_the_deviation_of_wide_samplers_is_raised(
    samplers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(hidden_sizes=(8,), state_dependent_std=True)
    spaces = Spaces(OBS, ACTIONS)
    spec = choose_network(network, spaces).spec
    agent = agent_of(spec)
    is_alone = len(samplers) == 1
    # a single sampler has no axis
    shape: tuple[int, ...] = (2,)
    if not is_alone:
        shape = (len(samplers), 2)
    random = default_rng(5).standard_normal((*shape, 3))
    obs = random.astype(np.float32)
    noise = np.ones((*shape, 2), np.float32)
    _, usual = agent.act(obs, noise)

    # the random weights have deviations on both sides of this limit
    monkeypatch.setattr(wide, "LEAST_LOG_STD", 0.8)
    expected = usual.head.copy()
    log_std = expected[..., 2:]
    if not is_alone:
        log_std = log_std[1]
    is_raised = log_std < 0.8
    assert 0 < is_raised.mean() < 1

    log_std[is_raised] = 0.8

    explorer = WideAgent(agent, np.array(samplers))
    actions, outputs = explorer.act(obs, noise)
    assert np.array_equal(outputs.head, expected)

    drawn = agent.distribution.sample(expected, noise)
    assert np.array_equal(actions, drawn)


@pytest.mark.parametrize(
    ("length", "end", "explored"),
    [
        pytest.param(40, 40, False, id="began after the wide segment"),
        pytest.param(41, 40, True, id="began in its last step"),
        pytest.param(3072, 40, True, id="as long as one without wide actions"),
        pytest.param(3073, 40, False, id="so long that all explore widely"),
    ],
)
def test_an_episode_with_wide_actions_says_so(length: int, end: int, explored: bool) -> None:
    """Of this sampler, segment 1 explores widely; the episodes end in segment 2."""
    num_steps = 1024
    exploration = WideExploration(num_steps)
    flags = [exploration.covers(2, index) for index in range(6)]
    assert np.flatnonzero(flags).tolist() == [1, 5]

    episode = Episode(0, 0, 1.0, length, None, end=end)
    segments = episode.segments(2, num_steps)
    assert exploration.covers_episode(2, episode, segments) == explored
