"""SPO's loss: the probability ratio is held back by a quadratic penalty instead of a clip."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dppo.config.parts import ResolvedPPO
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.losses import weighted_mean
from dppo.ppo.learning.objective import Gradients, Outputs, differentiable, gradients_by_autograd


@dataclass(frozen=True, slots=True)
class SPOLoss:
    """Simple Policy Optimization: the surrogate with a penalty, the squared error of values, the entropy bonus.

        L = -mean(A r - |A| / (2 c) (r - 1)^2) - ent_coef * mean(H) + vf_coef * mean((v - R)^2) / 2

    For each row, the maximum of A r - |A| / (2 c) (r - 1)^2 is at r = 1 + c if A > 0, and at r = 1 - c if A < 0. The
    gradient of a ratio beyond that leads back, where that of PPO's clipped loss is zero.

    Source: Xie et al., "Simple Policy Optimization", arXiv:2401.16025; c is `clip_coef`.
    """

    ppo: ResolvedPPO

    def loss(self, outputs: Outputs, batch: Batch) -> tuple[Gradients, dict[str, Tensor]]:
        advantages = batch.advantages
        if batch.importance is not None:
            advantages = advantages * batch.importance
        with torch.enable_grad():
            outputs = differentiable(outputs)
            ratio = outputs.log_ratio.exp()
            penalty = advantages.abs() / (2 * self.ppo.clip_coef) * (ratio - 1).square()
            policy_loss = -weighted_mean(advantages * ratio - penalty, batch.weights)
            value_loss = weighted_mean((outputs.values - batch.returns).square(), batch.weights) / 2
            entropy = weighted_mean(outputs.entropies, batch.weights)
            loss = policy_loss - self.ppo.ent_coef * entropy + self.ppo.vf_coef * value_loss
        gradients = gradients_by_autograd(loss, outputs, batch)
        figures = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
        return gradients, {name: figure.detach() for name, figure in figures.items()}
