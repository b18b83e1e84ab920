"""Guidance: the controllers of the environments of a sampler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


class Guide(Protocol):
    """The controller of one environment; implemented by `dppo.policies.controller.ControllerInstance`."""

    def begin(self, episode: int, seed: int) -> None:
        """Begin an episode."""

    def act(self, obs: Any) -> Any:
        """Return an action of the environment's own space for an observation as the environment returned it."""


@dataclass(eq=False)
class Guidance:
    """The controllers of the environments of one sampler."""

    make: Callable[[Any], Guide]
    """Makes the controller of an environment."""
    is_on: bool = True
    """True if controllers follow the episodes."""
    intended: dict[int, np.ndarray] = field(default_factory=dict)
    """[*A] for each environment, the controller's next action as an action of the policy."""
