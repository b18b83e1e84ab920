"""ControllerPhase: the start of a run in which a controller acts in place of the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dppo.spaces.actions import Actions

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float64


@dataclass(frozen=True, eq=False, slots=True)
class ControllerPhase:
    """The segments of all policy versions below `versions`, in which a controller acts with noise."""

    versions: int
    log_std: Float64[np.ndarray, " width"]
    """Log standard deviations of the noise, in units of the policy's actions; those of choices are not used."""

    @staticmethod
    def of(actions: Actions, versions: int, noise: float) -> ControllerPhase:
        """Return the phase with noise whose deviation is this share of half the distance between bounds."""
        return ControllerPhase(versions, np.log(noise * actions.half_widths()))
