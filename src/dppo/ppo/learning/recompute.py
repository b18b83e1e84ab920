"""Recompute the advantages of a batch with the values of the current network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.learning.batch import Batch, split_rows
from dppo.ppo.learning.gae_inputs import Rollout
from dppo.ppo.networks.recall import Recall


def with_new_advantages(batch: Batch, rollout: Rollout, value_of: Callable[..., Tensor], rows: int) -> Batch:
    """Return the batch with advantages and returns by the values of `value_of`; the old values stay.

    Source: Andrychowicz et al., arXiv:2006.05990, section 3.5.

    With memory, sequences and successors start from the states that were stored with them, as in training.

    Args:
        value_of: maps observations, and their `Recall` where there is memory, to values.
        rows: most observations to pass to it at once.
    """
    device = batch.logprobs.device
    pieces = [value_of(piece.obs, piece.recall) for piece in batch.pieces(rows)]
    values, successors = _joined(pieces), _successors(rollout, value_of, rows, device)
    advantages, returns = rollout.estimate(values, successors, batch.sequence_length)
    return replace(batch, advantages=advantages.to(device), returns=returns.to(device))


def _successors(rollout: Rollout, value_of: Callable[..., Tensor], rows: int, device: torch.device) -> np.ndarray:
    count = len(rollout.followed[0])
    sizes = [min(rows, count - start) for start in range(0, count, rows)]
    recalls: list[Recall | None] = [None] * len(sizes)
    if rollout.recall is not None:
        recalls = list(rollout.recall.of_each(lambda tensor: tensor.to(device)).split(sizes))
    pieces = zip(split_rows(rollout.successors, sizes), recalls, strict=True)
    return _joined([value_of(each_leaf(obs, lambda leaf: leaf.to(device)), recall) for obs, recall in pieces])


def _joined(values: list[Tensor]) -> np.ndarray:
    joined: np.ndarray = torch.cat(values).numpy(force=True)
    return joined
