"""The seam of algorithms: a trainer learns from the segments of each iteration by methods of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dppo.ppo.exchange.records import Experience, Update
from dppo.ppo.networks.network import NetworkSpec

if TYPE_CHECKING:  # actors never import torch
    import torch


class Trainer(Protocol):
    """An algorithm, alone or as one of several ranks. It owns the weights of the policy and all else that it learns."""

    spec: NetworkSpec
    """The network whose weights go to the samplers."""
    device: torch.device

    def update(self, experience: Experience) -> Update:
        """Learn from the segments of an iteration.

        May raise at any point, also by a signal; `restore` then undoes what it has done.
        """

    def weights(self, *, copy: bool = True) -> np.ndarray:
        """Return all weights of the policy [P]; without `copy`, updates may overwrite them."""

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return everything else that later updates depend on; without `copy`, updates may overwrite it."""

    def learned_state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return what `state` does, without rows that the process of the run keeps for several ranks."""

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Continue with the results of `weights` and `state`."""

    def snapshot(self) -> Any:
        """Return what `restore` needs to undo the next update; of a trainer on a GPU, a `TrainerState`."""

    def restore(self, snapshot: Any) -> None:
        """Undo the update that followed `snapshot`."""

    def rehearse(self, rows: int) -> None:
        """Do the work of a gradient of `rows` rows of zeros, to measure it; nothing changes."""

    def sum_gradients(self) -> None:
        """Do the work of a sum of gradients over all ranks, to measure it."""
