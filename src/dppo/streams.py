"""Every random number of a run, derived from its seed and an index.

There is no generator to carry, save or lose: whoever needs random numbers asks for the stream of what it
is doing, and gets the same ones wherever and however often it asks. Nothing global is seeded or drawn from.
"""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """What a stream is for; the first element of its spawn key. Changing a number changes every result."""

    WEIGHTS = 0  # ()                         initial weights
    EPISODES = 1  # (sampler, env, episode)   the seed of one episode
    ACTIONS = 2  # (sampler, segment)         exploration noise of one segment
    MINIBATCHES = 3  # (iteration,)           order of the minibatches of one update; (iteration, rank) of several
    EVALUATION = 4  # (episode,)              episodes and actions of `dppo eval`
    SIMULATION = 5  # (...)                   latencies of the simulated simulators


def sequence(seed: int, stream: Stream, *index: int) -> np.random.SeedSequence:
    """The seed sequence of `stream` at `index`."""
    return np.random.SeedSequence(seed, spawn_key=(int(stream), *index))


def generator(seed: int, stream: Stream, *index: int) -> np.random.Generator:
    """A fresh generator at the beginning of `stream` at `index` (10 microseconds)."""
    return np.random.default_rng(sequence(seed, stream, *index))


def integer(seed: int, stream: Stream, *index: int) -> int:
    """One seed of 31 bits from `stream` at `index`: simulators often keep seeds in a signed 32-bit integer."""
    return int(sequence(seed, stream, *index).generate_state(1)[0] >> 1)
