"""Count, mean and sum of squared deviations of tensors, and their exact merge over ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from dppo.ppo.learning.parallel import Parallel


def moments_of(samples: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return [count, mean, M2] of each row of `samples`: [k, n] -> [k, 3].

    Args:
        weights: [k, n], one for samples that count and zero for others; None if all count. Without any, the mean is 0.
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

    Source: Chan, Golub, LeVeque (1979), like `dppo.ppo.exchange.normalizer.Moments.merge`, for any number of parts.
    """
    counts, means, squares = parts.unbind(dim=2)  # [parts, k]
    count = counts.sum(dim=0)
    mean = (counts * means).sum(dim=0) / count.clamp(min=1)
    return torch.stack([count, mean, (squares + counts * (means - mean).square()).sum(dim=0)], dim=1)
