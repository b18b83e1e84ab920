"""ControllerPhase: the start of a run in which a controller acts in place of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from dppo.ppo.exchange.records import Episode
from dppo.spaces.actions import Actions

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float64


@dataclass(frozen=True, eq=False, slots=True)
class ControllerPhase:
    """The segments of all policy versions below `versions`, in which a controller acts with noise."""

    versions: int
    segments: int
    """Segments of a sampler that the controller acts in: with a policy lag of K, K more than versions."""
    log_std: Float64[np.ndarray, " width"]
    """Log standard deviations of the noise, in units of the policy's actions; those of choices are not used."""

    @staticmethod
    def of(actions: Actions, versions: int, noise: float, lag: int = 0) -> ControllerPhase:
        """Return the phase with noise whose deviation is this share of half the distance between bounds."""
        return ControllerPhase(versions, versions + lag, np.log(noise * actions.half_widths()))

    def marked(self, episodes: Sequence[Episode], index: int, num_steps: int) -> list[Episode]:
        """Return the episodes that ended in segment `index`, with `explored` set if the controller began them.

        Args:
            num_steps: those of a segment.
        """
        marked = []
        for episode in episodes:
            began_in_phase = episode.segments(index, num_steps)[0] < self.segments
            marked.append(replace(episode, explored=True) if began_in_phase else episode)
        return marked
