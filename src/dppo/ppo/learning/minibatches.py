"""Minibatches of a batch, whose rows may be divided among ranks."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.parallel import Parallel, moments_of_all, row_moments


def aligned_with_ranks(batch: Batch, parallel: Parallel) -> Batch:
    """Return the batch with weights if that of any rank has them, so that all ranks compute the same means.

    Whether an episode terminates, and the range of rewards, become those of all ranks.
    """
    smallest, largest = batch.rewards
    # Of each of these, the maximum over all ranks is needed; of the smallest reward, the minimum.
    facts = torch.tensor(
        [batch.weights is not None, batch.terminates, -smallest, largest],
        dtype=torch.float64,
        device=batch.logprobs.device,
    )
    of_all = parallel.gather(facts).amax(dim=0).tolist()
    weighted, terminates, minus_smallest, largest = of_all
    rewards = (-minus_smallest, largest)
    batch = replace(batch, terminates=bool(terminates), rewards=rewards)
    if weighted and batch.weights is None:
        batch = replace(batch, weights=torch.ones_like(batch.logprobs))
    return batch


def moments_of_rows(samples: Tensor, batch: Batch, parallel: Parallel) -> Tensor:
    """Return the moments [k, 3] of `samples` [k, B] over the transitions of all ranks."""
    weights = batch.weights
    if weights is not None:
        weights = weights.to(samples.dtype).expand_as(samples)
    return moments_of_all(row_moments(samples, weights), parallel)


def draw_minibatches(
    batch: Batch, order: np.random.Generator, count: int, *, floor: float | None, parallel: Parallel
) -> Iterator[tuple[Batch, float]]:
    """Yield every sequence once, in a new order (detail 6), with the transitions per rank of each minibatch.

    Sizes differ by at most one sequence, so that none is left over. Minibatches without any transition on any rank are
    left out.

    Args:
        count: number of minibatches; at most one for each sequence.
        floor: give the advantages of each minibatch mean zero and deviation one (detail 7), or less if their deviation
            is below this; None: leave them as they are.
    """
    permutation = torch.from_numpy(order.permutation(batch.sequences))
    shuffled = batch.take(permutation.to(batch.logprobs.device))
    count = min(count, batch.sequences)
    size, remainder = divmod(batch.sequences, count)
    sizes = [size + 1] * remainder + [size] * (count - remainder)
    if floor is not None:
        advantages = _standardized(shuffled, sizes, floor, parallel)
        shuffled = replace(shuffled, advantages=advantages)
    minibatches = shuffled.split(sizes)
    if batch.weights is not None:
        yield from _weighted(minibatches, parallel)
        return
    for minibatch in minibatches:
        yield minibatch, float(len(minibatch))


def _weighted(minibatches: list[Batch], parallel: Parallel) -> Iterator[tuple[Batch, float]]:
    """Scale the weights of each minibatch by its transitions on all ranks; leave out minibatches without any."""
    weights = [minibatch.weights for minibatch in minibatches if minibatch.weights is not None]
    counts = torch.stack([column.sum() for column in weights])
    of_ranks = parallel.gather(counts)
    totals = of_ranks.sum(dim=0).tolist()
    for minibatch, column, transitions in zip(minibatches, weights, totals, strict=True):
        if transitions:
            scale = len(minibatch) * parallel.size / transitions
            yield replace(minibatch, weights=column * scale), transitions / parallel.size


def _standardized(shuffled: Batch, sizes: list[int], floor: float, parallel: Parallel) -> Tensor:
    """Standardize advantages [rows] within each minibatch of all ranks; that of a single transition becomes zero."""
    # Minibatches of one size form a table [minibatches, rows], whose moments are computed at once.
    tables = [(count, size * shuffled.sequence_length) for size, count in Counter(sizes).items()]
    lengths = [count * rows for count, rows in tables]
    weights: Sequence[Tensor | None] = [None] * len(tables)
    if shuffled.weights is not None:
        weights = shuffled.weights.split(lengths)
    standardized = []
    parts = zip(shuffled.advantages.split(lengths), weights, tables, strict=True)
    for advantages, weight, table in parts:
        weights_in_table = None if weight is None else weight.view(table)
        rows = _standardized_rows(advantages.view(table), weights_in_table, floor, parallel)
        standardized.append(rows)
    return torch.cat(standardized)


def _standardized_rows(
    advantages: Tensor, weights: Tensor | None, floor: float, parallel: Parallel
) -> Tensor:
    """Standardize each row of a table of minibatches; return the rows one after the other."""
    moments = moments_of_all(row_moments(advantages, weights), parallel)
    counts, means, squares = moments.split(1, dim=1)
    deviations = (squares / (counts - 1).clamp(min=1)).sqrt()
    divisors = deviations.clamp(min=floor) + 1e-8
    return ((advantages - means) / divisors).flatten()
