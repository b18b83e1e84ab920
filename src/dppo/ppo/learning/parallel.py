"""Parallel: the collective operations of trainers that train one model together; moments and minibatches of all."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.learning.batch import Batch

LARGE = 16 * 2**20  # bytes of observations; copying fewer at once saves more time than memory


class Parallel:
    """A group of ranks with equal models, each training on its own share of the rows; as it stands, of a single one."""

    rank: int = 0
    size: int = 1

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Allocate a vector of zeros in the memory that `sum_` is fastest on; all ranks call it together."""
        return torch.zeros_like(tensor)

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks, equal to the bit on each."""
        return

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the `tensor` of every rank, stacked in the order of ranks: [size, ...]."""
        return tensor.unsqueeze(0)


def row_moments(samples: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [count, mean, M2] of each row of `samples`: [k, n] -> [k, 3]. M2 is the sum of squared deviations.

    `weights`: [k, n], one for samples that count and zero for others; None if all count. Without any, the mean is 0.
    """
    if weights is None:
        means = samples.mean(dim=1)
        squares = (samples - means.unsqueeze(1)).square().sum(dim=1)
        return torch.stack([torch.full_like(means, samples.shape[1]), means, squares], dim=1)
    counts = weights.sum(dim=1)
    means = (weights * samples).sum(dim=1) / counts.clamp(min=1)
    squares = (weights * (samples - means.unsqueeze(1)).square()).sum(dim=1)
    return torch.stack([counts, means, squares], dim=1)


def moments_of_all(own: Tensor, parallel: Parallel) -> Tensor:
    """Return the moments [k, 3] of all ranks together, from those of this rank [k, 3]."""
    return own if parallel.size == 1 else merged_moments(parallel.gather(own))


def merged_moments(parts: Tensor) -> Tensor:
    """Merge the moments of several parts: [parts, k, 3] -> [k, 3].

    mean = sum(n_i mean_i) / n        M2 = sum(M2_i + n_i (mean_i - mean)^2)

    Source: Chan, Golub, LeVeque (1979), like `dppo.ppo.exchange.moments.Moments.merge`, for any number of parts.
    """
    counts, means, squares = parts.unbind(dim=2)  # [parts, k]
    count = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / count.clamp(min=1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum(dim=0)], dim=1)


def weighted_on_all(batch: Batch, parallel: Parallel) -> Batch:
    """Return the batch with weights if that of any rank has them, so that all ranks compute the same means.

    Whether an episode terminates, and the rewards, become those of all ranks.
    """
    own = [batch.weights is not None, batch.terminates, -batch.rewards[0], batch.rewards[1]]
    together = parallel.gather(torch.tensor(own, dtype=torch.float64, device=batch.logprobs.device)).amax(dim=0)
    weighted, terminates, minus_least, largest = together.tolist()
    batch = replace(batch, terminates=bool(terminates), rewards=(-minus_least, largest))
    return replace(batch, weights=torch.ones_like(batch.logprobs)) if batch.weights is None and weighted else batch


def draw_minibatches(
    batch: Batch, order: np.random.Generator, minibatches: int, *, floor: float | None, parallel: Parallel
) -> Iterator[tuple[Batch, float]]:
    """Yield every sequence once, in a new order (detail 6), with the transitions per rank of each minibatch.

    Sizes differ by at most one sequence, so that none is left over. Minibatches without any transition on any rank are
    left out. Large observations are copied one minibatch at a time, so that memory holds no second batch of them.

    Args:
        minibatches: how many to make; at most one for each sequence.
        floor: give the advantages of each minibatch mean zero and deviation one (detail 7), or less if their deviation
            is below this; None: leave them as they are.
    """
    permutation = torch.from_numpy(order.permutation(batch.sequences)).to(batch.logprobs.device)
    leaves = batch.obs.values() if isinstance(batch.obs, dict) else (batch.obs,)
    if batch.stored is None and sum(leaf.nbytes for leaf in leaves) > LARGE:
        # the rows of observations are shuffled, not the observations
        batch = replace(batch, obs=torch.arange(len(batch), device=permutation.device), stored=batch.obs)
    shuffled = batch.take(permutation)
    count = min(minibatches, batch.sequences)
    small, larger = divmod(batch.sequences, count)
    sizes = [small + 1] * larger + [small] * (count - larger)
    if floor is not None:
        shuffled = replace(shuffled, advantages=_standardized(shuffled, sizes, floor, parallel))
    pieces = shuffled.split(sizes)
    counted = ((piece, float(len(piece))) for piece in pieces) if batch.weights is None else _weighted(pieces, parallel)
    for piece, rows in counted:
        yield piece.formed(), rows


def _weighted(pieces: list[Batch], parallel: Parallel) -> Iterator[tuple[Batch, float]]:
    """Yield minibatches with their transitions per rank, by which their weights are scaled; leave out empty ones."""
    own = torch.stack([piece.weights.sum() for piece in pieces if piece.weights is not None])
    for piece, valid in zip(pieces, parallel.gather(own).sum(dim=0).tolist(), strict=True):
        if valid:
            assert piece.weights is not None
            scale = len(piece) * parallel.size / valid
            yield replace(piece, weights=piece.weights * scale), valid / parallel.size


def _standardized(shuffled: Batch, sizes: list[int], floor: float, parallel: Parallel) -> Tensor:
    """Standardize advantages [rows] within each minibatch of all ranks; that of a single transition becomes zero."""
    shapes = [(count, size * shuffled.sequence_length) for size, count in Counter(sizes).items()]

    def tables(column: Tensor) -> list[Tensor]:
        parts = column.split([count * rows for count, rows in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    advantages = tables(shuffled.advantages)
    weights = [None] * len(shapes) if shuffled.weights is None else tables(shuffled.weights)
    own = torch.cat([row_moments(table, weight) for table, weight in zip(advantages, weights, strict=True)])
    counts, means, squares = moments_of_all(own, parallel).split(1, dim=1)
    scales = (squares / (counts - 1).clamp(min=1)).sqrt().clamp(min=floor) + 1e-8
    each = [count for count, _ in shapes]
    parts = zip(advantages, means.split(each), scales.split(each), strict=True)
    return torch.cat([((table - mean) / scale).flatten() for table, mean, scale in parts])
