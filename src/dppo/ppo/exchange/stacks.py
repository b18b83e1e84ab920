"""Stacks of K frames, of which a segment holds each frame once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Int64, Shaped


def frames_of(stacks: Shaped[np.ndarray, "T E K *frame"]) -> Shaped[np.ndarray, "frames E *frame"]:
    """Return the T + K - 1 frames of each environment: those of the first stack, then the newest of each other."""
    return np.concatenate([stacks[0].swapaxes(0, 1), stacks[1:, :, -1]])


def stack_numbers(done: Bool[np.ndarray, "T E"], stack: int) -> Int64[np.ndarray, "T E K"]:
    """Return the place of each frame of each stack, the oldest first, in `frames_of`, flat: its row times E, plus e.

        row[t, k] = max(t + k, first[t])        first[t]: the row of the first frame of the episode of step t

    because an episode starts with K copies of its first frame. What precedes the segment is in the first stack.
    """
    steps = np.arange(len(done))[:, None]
    num_envs = done.shape[1]
    first = np.zeros(done.shape, np.int64)
    first[1:] = np.where(done[:-1], steps[1:] + stack - 1, 0)
    frames = (steps + np.arange(stack))[:, None]
    rows = np.maximum(frames, np.maximum.accumulate(first)[..., None])
    return rows * num_envs + np.arange(num_envs)[:, None]
