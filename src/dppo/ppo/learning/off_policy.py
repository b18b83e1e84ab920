"""OffPolicyTrainer: PPO on the segments of several policies, the newest of which is to be updated (GePPO)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from dppo.config.parts import ResolvedPPO, reuse_clip_factor
from dppo.ppo.exchange.records import Segment, Update
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.learning.batch import Batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.recompute import estimates, from_current_policy
from dppo.ppo.learning.trainer import MOST_LOG_RATIO, PPOTrainer

FACTOR = "rate_factor"  # its name in the state
CHANGE = 1.03  # of the learning rate after an update
LOWEST, HIGHEST = 0.01, 1.0  # of the factor of the learning rate; a solved task moves little, and would raise it


class OffPolicyTrainer:
    """Lets a PPOTrainer train on batches that hold rows of older policies, and adapts its learning rate.

    With r = pi / pi_old, and r_k = pi_k / pi_old of the policy before the update, the loss of a row is

        max(-A r, -A clip(r, r_k - e, r_k + e)),  e = 2 c / (R + 1)

    With ratios from pi_k this is r_k times the loss of PPO with the clipping range e / r_k, and is computed so.
    Advantages are those of V-trace with the values of the current network. The learning rate changes by 3 % after an
    update, to keep the total variation distance of the policies before and after it between e / 4 and e / 2.

    R times as many SGD steps follow an env step as without reuse. The trainer makes two things follow env steps all the
    same. Where advantages are not standardized, Adam's v is a mean of R times as many steps: in a quiet stretch of long
    episodes, it would else fall to the noise, and the next event change the policy too much. And free deviations of two
    numbers or more take 1 / R of each step, so that the policy explores for as long. (That of one number starts at 1.)

    Source: Queeney, Paschalidis, Cassandras, arXiv:2111.00072, eq. 9, algorithm 1, with uniform weights of policies.
    Deviation: r_k is limited to 2, and advantages are standardized before they are weighted, as with policy lag.
    """

    def __init__(self, trainer: PPOTrainer, parallel: Parallel | None = None) -> None:
        """Wrap `trainer`, which may be one of several ranks of `parallel`."""
        self._trainer, self._parallel, self.model = trainer, parallel or Parallel(), trainer.model
        self.weights, self.rehearse, self.sum_gradients = trainer.weights, trainer.rehearse, trainer.sum_gradients
        self._width, self._factor = reuse_clip_factor(trainer.ppo.reuse), 1.0

    def update(self, batch: Batch, ppo: ResolvedPPO, order: np.random.Generator, *, lagged: bool = False) -> Update:
        """Do `PPOTrainer.update`, `lagged` or not; `clipfrac` is that of the policy after the update."""
        trainer = self._trainer
        batch, rows = batch.to(trainer.device), trainer.rows_at_once(batch)
        batch = of_several_policies(batch, self.model, rows, trainer.value_scale(), self._width)
        if not ppo.recompute_advantages:
            batch = replace(batch, gae_inputs=None)
        update = trainer.update(batch, replace(ppo, learning_rate=ppo.learning_rate * self._factor), order)
        clip = ppo.clip_coef * self._width
        distance, outside = self._moved(batch, rows, clip)
        self._factor = adapted_factor(self._factor, distance, clip)
        return replace(update, figures=update.figures | {"clipfrac": outside, "total_variation": distance})

    def _moved(self, batch: Batch, rows: int, clip: float) -> tuple[float, float]:
        """Return half the mean of |r - r_k| over all transitions, and the share where it exceeds `clip`."""
        assert batch.importance is not None
        log_ratio = self.model.log_probs(batch.pieces(rows)) - batch.logprobs
        moved = batch.importance * (log_ratio.clamp(max=MOST_LOG_RATIO).exp() - 1).abs()  # 0 times infinity is nan
        counted = torch.ones_like(moved) if batch.weights is None else batch.weights
        moved = torch.where(counted > 0, moved, 0.0)
        own = torch.stack([moved.sum() / 2, (moved > clip).to(moved.dtype).sum(), counted.sum()])
        distance, outside, count = self._parallel.gather(own).sum(dim=0).tolist()
        return distance / max(1.0, count), outside / max(1.0, count)

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return the state of the trainer, and the factor of its learning rate."""
        return self._trainer.state(copy=copy) | {FACTOR: np.array(self._factor)}

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore `weights` [P] and the result of `state`."""
        self._trainer.load(weights, state)
        self._factor = float(state.get(FACTOR, 1.0))


def of_several_policies(batch: Batch, model: PPOModel, rows: int, scale: ValueScale | None, width: float) -> Batch:
    """Return the batch with ratios, advantages, returns and values by `model`, at most `rows` at once, and clips.

    `scale`: the unit of the values of `model`. `width`: clipping range of its own rows, relative to `clip_coef`.
    """
    batch = from_current_policy(batch, model, rows)
    inputs, importance = batch.gae_inputs, batch.importance
    assert inputs is not None and importance is not None  # noqa: PT018
    traces = importance.clamp(max=1).numpy(force=True)
    batch = replace(batch, gae_inputs=replace(inputs, traces=traces), clip=width / importance)
    values, advantages, returns = estimates(batch, model, rows, scale)
    return replace(batch, values=values, advantages=advantages, returns=returns)


def adapted_factor(factor: float, distance: float, clip: float) -> float:
    """Return the factor of the learning rate after an update that moved the policy by this total variation distance."""
    if distance > clip / 2:
        return max(LOWEST, factor / CHANGE)
    return min(HIGHEST, factor * CHANGE) if distance < clip / 4 else factor


def joined(segments: Sequence[Segment]) -> Segment:
    """Return successive segments of one sampler as one, so that advantages count on all that followed an older row.

    Where a segment does not start from the observation that the one before led to, as after a loss, the older episode
    counts as truncated there.
    """
    columns = {
        name: np.concatenate([getattr(one, name) for one in segments])
        for name in Segment.__slots__
        if getattr(segments[0], name) is not None
    }
    end = -1
    for one, following in pairwise(segments):
        end += len(one.values)
        assert one.successors is not None, "a segment to join needs its successors"
        starts = following.obs[0]
        both = zip(one.successors[-len(starts) :], starts, strict=True)  # those of the last row are the last
        anew = [last.tobytes() != start.tobytes() for last, start in both]
        columns["truncated"][end] |= anew & ~one.terminated[-1]
    whole = Segment(**columns)
    missing = whole.followed[np.concatenate([one.followed for one in segments])]  # others are rows by now
    left = {name: columns[name][missing] for name in ("successors", "successor_states") if name in columns}
    return replace(whole, **left)
