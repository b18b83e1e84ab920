"""PPO's loss, the default: clipped surrogate, value loss and entropy bonus, with gradients by hand."""

from dataclasses import dataclass

from torch import Tensor

from dppo.config.parts import ResolvedPPO, reuse_clip_factor
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.losses import clipped_value_loss, policy_loss, value_loss, weighted_mean
from dppo.ppo.learning.objective import Gradients, Outputs


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
        surrogate, by_log_ratio = policy_loss(outputs.log_ratio.exp(), advantages, clip, weights)
        if ppo.clip_vloss:
            error, by_values = clipped_value_loss(
                outputs.values, batch.values, batch.returns, ppo.clip_coef, weights
            )
        else:
            error, by_values = value_loss(outputs.values, batch.returns, weights)
        if batch.share != 1.0:
            by_log_ratio *= batch.share
        by_values *= ppo.vf_coef * batch.share
        by_entropy = -ppo.ent_coef * batch.share / len(batch)
        by_entropies = by_entropy if weights is None else weights * by_entropy
        figures = {
            "policy_loss": surrogate,
            "value_loss": error,
            "entropy": weighted_mean(outputs.entropies, weights),
        }
        return Gradients(by_log_ratio, by_entropies, by_values), figures

    def _clip_around(self, importance: Tensor) -> float | Tensor:
        if self.ppo.reuse == 1:
            return self.ppo.clip_coef
        return self.ppo.clip_coef * (reuse_clip_factor(self.ppo.reuse) / importance)
