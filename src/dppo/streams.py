"""Every random number of a run, derived from its seed and an index.

No generator is carried, saved or lost. Each use has a stream of its own, which gives the same numbers in any process
and however often it is requested. No global generator is seeded or used.
"""

from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """Purpose of a stream, the first element of its spawn key. Changing a number changes all results."""

    WEIGHTS = 0  # ()                         initial weights
    EPISODES = 1  # (sampler, env, episode)   the seed of one episode
    ACTIONS = 2  # (sampler, segment)         exploration noise of one segment
    MINIBATCHES = 3  # (iteration,)           order of the minibatches of one update; (iteration, rank) of several
    EVALUATION = 4  # (episode,)              episodes and actions of `dppo eval`


def sequence(seed: int, stream: Stream, *index: int) -> np.random.SeedSequence:
    """Derive the seed sequence of `stream` at `index` from the run's seed."""
    return np.random.SeedSequence(seed, spawn_key=(int(stream), *index))


def generator(seed: int, stream: Stream, *index: int) -> np.random.Generator:
    """Return a new generator at the start of `stream` at `index`; takes 10 microseconds."""
    return np.random.default_rng(sequence(seed, stream, *index))


def integer(seed: int, stream: Stream, *index: int) -> int:
    """Return a 31-bit seed from `stream` at `index`; simulators often store seeds as signed 32-bit integers."""
    return int(sequence(seed, stream, *index).generate_state(1)[0] >> 1)
