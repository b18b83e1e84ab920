"""Minibatches of a batch, whose rows may be divided among ranks."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from dppo import streams
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.parallel import Parallel, moments_of_all
from dppo.streams import Stream


def aligned_with_ranks(batch: Batch, parallel: Parallel) -> Batch:
    """Return the batch, with weights if the batch of any rank has them: all ranks then compute equal means.

    Whether an episode terminates, and the range of rewards, become those of all ranks.
    """
    smallest, largest = batch.reward_range
    # Of each of these, the maximum over all ranks is needed; of the smallest reward, the minimum.
    facts = torch.tensor(
        [batch.weights is not None, batch.terminates, -smallest, largest],
        dtype=torch.float64,
        device=batch.logprobs.device,
    )
    largest_facts = parallel.gather(facts).amax(dim=0).tolist()
    weighted, terminates, minus_smallest, largest = largest_facts
    reward_range = (-minus_smallest, largest)
    batch = replace(batch, terminates=bool(terminates), reward_range=reward_range)
    if weighted and batch.weights is None:
        batch = replace(batch, weights=torch.ones_like(batch.logprobs))
    return batch


def minibatch_generator(seed: int, iteration: int, parallel: Parallel) -> np.random.Generator:
    """Create the generator that draws the minibatches of an update; each rank has its own."""
    index = [iteration]
    if parallel.size > 1:  # a single rank draws as a trainer in the driver does
        index.append(parallel.rank)
    return streams.generator(seed, Stream.MINIBATCHES, *index)


def draw_minibatches(
    batch: Batch,
    generator: np.random.Generator,
    count: int,
    *,
    floor: float | None,
    parallel: Parallel,
) -> Iterator[tuple[Batch, float]]:
    """Yield every sequence once, in a new order (detail 6), with the transitions per rank of each minibatch.

    Sizes differ by at most one sequence, so that none is left over. Minibatches without any transition on any rank are
    left out.

    Args:
        count: number of minibatches; at most one for each sequence.
        floor: give the advantages of each minibatch mean zero and deviation one (detail 7), or less if their deviation
            is below this; None: leave them as they are.
    """
    permutation = torch.from_numpy(generator.permutation(batch.sequences))
    shuffled = batch.take(permutation.to(batch.logprobs.device))
    count = min(count, batch.sequences)
    size, remainder = divmod(batch.sequences, count)
    larger, smaller = shuffled.split([(size + 1) * remainder, size * (count - remainder)])
    if remainder:
        yield from _equal_minibatches(larger, remainder, floor, parallel)
    yield from _equal_minibatches(smaller, count - remainder, floor, parallel)


def _equal_minibatches(
    rows: Batch, count: int, floor: float | None, parallel: Parallel
) -> Iterator[tuple[Batch, float]]:
    """Yield `count` minibatches of the same size, as `draw_minibatches` does."""
    if floor is not None:
        rows = _standardized(rows, count, floor, parallel)
    minibatches = rows.split([rows.sequences // count] * count)
    if rows.weights is not None:
        yield from _weighted(minibatches, parallel)
        return
    for minibatch in minibatches:
        yield minibatch, float(len(minibatch))


def _weighted(minibatches: list[Batch], parallel: Parallel) -> Iterator[tuple[Batch, float]]:
    """Scale the weights of each minibatch by its transitions on all ranks; leave out minibatches without any."""
    weights = [minibatch.weights for minibatch in minibatches if minibatch.weights is not None]
    counts = torch.stack([column.sum() for column in weights])
    rank_counts = parallel.gather(counts)
    totals = rank_counts.sum(dim=0).tolist()
    for minibatch, column, transitions in zip(minibatches, weights, totals, strict=True):
        if transitions:
            scale = len(minibatch) * parallel.size / transitions
            yield replace(minibatch, weights=column * scale), transitions / parallel.size


def _standardized(rows: Batch, count: int, floor: float, parallel: Parallel) -> Batch:
    """Standardize advantages within each of `count` equal minibatches of all ranks; a single transition gets zero."""
    # The minibatches form a table, whose moments are computed at once.
    table = rows.advantages.view(count, -1)
    weights = None if rows.weights is None else rows.weights.view(count, -1)
    moments = moments_of_all(table, weights, parallel)
    counts, means, squares = moments.split(1, dim=1)
    deviations = (squares / (counts - 1).clamp(min=1)).sqrt()
    divisors = deviations.clamp(min=floor) + 1e-8
    return replace(rows, advantages=((table - means) / divisors).flatten())
