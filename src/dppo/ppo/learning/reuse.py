"""Sample reuse: training on the segments of several policies, the newest of which is to be updated (GePPO)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import torch

from dppo.config.parts import PPO, ResolvedPPO, reuse_clip_factor
from dppo.ppo.exchange.records import Experience, Segment
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.objective import MAX_LOG_RATIO
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.stages import CurrentNetwork, Stage, estimate_again, from_current_policy

FACTOR = "rate_factor"  # name of the factor in the state
CHANGE = 1.03  # factor by which the learning rate changes after an update
MIN_FACTOR = 0.01
MAX_FACTOR = 1.0  # a solved task moves little, and would raise the learning rate


@dataclass(eq=False)
class OlderPolicies(Stage):
    """Trains on rows of older policies, and adapts the learning rate to the distance that an update moves the policy.

    With r = pi / pi_old, and r_k = pi_k / pi_old of the policy before the update, the loss of a row is

        max(-A r, -A clip(r, r_k - e, r_k + e)),  e = 2 c / (R + 1)

    With ratios from pi_k this is r_k times the loss of PPO with the clipping range e / r_k; `ClippedLoss` computes this
    product. Advantages are those of V-trace with the values of the current network. The learning rate changes by 3 %
    after an update, to keep the total variation distance of the policies before and after it between e / 4 and e / 2.

    Source: Queeney, Paschalidis, Cassandras, arXiv:2111.00072, eq. 9, algorithm 1, with uniform weights of policies.
    Deviation: r_k is limited to 2, and advantages are standardized before they are weighted, as with policy lag.
    """

    ppo: PPO
    parallel: Parallel = field(default_factory=Parallel)
    rate_factor: float = 1.0

    def settings(self, ppo: ResolvedPPO) -> ResolvedPPO:
        return replace(ppo, learning_rate=ppo.learning_rate * self.rate_factor)

    def prepare(self, batch: Batch, network: CurrentNetwork, experience: Experience) -> Batch:
        """Return the batch with ratios, advantages, returns and values by the policy to update."""
        batch = from_current_policy(batch, network)
        estimates = estimate_again(batch, network, experience, self.ppo)
        return replace(
            batch,
            values=estimates.values,
            advantages=estimates.advantages,
            returns=estimates.returns,
        )

    def finish(self, batch: Batch, network: CurrentNetwork, ppo: ResolvedPPO) -> dict[str, float]:
        """Adapt the learning rate; return how far the policy has moved from `pi_k`, over the rows of all ranks."""
        clip = ppo.clip_coef * reuse_clip_factor(ppo.reuse)
        distance, clipfrac = self._moved(batch, network, clip)
        self.rate_factor = adapted_factor(self.rate_factor, distance, clip)
        return {"clipfrac": clipfrac, "total_variation": distance}

    def _moved(self, batch: Batch, network: CurrentNetwork, clip: float) -> tuple[float, float]:
        """Return half the mean of |r - r_k| over all transitions, and the share where it exceeds `clip`."""
        assert batch.importance is not None
        log_ratio = network.log_probs(batch) - batch.logprobs
        # an importance of 0 times infinity would be nan
        ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
        moved = batch.importance * (ratio - 1).abs()
        weights = batch.weights
        if weights is None:
            weights = torch.ones_like(moved)
        moved = torch.where(weights > 0, moved, 0.0)
        outside = (moved > clip).to(moved.dtype)
        sums = torch.stack([moved.sum() / 2, outside.sum(), weights.sum()])
        distance, num_outside, count = self.parallel.gather(sums).sum(dim=0).tolist()
        count = max(1.0, count)
        return distance / count, num_outside / count

    def state(self) -> dict[str, np.ndarray]:
        return {FACTOR: np.array(self.rate_factor)}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Restore the factor of the learning rate; one without it."""
        self.rate_factor = float(state.get(FACTOR, 1.0))


def adapted_factor(factor: float, distance: float, clip: float) -> float:
    """Return the factor of the learning rate after an update that moved the policy by this total variation distance."""
    if distance > clip / 2:
        return max(MIN_FACTOR, factor / CHANGE)
    if distance < clip / 4:
        return min(MAX_FACTOR, factor * CHANGE)
    return factor


def joined(segments: Sequence[Segment]) -> Segment:
    """Join successive segments of a sampler, so that the advantages of old rows include all later rows.

    Where a segment does not start from the last successor of the previous one, as after a loss, the older episode
    counts as truncated there.
    """
    columns = {
        name: np.concatenate([getattr(segment, name) for segment in segments])
        for name in Segment.__slots__
        if all(getattr(segment, name) is not None for segment in segments)
    }
    end = -1
    for segment, following in pairwise(segments):
        end += len(segment.values)
        assert segment.successors is not None, "a segment to join needs its successors"
        starts = following.obs[0]
        led_to = segment.successors[-len(starts) :]  # the successors of the last row are the last
        restarted = [
            last.tobytes() != start.tobytes() for last, start in zip(led_to, starts, strict=True)
        ]
        columns["truncated"][end] |= restarted & ~segment.terminated[-1]
    joined_segment = Segment(**columns)
    # Successors that are rows of the whole segment are left out.
    missing = joined_segment.followed[np.concatenate([segment.followed for segment in segments])]
    successors = {
        name: columns[name][missing]
        for name in ("successors", "successor_states")
        if name in columns
    }
    return replace(joined_segment, **successors)
