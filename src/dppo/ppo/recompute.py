"""Recompute the advantages of a batch with the values of the current network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.batch import Batch, Rollout, split_rows


def with_new_advantages(batch: Batch, rollout: Rollout, value_of: Callable[..., Tensor], rows: int) -> Batch:
    """Return the batch with advantages and returns by the values of `value_of`; the old values stay.

    Source: Andrychowicz et al., arXiv:2006.05990, section 3.5.

    Args:
        value_of: maps observations to their values.
        rows: most observations to pass to it at once.
    """
    device = batch.logprobs.device
    values, successors = (_values(obs, value_of, rows, device) for obs in (batch.obs, rollout.successors))
    advantages, returns = rollout.estimate(values, successors, batch.length)
    return replace(batch, advantages=advantages.to(device), returns=returns.to(device))


def _values(
    obs: Tensor | dict[str, Tensor], value_of: Callable[..., Tensor], rows: int, device: torch.device
) -> np.ndarray:
    count = len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)
    sizes = [min(rows, count - start) for start in range(0, count, rows)]
    values = [value_of(_on(device, piece)) for piece in split_rows(obs, sizes)]
    joined: np.ndarray = torch.cat(values).numpy(force=True)
    return joined


def _on(device: torch.device, obs: Tensor | dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
    return {name: leaf.to(device) for name, leaf in obs.items()} if isinstance(obs, dict) else obs.to(device)
