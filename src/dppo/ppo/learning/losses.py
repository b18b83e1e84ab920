"""Losses with gradients by hand: PPO's own, the default, and the parts that it is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dppo.config.parts import ResolvedPPO, reuse_clip_factor
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.objective import Gradients, Outputs

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float

    Rows = Float[Tensor, " rows"]
    LossAndGradient = tuple[Float[Tensor, ""], Rows]


def policy_loss(
    ratio: Rows, advantages: Rows, clip_coef: float | Rows, weights: Rows | None = None
) -> LossAndGradient:
    """Return the clipped surrogate loss, to be minimized (detail 8), and its gradient.

        L = mean(max(-A r, -A clip(r, 1 - c, 1 + c)))        dL/d log pi = -A r / rows where the first is the larger

    Source: arXiv:1707.06347, eq. 7. Returns: the loss, and its gradient with respect to the log-probabilities.
    Each row is multiplied by its weight, and may have its own `clip_coef`.
    """
    surrogate = advantages * ratio
    limits: Any = (1 - clip_coef, 1 + clip_coef)
    clipped = advantages * ratio.clamp(*limits)
    gradient = (surrogate * (surrogate <= clipped)).mul_(-1 / len(ratio))
    losses = torch.min(surrogate, clipped).neg_()
    return weighted_mean(losses, weights), _weighted(gradient, weights)


def value_loss(values: Rows, returns: Rows, weights: Rows | None = None) -> LossAndGradient:
    """Return half the mean squared error, and its gradient with respect to the values.

    Source: arXiv:1707.06347, eq. 9.
    """
    error = values - returns
    return 0.5 * weighted_mean(error.square(), weights), _weighted(error / len(error), weights)


def clipped_value_loss(
    values: Rows, old_values: Rows, returns: Rows, clip_coef: float, weights: Rows | None = None
) -> LossAndGradient:
    """Return OpenAI's clipped value loss (detail 9) and its gradient.

        L = mean(max((v - R)^2, (v_old + clip(v - v_old, -c, c) - R)^2)) / 2

    Returns: the loss, and its gradient with respect to `values`, which is zero where the clipped square is the larger.
    """
    error = values - returns
    moved = values - old_values
    squared = error.square()
    clipped_squared = (old_values + moved.clamp(-clip_coef, clip_coef) - returns).square()
    # Within the clipping range both squares are equal up to rounding, and so are their gradients.
    is_unclipped = (squared >= clipped_squared) | (moved.abs() <= clip_coef)
    losses = torch.max(squared, clipped_squared)
    return 0.5 * weighted_mean(losses, weights), _weighted(
        error * is_unclipped / len(error), weights
    )


def approximate_kl(
    log_ratio: Rows, ratio: Rows, importance: Rows | None = None
) -> Float[Tensor, ""]:
    """Estimate KL(old | new) from samples of the old policy; never negative, and with low variance.

        mean(w ((r - 1) - log r))

    Source: Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, estimator k3.
    Args: `importance`: w, probability under the old policy over that under the one that acted; None: all one.
    """
    return weighted_mean((ratio - 1) - log_ratio, importance)


def weighted_mean(losses: Rows, weights: Rows | None) -> Float[Tensor, ""]:
    """Return the mean of `losses` times `weights`, which must be one on average."""
    if weights is None:
        return losses.mean()
    return (losses * weights).mean()


def _weighted(gradient: Rows, weights: Rows | None) -> Rows:
    if weights is None:
        return gradient
    return gradient * weights


@dataclass(frozen=True, slots=True)
class ClippedLoss:
    """L = policy loss - ent_coef * entropy + vf_coef * value loss (detail 10).

    With `reuse`, the ratio of a row is clipped around that of the policy to update (GePPO, arXiv:2111.00072, eq. 9): a
    ratio to the policy to update has the clipping range e / r_k, with r_k the row's importance.
    """

    ppo: ResolvedPPO

    def loss(self, outputs: Outputs, batch: Batch) -> tuple[Gradients, dict[str, Tensor]]:
        ppo = self.ppo
        weights = batch.weights
        advantages = batch.advantages
        clip: float | Tensor = ppo.clip_coef
        if batch.importance is not None:
            advantages = advantages * batch.importance
            clip = self._clip_around(batch.importance)
        surrogate, grad_log_ratio = policy_loss(outputs.log_ratio.exp(), advantages, clip, weights)
        if ppo.clip_vloss:
            error, grad_values = clipped_value_loss(
                outputs.values, batch.values, batch.returns, ppo.clip_coef, weights
            )
        else:
            error, grad_values = value_loss(outputs.values, batch.returns, weights)
        if batch.share != 1.0:
            grad_log_ratio *= batch.share
        grad_values *= ppo.vf_coef * batch.share
        grad_entropy = -ppo.ent_coef * batch.share / len(batch)
        grad_entropies = grad_entropy if weights is None else weights * grad_entropy
        figures = {
            "policy_loss": surrogate,
            "value_loss": error,
            "entropy": weighted_mean(outputs.entropies, weights),
        }
        return Gradients(grad_log_ratio, grad_entropies, grad_values), figures

    def _clip_around(self, importance: Tensor) -> float | Tensor:
        if self.ppo.reuse == 1:
            return self.ppo.clip_coef
        return self.ppo.clip_coef * (reuse_clip_factor(self.ppo.reuse) / importance)
