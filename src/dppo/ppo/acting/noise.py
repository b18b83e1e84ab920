"""Exploration noise: white; or pink, which moves steadily for a while, in place of trembling."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dppo.ppo.distributions.base import Distribution

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float

CORRELATIONS = (0.0, 0.7, 0.9, 0.97, 0.99)
BLOCK_STEPS = 1024
"""Fewest steps of a stretch of noise, which consists of whole segments."""


def pink(white: Float[np.ndarray, "K steps ..."]) -> Float[np.ndarray, "steps ..."]:
    """Return the sum of K processes with different memories, divided by the root of K: its variance is one.

        x[k, 0] = n[k, 0],  x[k, t] = c[k] x[k, t - 1] + sqrt(1 - c[k]^2) n[k, t],  y[t] = sum(x[:, t]) / sqrt(K)

    Source: for pink noise in place of white, Eberhard, Hollenstein, Pinneri, Martius, "Pink noise is all you need"
    (ICLR 2023). Deviation: a sum of five processes instead of a Fourier transform, whose last bits depend on the CPU.
    """
    correlations = np.array(CORRELATIONS, white.dtype)
    keep = correlations.reshape(-1, *[1] * (white.ndim - 2))
    take = np.sqrt(1 - keep * keep)
    noise = np.empty(white.shape[1:], white.dtype)
    state = white[:, 0]
    for step in range(len(noise)):
        if step:
            state = keep * state + take * white[:, step]
        noise[step] = state.sum(axis=0)
    return noise / white.dtype.type(math.sqrt(len(correlations)))


@dataclass(frozen=True)
class WhiteNoise:
    """The noise of one sampler, by the index and the steps of the segment alone: any process draws the same."""

    generators: Callable[[int], np.random.Generator]
    """Returns the generator of a segment."""
    distribution: Distribution
    num_envs: int
    dtype: str

    def of_segment(self, index: int, steps: int) -> Float[np.ndarray, "{steps} envs size"]:
        return self.draw(self.generators(index), steps)

    def draw(self, generator: np.random.Generator, steps: int) -> np.ndarray:
        return self.distribution.noise(generator, steps, self.num_envs, self.dtype)


class PinkNoise:
    """White noise with memories.

    Segments of a block of at least 1,024 steps join without a break; each block begins independently.
    """

    def __init__(self, white: WhiteNoise) -> None:
        self._white = white
        self._key = (-1, 0)  # block whose noise is kept, and its steps; none yet
        self._noise = np.empty(0)

    def of_segment(self, index: int, steps: int) -> Float[np.ndarray, "{steps} envs size"]:
        segments_of_block = math.ceil(BLOCK_STEPS / steps)
        block, number = divmod(index, segments_of_block)
        key = (block, segments_of_block * steps)
        if key != self._key:
            self._noise = self._of_block(*key)
            self._key = key
        start = number * steps
        return self._noise[start : start + steps]

    def _of_block(self, block: int, steps: int) -> np.ndarray:
        count = len(CORRELATIONS)
        white = self._white.draw(self._white.generators(block), count * steps)
        return pink(white.reshape(count, steps, *white.shape[1:]))
