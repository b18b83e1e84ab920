"""PPOTrainer: K epochs of minibatch SGD on each batch."""

import math
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dppo.config.parts import ResolvedPPO
from dppo.errors import TrainingDiverged
from dppo.ppo.exchange.records import Update
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.learning.batch import Batch, zero_batch
from dppo.ppo.learning.losses import approximate_kl, clipped_value_loss, policy_loss, value_loss, weighted_mean
from dppo.ppo.learning.model import ADAPTED, MEMORY, NONE, FlatAdam, PopArt, PPOModel, adapted_rate, free_deviations
from dppo.ppo.learning.parallel import Parallel, draw_minibatches, moments_of_all, row_moments, weighted_on_all
from dppo.ppo.learning.recompute import from_current_policy, with_new_advantages

MOST_LOG_RATIO = 20.0  # a ratio of 5e8 is clipped as any other, and products and squares of it stay finite
UNDECIDED = 0.01  # weight of the entropy bonus that is added where advantages are nothing but noise


class _Losses(NamedTuple):
    """Losses of a minibatch, as means over its transitions on this rank."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    log_ratio: Tensor
    """[rows] new minus old log-probability; zero for rows that are not transitions."""


class _Step(NamedTuple):
    """Results of one step of SGD, for the metrics of the update."""

    losses: _Losses
    grad_norm: Tensor
    """Norm of the gradient of all ranks, before clipping."""
    rows: float
    """Transitions in the minibatch, per rank."""
    importance: Tensor | None
    """[rows] of the minibatch, as in `Batch`."""


@dataclass(eq=False)
class PPOTrainer:
    """Train a model on batches. It owns the weights and the optimizer; nothing else changes them.

    It may be one of several ranks with equal numbers of rows. Advantages, gradients, early stopping and metrics then
    cover the rows of all ranks, and the weights of all ranks stay equal.
    """

    model: PPOModel
    ppo: ResolvedPPO
    _: KW_ONLY
    minibatches: int
    """In an epoch, for each iteration of a batch."""
    micro_batch_size: int | None = None
    """Most rows that go through the network at once; None for whole minibatches."""
    parallel: InitVar[Parallel | None] = None
    """The group of ranks; None to train alone."""
    sequence_length: int = 1
    """L, the steps of each sequence of a batch."""

    def __post_init__(self, parallel: Parallel | None) -> None:
        self._parallel = parallel or Parallel()
        self._parameters = self.model.parameters
        self.device = self._parameters.weights.device
        reuse, raw = self.ppo.reuse, not self.ppo.norm_adv  # the reasons are in `OffPolicyTrainer`
        memory, deviations = MEMORY * (reuse if raw else 1), free_deviations(self.model.spec)
        several = deviations.stop - deviations.start > 1
        self._optimizer = FlatAdam(self._parameters, memory, deviations if several else NONE, 1 / reuse)
        self._adapted = self.ppo.learning_rate if self.ppo.desired_kl is not None else None
        self._popart = PopArt(self.model) if self.ppo.norm_value else None

    @np.errstate(invalid="ignore", over="ignore")  # a gradient that is not finite is reported by number
    def update(self, batch: Batch, ppo: ResolvedPPO, order: np.random.Generator, *, lagged: bool = False) -> Update:
        """Train K epochs on `batch`, in minibatches drawn by `order`; those without any transition are skipped.

        Args:
            ppo: the settings as they are now, annealed; with `desired_kl`, the trainer adapts its own learning rate.
            lagged: the policy that collected is older than this one.

        Waits for: all ranks, in each minibatch.
        Returns: figures that are means over the transitions of all ranks (detail 12).

        Raise TrainingDiverged if a gradient is not finite; the weights are those from before that minibatch.
        """
        batch = batch.to(self.device)
        if self._parallel.size > 1:
            batch = weighted_on_all(batch, self._parallel)
        explained_variance = self._explained_variance(batch)
        if lagged:
            batch = from_current_policy(batch, self.model, self.rows_at_once(batch))
        if self._popart is not None:
            batch = self._popart.learn(batch, self._parallel)
        steps = self._epochs(ppo, batch, order)
        figures = self._figures(steps, ppo.clip_coef)
        figures |= {"explained_variance": explained_variance, "minibatches": float(len(steps))}
        scale = self.value_scale()
        if scale is not None:
            figures |= {"value_mean": scale.mean, "value_std": scale.std}
        return Update(figures, ppo.learning_rate if self._adapted is None else self._adapted, scale)

    def _epochs(self, ppo: ResolvedPPO, batch: Batch, order: np.random.Generator) -> list[_Step]:
        """Train K epochs, or until the KL is too large."""
        ppo = self._undecided(ppo, batch)
        steps: list[_Step] = []
        for number in range(ppo.update_epochs):
            if number and batch.gae_inputs is not None:
                batch = with_new_advantages(batch, self.model, self.rows_at_once(batch), self.value_scale())
            count, floor = self.minibatches * batch.iterations, _advantage_std_floor(ppo, batch)
            epoch = draw_minibatches(batch, order, count, floor=floor, parallel=self._parallel)
            for minibatch, rows in epoch:
                steps.append(self._step(ppo, minibatch, rows, len(steps)))
            if ppo.target_kl and steps and self._kl(steps[-1]) > ppo.target_kl:
                break
        return steps

    def _undecided(self, ppo: ResolvedPPO, batch: Batch) -> ResolvedPPO:
        """Return the settings with a bonus that keeps discrete actions open where no reward came.

        It grows as the deviation of all advantages falls below half of the floor. However small gradients of noise are,
        Adam divides by their size: without the bonus, a policy drifts and becomes certain before its first reward.
        """
        floor = _advantage_std_floor(ppo, batch)
        if not floor or any(batch.rewards) or not self.model.spec.distribution.integer:
            return ppo
        own = row_moments(batch.advantages[None], None if batch.weights is None else batch.weights[None])
        count, _, squares = moments_of_all(own, self._parallel)[0].tolist()
        share = max(0.0, 1 - 2 * math.sqrt(squares / max(1.0, count - 1)) / floor)
        return replace(ppo, ent_coef=ppo.ent_coef + UNDECIDED * share)

    def value_scale(self) -> ValueScale | None:
        """Return the unit of the model's values; None: that of rewards."""
        return None if self._popart is None else self._popart.scale

    def rows_at_once(self, batch: Batch) -> int:
        """Return the most rows that go through the network at once."""
        return self.micro_batch_size or math.ceil(len(batch) / (self.minibatches * batch.iterations))

    # ------------------------------------------------------------------ one step

    def _step(self, ppo: ResolvedPPO, minibatch: Batch, rows: float, number: int) -> _Step:
        """Take one step of SGD on a minibatch of `rows` transitions per rank, with one sum over all ranks."""
        losses = self._gradient(ppo, minibatch)
        with torch.no_grad():
            self.sum_gradients()
            gradient, ranks = self._parameters.gradient, self._parallel.size
            norm = torch.linalg.vector_norm(gradient) / ranks
            length = norm.item()
            if not math.isfinite(length):
                raise _diverged(minibatch, number, losses, length)
            # Clip (detail 11) and average over the ranks in at most one pass over memory.
            factor = min(1.0, ppo.max_grad_norm / (length + 1e-6)) / ranks
            if factor != 1.0:
                gradient.mul_(factor)
            step, learning_rate = _Step(losses, norm, rows, minibatch.importance), ppo.learning_rate
            if self._adapted is not None and ppo.desired_kl is not None:
                if number > 0:  # before the first step the KL is zero: ratios are measured from the policy to update
                    self._adapted = adapted_rate(self._adapted, self._kl(step), ppo.desired_kl)
                learning_rate = self._adapted
            self._optimizer.step(learning_rate)
        return step

    def sum_gradients(self) -> None:
        """Replace the gradient by its sum over all ranks."""
        self._parallel.sum_(self._parameters.gradient)

    def rehearse(self, rows: int) -> None:
        """Run forward and backward on `rows` rows of zeros, to measure the time; the weights do not change.

        With memory, the rows are whole sequences: fewer, or one.
        """
        batch = zero_batch(self.model.spec, max(1, rows // self.sequence_length), self.sequence_length)
        self._gradient(self.ppo, batch.to(self.device))

    def _backward(self, ppo: ResolvedPPO, rows: Batch, share: float = 1.0) -> _Losses:
        """Compute `share` times the gradient of the mean loss over `rows`."""
        weights = rows.weights
        scored = self.model.forward(rows.obs, rows.actions, rows.masks, rows.recurrent)
        with torch.no_grad():
            log_ratio = scored.policy.logprobs - rows.logprobs
            log_ratio -= (log_ratio - MOST_LOG_RATIO).clamp_(min=0)  # an infinite one becomes nan, which is reported
            if weights is not None:
                log_ratio = torch.where(weights > 0, log_ratio, 0.0)
            advantages = rows.advantages if rows.importance is None else rows.advantages * rows.importance
            clip = ppo.clip_coef if rows.clip is None else ppo.clip_coef * rows.clip
            pi_loss, by_logprobs = policy_loss(log_ratio.exp(), advantages, clip, weights)
            if ppo.clip_vloss:
                v_loss, by_values = clipped_value_loss(scored.values, rows.values, rows.returns, ppo.clip_coef, weights)
            else:
                v_loss, by_values = value_loss(scored.values, rows.returns, weights)
            entropy = weighted_mean(scored.policy.entropies, weights)
            # loss = policy - ent_coef * entropy + vf_coef * value (detail 10)
            if share != 1.0:
                by_logprobs *= share
            by_each = -ppo.ent_coef * share / len(rows)
            by_entropies = by_each if weights is None else weights * by_each
            by_values *= ppo.vf_coef * share
        self.model.backward(scored, by_logprobs, by_entropies, by_values)
        return _Losses(pi_loss, v_loss, entropy, log_ratio)

    def _gradient(self, ppo: ResolvedPPO, minibatch: Batch) -> _Losses:
        """Compute the gradient of a minibatch's loss, at once or in pieces of at most `micro_batch_size` rows."""
        if self.micro_batch_size is None or len(minibatch) <= self.micro_batch_size:
            return self._backward(ppo, minibatch)
        return self._sum_of_pieces(ppo, minibatch, list(minibatch.pieces(self.micro_batch_size)))

    def _sum_of_pieces(self, ppo: ResolvedPPO, minibatch: Batch, pieces: list[Batch]) -> _Losses:
        shares = [len(piece) / len(minibatch) for piece in pieces]
        losses, total = [], torch.empty(0)
        for number, (piece, share) in enumerate(zip(pieces, shares, strict=True)):
            losses.append(self._backward(ppo, piece, share))
            gradient = self._parameters.gradient
            total = total.add_(gradient) if number else gradient.clone()
        self._parameters.gradient.copy_(total)
        *columns, log_ratios = zip(*losses, strict=True)
        means = [torch.stack([loss * share for loss, share in zip(one, shares, strict=True)]).sum() for one in columns]
        return _Losses._make([*means, torch.cat(log_ratios)])

    # ------------------------------------------------------------------ metrics of all ranks

    def _kl(self, step: _Step) -> float:
        """Return the approximate KL of a minibatch over all ranks, so that all ranks stop together."""
        log_ratio = step.losses.log_ratio
        kl = approximate_kl(log_ratio, log_ratio.exp(), step.importance) * (len(log_ratio) / step.rows)
        return float(self._parallel.gather(kl).mean())

    def _figures(self, steps: list[_Step], clip_coef: float) -> dict[str, float]:
        """Return means over the transitions of all steps and ranks; nan if there are none.

        Called once per update, because computing them in each minibatch costs as much as a layer.
        """
        names = ("policy_loss", "value_loss", "entropy", "grad_norm", "approx_kl", "old_approx_kl", "clipfrac")
        if not steps:
            return dict.fromkeys(names, math.nan)
        columns = zip(*((*step.losses[:3], step.grad_norm) for step in steps), strict=True)
        per_step = torch.stack([torch.stack(column) for column in columns])
        rows = torch.tensor([step.rows for step in steps], dtype=torch.float32, device=self.device)
        log_ratio = torch.cat([step.losses.log_ratio for step in steps])
        ratio, importance = log_ratio.exp(), None
        if steps[0].importance is not None:
            importance = torch.cat([step.importance for step in steps if step.importance is not None])
        clipped = ((ratio - 1).abs() > clip_coef).to(ratio.dtype).mean()
        # Rows that are not transitions have ratio one: they add nothing to the sums, and are not counted.
        share = len(log_ratio) / sum(step.rows for step in steps)
        kls = approximate_kl(log_ratio, ratio, importance), -weighted_mean(log_ratio, importance)
        of_ratios = torch.stack([*kls, clipped]) * share
        means = torch.cat([per_step @ rows.to(per_step.dtype) / rows.sum(), of_ratios])
        return dict(zip(names, self._parallel.gather(means).mean(dim=0).tolist(), strict=True))

    def _explained_variance(self, batch: Batch) -> float:
        """Return 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 is no better than a constant."""
        both = torch.stack([batch.returns - batch.values, batch.returns])
        own = row_moments(both, None if batch.weights is None else batch.weights.expand_as(both))
        residual, total = moments_of_all(own, self._parallel)[:, 2].tolist()
        return 1 - residual / total if total > 0 else math.nan

    # ------------------------------------------------------------------ weights and state

    def weights(self, *, copy: bool = True) -> np.ndarray:
        """Return all weights [P] in the order of `NetworkSpec.shapes`; without `copy`, updates overwrite them."""
        weights: np.ndarray = self._parameters.weights.numpy(force=True)
        return weights.copy() if copy else weights

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return both moments [P], the number of steps and an adapted learning rate; `copy` as in `weights`."""
        state = self._optimizer.state()
        if self._adapted is not None:
            state[ADAPTED] = np.array(self._adapted)
        if self._popart is not None:
            state |= self._popart.state()
        return {name: array.copy() for name, array in state.items()} if copy else state

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore `weights` [P] and the optimizer's state."""
        with torch.no_grad():
            self._parameters.weights.copy_(torch.tensor(weights))
        self._optimizer.load(state)
        if self._adapted is not None:
            self._adapted = float(state.get(ADAPTED, self.ppo.learning_rate))
        if self._popart is not None:
            self._popart.load(state)


def _advantage_std_floor(ppo: ResolvedPPO, batch: Batch) -> float | None:
    """Return the smallest deviation that the advantages of a batch are divided by; None if they are not divided."""
    if not ppo.norm_adv:
        return None
    return ppo.adv_floor if ppo.norm_reward and not batch.informed else 0.0


def _diverged(minibatch: Batch, number: int, losses: _Losses, norm: float) -> TrainingDiverged:
    """Return an error that describes the minibatch of SGD step `number` of its update, and its gradient's norm."""
    leaves = minibatch.obs if isinstance(minibatch.obs, dict) else {"": minibatch.obs}
    columns = {f"obs {name}".rstrip(): leaf.double() for name, leaf in leaves.items()}  # uint16 has no min() in torch
    columns |= {"advantages": minibatch.advantages, "returns": minibatch.returns}
    ranges = [f"{name} from {float(one.min()):.3g} to {float(one.max()):.3g}" for name, one in columns.items()]
    return TrainingDiverged(
        f"SGD step {number} of this update has policy loss {losses.policy_loss.item():.3g}, value loss "
        f"{losses.value_loss.item():.3g} and gradient norm {norm:.3g}; the weights from before it are kept. The "
        f"minibatch of {len(minibatch)} rows has {', '.join(ranges)}. Lower `learning_rate`, or turn on "
        f"`norm_obs` and `norm_reward` if these numbers are large."
    )
