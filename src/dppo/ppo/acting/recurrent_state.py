"""RecurrentStates: the recurrent states of several samplers while a segment is collected."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float


class RecurrentStates:
    """The recurrent states of S samplers with E environments each, before and after the current step.

    An episode starts from zero, in whatever row of the segment.
    """

    def __init__(
        self, first: Float[np.ndarray, "samplers E S"], steps: int, sequence_length: int, *, keep_all: bool = False
    ) -> None:
        """Start a segment of `steps` steps, cut into sequences of `sequence_length`, from the states `first`.

        Args:
            keep_all: keep the states after all steps, in `after_steps`.
        """
        samplers, envs, size = first.shape
        self.before = first
        """[samplers, E, S]"""
        self.after = first
        """[samplers, E, S] after the step, also where the episode ended in it."""
        self.of_sequences = np.empty((samplers, steps // sequence_length, envs, size), first.dtype)
        """States before the first step of each sequence."""
        self.after_steps = np.empty((samplers, steps if keep_all else 0, envs, size), first.dtype)
        self._sequence_length, self._keep_all = sequence_length, keep_all

    def enter(self, t: int) -> Float[np.ndarray, "*samplers E S"]:
        """Return the states before step `t`, of a single sampler without leading axis."""
        if t % self._sequence_length == 0:
            self.of_sequences[:, t // self._sequence_length] = self.before
        return self.before[0] if len(self.before) == 1 else self.before

    def act(self, t: int, after: Float[np.ndarray, "*samplers E S"] | None) -> None:
        """Take the states after step `t` from the network."""
        assert after is not None, "a network with memory returns its state"
        self.after = after.reshape(self.before.shape)
        if self._keep_all:
            self.after_steps[:, t] = self.after

    def leave(self, done: Bool[np.ndarray, "samplers E"]) -> None:
        """Go on to the next step, from zero where an episode is `done`."""
        zero = self.after.dtype.type(0)
        self.before = np.where(done[..., None], zero, self.after) if done.any() else self.after
