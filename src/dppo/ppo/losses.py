"""PPO's loss, as pure functions of tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def standardize(advantages: Tensor) -> Tensor:
    """Mean zero, deviation one, over the rows given (detail 7). [rows] -> [rows]."""
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def policy_loss(ratio: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """The pessimistic clipped surrogate, to be minimised (detail 8).

        mean(max(-A r, -A clip(r, 1 - c, 1 + c)))

    Source: arXiv:1707.06347, eq. 7. Args: [rows] each. Returns: a scalar.
    """
    unclipped = advantages * ratio
    clipped = advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(unclipped, clipped).mean()


def value_loss(values: Tensor, returns: Tensor) -> Tensor:
    """Half the mean squared error. [rows] each -> a scalar. Source: arXiv:1707.06347, eq. 9."""
    return 0.5 * (values - returns).square().mean()


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float) -> Tensor:
    """The value loss of OpenAI's code: no gain from moving more than `clip_coef` from the old value (detail 9)."""
    clipped = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    return 0.5 * torch.max((values - returns).square(), (clipped - returns).square()).mean()


def approximate_kl(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """KL(old | new) from samples of the old policy, with little variance and never negative.

        mean((r - 1) - log r)

    Source: Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, estimator k3.
    """
    return ((ratio - 1) - log_ratio).mean()


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant; nan where nothing varies."""
    variance = float(returns.var(correction=0))
    return 1 - float((returns - values).var(correction=0)) / variance if variance > 0 else float("nan")
