"""Streams are reproducible, and differ from each other."""

from __future__ import annotations

import numpy as np
import pytest

from dppo.streams import Stream, generator, integer, sequence


def test_streams_have_fixed_numbers() -> None:
    """Changing these would change every published result."""
    assert {stream.name: stream.value for stream in Stream} == {
        "WEIGHTS": 0,
        "EPISODES": 1,
        "ACTIONS": 2,
        "MINIBATCHES": 3,
        "EVALUATION": 4,
    }

    action_seed = np.random.SeedSequence(11, spawn_key=(2, 3, 5))
    expected = np.random.default_rng(action_seed).random(4)
    drawn = generator(11, Stream.ACTIONS, 3, 5).random(4)
    np.testing.assert_array_equal(drawn, expected)

    episode_seeds = np.random.SeedSequence(11, spawn_key=(1, 0, 2, 9))
    [state] = episode_seeds.generate_state(1)
    assert integer(11, Stream.EPISODES, 0, 2, 9) == state >> 1


def test_streams_differ_in_seed_kind_and_every_index() -> None:
    names = [
        (seed, stream, a, b)
        for seed in (0, 1, 2**40)
        for stream in Stream
        for a in range(4)
        for b in range(4)
    ]
    drawn = {
        tuple(generator(seed, stream, a, b).integers(0, 2**63, 2)) for seed, stream, a, b in names
    }
    assert len(drawn) == len(names)
    assert generator(1, Stream.ACTIONS, 0).random() != generator(1, Stream.ACTIONS, 0, 0).random()


def test_integers_fit_a_signed_32_bit_seed() -> None:
    seeds = [integer(3, Stream.EPISODES, 0, 0, episode) for episode in range(2000)]
    assert min(seeds) >= 0
    assert 2**30 < max(seeds) < 2**31
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize("seed", [0, 2**31, 2**64, 10**30])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert sequence(seed, Stream.WEIGHTS).entropy == seed
    assert 0 <= integer(seed, Stream.WEIGHTS) < 2**31
