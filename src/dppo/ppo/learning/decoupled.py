"""PPO's ratios where the policy that collected is older than the one to update."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dppo.ppo.learning.batch import Batch

MOST_IMPORTANCE = 2.0


def from_current_policy(batch: Batch, log_probs_of: Callable[..., Tensor], rows: int) -> Batch:
    """Return the batch with ratios measured from the current policy, and weights that correct for the older one.

        L = mean(max(-w A r, -w A clip(r, 1 - c, 1 + c)))        r = pi / pi_now        w = min(pi_now / pi_old, 2)

    With ratios to `pi_old`, most of the clipping range would be spent before the update begins, because `pi_now` is
    already one update away from `pi_old`.

    Source: Hilton, Cobbe, Schulman, arXiv:2110.00641 (the decoupled objective).
    Deviation: w is limited to 2, because where an update moves the policy far, a few rows would outweigh the rest.

    Args:
        log_probs_of: maps observations, actions, masks, and the `Recall` of a network with memory, to
            log-probabilities under `pi_now`.
        rows: most rows to pass to it at once.
    """
    pieces = batch.pieces(rows)
    now = torch.cat([log_probs_of(piece.obs, piece.actions, piece.masks, piece.recall) for piece in pieces])
    if batch.weights is not None:  # rows that are not transitions hold zeros, which no policy has chosen
        now = torch.where(batch.weights > 0, now, batch.logprobs)
    return replace(batch, logprobs=now, importance=(now - batch.logprobs).exp().clamp(max=MOST_IMPORTANCE))
