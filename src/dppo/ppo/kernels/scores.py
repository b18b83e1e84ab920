"""Scores of actions with gradients written by hand: autograd's bookkeeping takes longer than the arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dppo.ppo.distributions.base import HALF_LOG_TWO_PI, ScoresWithGradient

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float, Int64


def categorical_scores(
    head: Float[Tensor, "rows n"], actions: Int64[Tensor, " rows"]
) -> ScoresWithGradient:
    """Score choices, given logits.

    d log pi(a) / d logits = onehot(a) - p        dH / d logits = -p (log p + H)
    """
    log_probs = head.log_softmax(dim=1)
    probs = log_probs.exp()
    column = actions.unsqueeze(1)
    entropies = -(probs * log_probs).sum(dim=1)

    def gradient(grad_logprobs: Tensor, grad_entropies: Tensor | float) -> Tensor:
        weight = grad_logprobs.unsqueeze(1)
        grad_head = log_probs + entropies.unsqueeze(1)
        grad_head.mul_(_as_column(grad_entropies))
        grad_head.add_(weight).mul_(probs).neg_()
        return grad_head.scatter_add_(1, column, weight)

    return ScoresWithGradient(log_probs.gather(1, column).squeeze(1), entropies, gradient)


def gaussian_scores(
    head: Float[Tensor, "rows 2*A"], actions: Float[Tensor, "rows A"]
) -> ScoresWithGradient:
    """Score independent normal variables, given [mean, log std].

    z = (a - mean) / std        d log pi / d mean = z / std        d log pi / d log std = z^2 - 1
    H = sum(log std) + const    dH / d log std = 1
    """
    size = actions.shape[1]
    mean, log_std = head.split(size, dim=1)
    std = log_std.exp()
    z = (actions - mean).div_(std)
    squared = z.square()
    logprobs = squared.mul(-0.5).sub_(log_std + HALF_LOG_TWO_PI).sum(dim=1)
    entropies = (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(dim=1)

    def gradient(grad_logprobs: Tensor, grad_entropies: Tensor | float) -> Tensor:
        weight = grad_logprobs.unsqueeze(1)
        grad_head = head.new_empty(head.shape)
        torch.mul(weight, z, out=grad_head[:, :size]).div_(std)
        torch.sub(squared, 1, out=grad_head[:, size:]).mul_(weight).add_(_as_column(grad_entropies))
        return grad_head

    return ScoresWithGradient(logprobs, entropies, gradient)


def _as_column(grad_entropies: Tensor | float) -> Tensor | float:
    """Make a vector [rows] a column, and leave a number as it is."""
    if isinstance(grad_entropies, Tensor):
        return grad_entropies.unsqueeze(1)
    return grad_entropies
