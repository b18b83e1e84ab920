"""PPO's loss and its gradient, as pure functions of tensors.

The gradients by the network's outputs are a few lines of calculus, and written out they spare a third of a minibatch's
time. Tests hold each of them against autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor


def policy_loss(ratio: Tensor, advantages: Tensor, clip_coef: float) -> tuple[Tensor, Tensor]:
    """The pessimistic clipped surrogate, to be minimised (detail 8), and its gradient.

        L = mean(max(-A r, -A clip(r, 1 - c, 1 + c)))        dL/d log pi = -A r / rows where the first is the larger

    Source: arXiv:1707.06347, eq. 7. Args: [rows] each. Returns: a scalar, and [rows] by the log-probability.
    """
    surrogate = advantages * ratio
    clipped = advantages * ratio.clamp(1 - clip_coef, 1 + clip_coef)
    gradient = (surrogate * (surrogate <= clipped)).mul_(-1 / len(ratio))
    return -torch.min(surrogate, clipped).mean(), gradient


def value_loss(values: Tensor, returns: Tensor) -> tuple[Tensor, Tensor]:
    """Half the mean squared error, and its gradient by the values.

    Source: arXiv:1707.06347, eq. 9. Args: [rows] each. Returns: a scalar, and [rows].
    """
    error = values - returns
    return 0.5 * error.square().mean(), error / len(error)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float) -> tuple[Tensor, Tensor]:
    """The value loss of OpenAI's code: no gain from moving more than `clip_coef` from the old value (detail 9).

        L = mean(max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)) / 2

    Args: [rows] each. Returns: a scalar, and its gradient [rows] by `values`: none where the clip holds the value
    fast and the second square is the larger.
    """
    error = values - returns
    moved = values - old_values
    squared = error.square()
    clipped_squared = (old_values + moved.clamp(-clip_coef, clip_coef) - returns).square()
    # Within the clip both squares are the same but for rounding, and the gradient is that of either.
    free = (squared >= clipped_squared) | (moved.abs() <= clip_coef)
    return 0.5 * torch.max(squared, clipped_squared).mean(), error * free / len(error)


def approximate_kl(log_ratio: Tensor, ratio: Tensor) -> Tensor:
    """KL(old | new) from samples of the old policy, with little variance and never negative.

        mean((r - 1) - log r)

    Source: Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, estimator k3.
    """
    return ((ratio - 1) - log_ratio).mean()
