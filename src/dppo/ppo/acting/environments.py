"""The seam between a sampler and its environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from dppo.ppo.exchange.records import EnvLog, FatalStep, Incident, SamplerCarry, StepRows


class Environments(Protocol):
    """The E environments of a sampler; implemented by `dppo.envs.group.EnvGroup`."""

    num_envs: int
    obs: np.dtype[Any]
    """One observation as it is stored: `dppo.spaces.spaces.Spaces.obs`."""

    def start(self, obs: np.ndarray, log: EnvLog) -> None:
        """Start the first episode of each environment; write the observations to `obs` [E, *O]."""

    def step(self, rows: StepRows, log: EnvLog) -> None:
        """Step each environment, and reset those whose episode ends.

        Args:
            rows: actions as sampled from the policy, and the results to write. `valid` becomes False for an environment
                whose step failed: its row is not a transition, and its episode is abandoned.
            log: receives the episodes that end, the time limits, the incidents, the time.

        Raises EnvironmentFault if an environment raised or returned an invalid result, and that ends the run.
        """

    def restore(
        self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray, log: EnvLog
    ) -> list[Incident]:
        """Restore the open episodes that `carry` describes, from its `states` or by replaying `actions`.

        An episode whose replay ends with another observation or return is abandoned, and a new one starts.

        Args:
            actions: for each environment [n, *A], the actions since its reset; empty to abandon all episodes.
            obs: [E, *O] to write.
            log: receives the time, but no episodes.

        Returns: one incident for each abandoned episode.
        """

    def avoid(self, fatal: Sequence[FatalStep]) -> None:
        """Let these steps count as faults of their environments, from now on, and take none of them."""

    def check(self, obs: np.ndarray, log: EnvLog, *, first: bool) -> None:
        """Check the stored observations [T + 1, E, *O] of a segment, perhaps the `first` of the run.

        Raises EnvironmentFault if one is outside its space.
        """

    def follow(self, *, is_on: bool) -> None:
        """Switch the controllers of the environments on or off; call this between episodes."""

    def intended(self) -> np.ndarray:
        """Return the actions [E, *A] that the controllers would take next, as actions of the policy."""

    def open_episodes(self, log: EnvLog) -> dict[str, np.ndarray]:
        """Return index, return, length and checksum of the open episodes [E], under their names in `SamplerCarry`.

        Also the environments' own states, if they have any; `log` receives the time.
        """
