"""Parallel: the collective operations of trainers that train one model together, and the moments of all their rows."""

import torch
from torch import Tensor


class Parallel:
    """A group of ranks with equal models, each training on its own share of the rows; here, a single rank."""

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

    `weights`: [k, n] or [n], one for samples that count and zero for others; None if all count. Without any sample that
    counts, the mean is 0.
    """
    if weights is not None:
        return _weighted_row_moments(samples, weights)
    means = samples.mean(dim=1)
    squares = (samples - means.unsqueeze(1)).square().sum(dim=1)
    return torch.stack([torch.full_like(means, samples.shape[1]), means, squares], dim=1)


def _weighted_row_moments(samples: Tensor, weights: Tensor) -> Tensor:
    weights = weights.to(samples.dtype).expand_as(samples)
    counts = weights.sum(dim=1)
    means = (weights * samples).sum(dim=1) / counts.clamp(min=1)
    squares = (weights * (samples - means.unsqueeze(1)).square()).sum(dim=1)
    return torch.stack([counts, means, squares], dim=1)


def moments_of_all(samples: Tensor, weights: Tensor | None, parallel: Parallel) -> Tensor:
    """Return the moments [k, 3] of the samples of all ranks, as `row_moments` does."""
    moments = row_moments(samples, weights)
    if parallel.size == 1:
        return moments
    return merged_moments(parallel.gather(moments))


def merged_moments(parts: Tensor) -> Tensor:
    """Merge the moments of several parts: [parts, k, 3] -> [k, 3].

    mean = sum(n_i mean_i) / n        M2 = sum(M2_i + n_i (mean_i - mean)^2)

    Source: Chan, Golub, LeVeque (1979), like `dppo.ppo.exchange.scales.Moments.merge`, for any number of parts.
    """
    counts, means, squares = parts.unbind(dim=2)  # [parts, k]
    count = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / count.clamp(min=1)
    return torch.stack(
        [count, mean, (squares + counts * (means - mean).square()).sum(dim=0)], dim=1
    )
