"""Minibatches of an epoch: shuffled, of equal sizes, and with advantages standardised over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.learning.batch import Batch, num_bytes
from dppo.ppo.learning.moments import moments_of, moments_of_all
from dppo.ppo.learning.parallel import Parallel

LARGE = 16 * 2**20  # bytes of observations; copying fewer at once saves more time than memory


def weighted_on_all(batch: Batch, parallel: Parallel) -> Batch:
    """Return the batch with weights if that of any rank has them, so that all ranks compute the same means."""
    device = batch.logprobs.device
    some = parallel.gather(torch.tensor([batch.weights is not None], dtype=torch.int32, device=device))
    if batch.weights is not None or not some.any():
        return batch
    return replace(batch, weights=torch.ones_like(batch.logprobs))


def draw_minibatches(
    batch: Batch, order: np.random.Generator, minibatches: int, *, standardize: bool, parallel: Parallel
) -> Iterator[tuple[Batch, float]]:
    """Yield every sequence once, in a new order (detail 6), with the transitions per rank of each minibatch.

    Sizes differ by at most one sequence, so that none is left over. Minibatches without any transition on any rank are
    left out. Large observations are copied one minibatch at a time, so that memory holds no second batch of them.

    Args:
        minibatches: how many to make; at most one for each sequence.
        standardize: give the advantages of each minibatch mean zero and deviation one (detail 7).
    """
    permutation = torch.from_numpy(order.permutation(batch.sequences)).to(batch.logprobs.device)
    whole = batch.obs
    cut_later = num_bytes(whole) > LARGE
    if cut_later:  # the rows of observations are shuffled, not the observations
        batch = replace(batch, obs=torch.arange(len(batch), device=permutation.device))
    shuffled = batch.take(permutation)
    count = min(minibatches, batch.sequences)
    small, larger = divmod(batch.sequences, count)
    if standardize:
        edge = larger * (small + 1) * batch.sequence_length  # first come the minibatches with one sequence more
        shuffled = replace(shuffled, advantages=_standardized(shuffled, parallel, edge, larger, count - larger))
    pieces = shuffled.split([small + 1] * larger + [small] * (count - larger))
    counted = ((piece, float(len(piece))) for piece in pieces) if batch.weights is None else _weighted(pieces, parallel)
    for piece, rows in counted:
        yield (replace(piece, obs=_rows_at(whole, piece.obs)) if cut_later else piece), rows


def _rows_at(obs: Any, index: Any) -> Any:
    return each_leaf(obs, lambda leaf: leaf.index_select(0, index))


def _weighted(pieces: list[Batch], parallel: Parallel) -> Iterator[tuple[Batch, float]]:
    """Yield minibatches with their transitions per rank, by which their weights are scaled; leave out empty ones."""
    own = torch.stack([piece.weights.sum() for piece in pieces if piece.weights is not None])
    for piece, valid in zip(pieces, parallel.gather(own).sum(dim=0).tolist(), strict=True):
        if valid:
            assert piece.weights is not None
            scale = len(piece) * parallel.size / valid
            yield replace(piece, weights=piece.weights * scale), valid / parallel.size


def _standardized(shuffled: Batch, parallel: Parallel, edge: int, larger: int, smaller: int) -> Tensor:
    """Standardise advantages [rows] within each minibatch of all ranks, for all minibatches at once.

    The advantage of a single transition becomes zero.

    Args:
        edge: number of rows in the first `larger` minibatches; the `smaller` others have one sequence less.
    """

    def tables(column: Tensor) -> list[Tensor]:
        both = column[:edge].view(larger, -1) if larger else None
        rest = column[edge:].view(smaller, -1) if smaller else None
        return [table for table in (both, rest) if table is not None]

    advantages = tables(shuffled.advantages)
    weights = tables(shuffled.weights) if shuffled.weights is not None else [None] * len(advantages)
    own = torch.cat([moments_of(table, weight) for table, weight in zip(advantages, weights, strict=True)])
    moments = moments_of_all(own, parallel)
    means = moments[:, 1:2]
    scales = (moments[:, 2:3] / (moments[:, :1] - 1).clamp(min=1)).sqrt() + 1e-8
    done, parts = 0, []
    for table in advantages:
        rows = slice(done, done + len(table))
        parts.append(((table - means[rows]) / scales[rows]).flatten())
        done += len(table)
    return torch.cat(parts)
