"""Environments: the protocol of what a sampler steps."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from dppo.ppo.exchange.records import EnvLog, Incident, SamplerCarry


class Environments(Protocol):
    """The E environments of a sampler; implemented by `dppo.envs.group.EnvGroup`."""

    num_envs: int
    obs: np.dtype[Any]
    """One observation as it is stored: `dppo.spaces.spaces.Spaces.obs`."""

    def start(self, obs: np.ndarray, log: EnvLog) -> None:
        """Begin the first episode of each environment; write the observations into `obs` [E, *O]."""

    def step(
        self,
        actions: np.ndarray,
        obs: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        log: EnvLog,
    ) -> dict[int, np.ndarray]:
        """Step each environment and reset those that are done.

        Write rows [E, ...]; `obs` receives the observations for the next action. Add finished episodes to `log`.
        Return the final observation of each environment that was truncated, by its index.
        """

    def restore(
        self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray, log: EnvLog
    ) -> list[Incident]:
        """Restore the open episodes that `carry` describes; start a new one where that fails."""

    def check(self, obs: np.ndarray, done: np.ndarray, log: EnvLog, *, first: bool) -> None:
        """Check observations [t + 1, E, *O] of the first t steps of a segment, in which `done` [t, E] episodes ended.

        It is called after the segment, and as soon as an observation is not finite; then it must raise.
        """

    def open_episodes(self) -> dict[str, np.ndarray]:
        """Return index, return, length and checksum of the open episodes, under their names in `SamplerCarry`."""
