"""PPOTrainer: K epochs of minibatch SGD on a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dppo.errors import TrainingDiverged
from dppo.ppo.adam import FlatAdam
from dppo.ppo.architecture import ModelSpec
from dppo.ppo.batch import Batch
from dppo.ppo.losses import approximate_kl, clipped_value_loss, policy_loss, value_loss
from dppo.ppo.model import FlatParameters, PPOModel
from dppo.ppo.moments import merged_moments, moments_of
from dppo.ppo.parallel import Alone, Parallel


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """What an update does; the meaning of each is in `dppo.config.Config`."""

    update_epochs: int
    minibatches: int
    micro_batch_size: int | None
    norm_adv: bool
    clip_coef: float
    clip_vloss: bool
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    target_kl: float | None


class _Step(NamedTuple):
    """What a step of SGD leaves behind for the figures of its update: means over its rows on this rank."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    grad_norm: Tensor
    """Of all ranks, before clipping."""
    log_ratio: Tensor
    """[rows] new minus old log-probability."""


class PPOTrainer:
    """Owns the model's weights and the optimiser; nothing else changes them.

    May be one of several ranks, each with as many rows as the others: then advantages, gradients, early stop and
    figures are those of all rows together, and the weights of all ranks stay equal.
    """

    def __init__(
        self,
        spec: ModelSpec,
        seed: int,
        options: TrainerOptions,
        *,
        device: str = "cpu",
        parallel: Parallel | None = None,
    ) -> None:
        self.model = PPOModel(spec, seed).to(device)
        self.options = options
        self.device = torch.device(device)
        self._parallel = parallel or Alone()
        self._distribution = spec.distribution
        self._parameters = FlatParameters(self.model.ordered_parameters(), self._parallel.zeros_like)
        self._optimizer = FlatAdam(self._parameters)

    def update(self, batch: Batch, learning_rate: float, order: np.random.Generator) -> dict[str, float]:
        """Train K epochs on `batch`, its minibatches drawn by `order`.

        Waits for: all ranks, in each minibatch.
        Returns: the losses and diagnostics of detail 12, means over the rows of all ranks.
        Raises:
            TrainingDiverged: a gradient is not finite; the weights are those of the minibatch before.
        """
        batch = batch.to(self.device)
        steps: list[_Step] = []
        for _ in range(self.options.update_epochs):
            for minibatch in self._minibatches(batch, order):
                steps.append(self._step(minibatch, learning_rate, len(steps)))
            if self.options.target_kl is not None and self._kl(steps[-1]) > self.options.target_kl:
                break
        return self._figures(steps) | {
            "explained_variance": self._explained_variance(batch),
            "minibatches": float(len(steps)),
        }

    # ------------------------------------------------------------------ minibatches

    def _minibatches(self, batch: Batch, order: np.random.Generator) -> Iterator[Batch]:
        """Every row once, in a new order (detail 6); sizes differ by one at most, so that no row is left over."""
        permutation = torch.from_numpy(order.permutation(len(batch))).to(self.device)
        shuffled = batch.rows(permutation)
        count = min(self.options.minibatches, len(batch))
        small, larger = divmod(len(batch), count)
        if self.options.norm_adv:
            # Minibatches side by side, first those with one row more.
            edge = larger * (small + 1)
            first = shuffled.advantages[:edge].view(larger, small + 1)
            second = shuffled.advantages[edge:].view(count - larger, small)
            tables = [table for table in (first, second) if len(table)]
            shuffled = replace(shuffled, advantages=self._standardized(tables))
        yield from shuffled.split([small + 1] * larger + [small] * (count - larger))

    def _standardized(self, tables: list[Tensor]) -> Tensor:
        """Advantages [rows] with mean zero and deviation one within each minibatch of all ranks (detail 7).

        Args:
            tables: [minibatches, rows of each], for all of an epoch at once.
        """
        moments = merged_moments(self._parallel.gather(torch.cat([moments_of(table) for table in tables])))
        means, scales = moments[:, 1:2], (moments[:, 2:3] / (moments[:, :1] - 1)).sqrt() + 1e-8
        done, parts = 0, []
        for table in tables:
            rows = slice(done, done + len(table))
            parts.append(((table - means[rows]) / scales[rows]).flatten())
            done += len(table)
        return torch.cat(parts)

    # ------------------------------------------------------------------ one step

    def _step(self, minibatch: Batch, learning_rate: float, number: int) -> _Step:
        """One step of SGD on one minibatch; one sum over all ranks."""
        step = self._backward(minibatch)
        with torch.no_grad():
            self.sum_gradients()
            gradient, ranks = self._parameters.gradient, self._parallel.size
            norm = torch.linalg.vector_norm(gradient) / ranks
            length = norm.item()
            if not math.isfinite(length):
                raise TrainingDiverged(_describe(minibatch, number, step, length))
            # Clipped (detail 11), and the mean of means over equally many rows, in one pass over memory or none.
            factor = min(1.0, self.options.max_grad_norm / (length + 1e-6)) / ranks
            if factor != 1.0:
                gradient.mul_(factor)
            self._optimizer.step(learning_rate)
        return step._replace(grad_norm=norm)

    def sum_gradients(self) -> None:
        """Replace the gradient by its sum over all ranks."""
        self._parallel.sum_(self._parameters.gradient)

    def rehearse(self, rows: int) -> None:
        """Forward and backward on `rows` rows of zeros, to see what it costs; the weights stay as they are."""
        spec, dtype = self.model.spec, self._parameters.weights.dtype
        actions = torch.zeros(
            (rows, *self._distribution.action_shape),
            dtype=getattr(torch, self._distribution.action_dtype(spec.dtype)),
            device=self.device,
        )
        zeros = torch.zeros(rows, dtype=dtype, device=self.device)
        obs = torch.zeros((rows, spec.obs_size), dtype=dtype, device=self.device)
        self._backward(Batch(obs, actions, zeros, zeros, zeros, zeros))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _backward(self, minibatch: Batch) -> _Step:
        """The gradient of the minibatch's loss, in pieces of at most `micro_batch_size` rows."""
        most = self.options.micro_batch_size or len(minibatch)
        if len(minibatch) <= most:
            return self._backward_at_once(minibatch, 1.0, accumulate=False)
        pieces = minibatch.split([min(most, len(minibatch) - start) for start in range(0, len(minibatch), most)])
        shares = [len(piece) / len(minibatch) for piece in pieces]
        steps = [
            self._backward_at_once(piece, share, accumulate=number > 0)
            for number, (piece, share) in enumerate(zip(pieces, shares, strict=True))
        ]

        def mean(name: str) -> Tensor:
            weighted = [getattr(step, name) * share for step, share in zip(steps, shares, strict=True)]
            return torch.stack(weighted).sum()

        return _Step(
            policy_loss=mean("policy_loss"),
            value_loss=mean("value_loss"),
            entropy=mean("entropy"),
            grad_norm=mean("grad_norm"),
            log_ratio=torch.cat([step.log_ratio for step in steps]),
        )

    def _backward_at_once(self, rows: Batch, share: float, *, accumulate: bool) -> _Step:
        """`share` of the gradient of the mean loss of `rows`, in place of the gradient of before or added to it."""
        options = self.options
        head, values, kept = self.model.forward_keeping(rows.obs)
        with torch.no_grad():
            policy = self._distribution.evaluate(head, self.model.log_std, rows.actions)
            log_ratio = policy.logprobs - rows.logprobs
            pi_loss, by_logprob = policy_loss(log_ratio.exp(), rows.advantages, options.clip_coef)
            if options.clip_vloss:
                v_loss, by_value = clipped_value_loss(values, rows.values, rows.returns, options.clip_coef)
            else:
                v_loss, by_value = value_loss(values, rows.returns)
            # One loss for all: policy - ent_coef * entropy + vf_coef * value (detail 10).
            if share != 1.0:
                by_logprob *= share
            by_head, by_log_std = policy.gradients(by_logprob, -options.ent_coef * share / len(rows))
            by_value *= options.vf_coef * share
        self.model.backward(kept, by_head, by_value, accumulate=accumulate)
        if by_log_std is not None:
            assert self.model.log_std is not None
            assert self.model.log_std.grad is not None
            if accumulate:
                self.model.log_std.grad += by_log_std
            else:
                self.model.log_std.grad.copy_(by_log_std)
        return _Step(pi_loss, v_loss, policy.entropy, pi_loss, log_ratio)

    # ------------------------------------------------------------------ figures, of all ranks

    def _kl(self, step: _Step) -> float:
        """Approximate KL of one minibatch: one for all ranks, so that all stop together."""
        kl = approximate_kl(step.log_ratio, step.log_ratio.exp())
        return float(self._parallel.gather(kl).mean())

    def _figures(self, steps: list[_Step]) -> dict[str, float]:
        """Means over the rows of all steps and ranks: once an update, for once a minibatch costs as much as a layer."""
        rows = torch.tensor([float(len(step.log_ratio)) for step in steps], device=self.device)
        names = ("policy_loss", "value_loss", "entropy", "grad_norm")
        per_step = torch.stack([torch.stack([getattr(step, name) for step in steps]) for name in names])
        log_ratio = torch.cat([step.log_ratio for step in steps])
        ratio = log_ratio.exp()
        clipped = ((ratio - 1).abs() > self.options.clip_coef).to(ratio.dtype).mean()
        means = torch.cat(
            [
                per_step @ rows.to(per_step.dtype) / rows.sum(),
                torch.stack([approximate_kl(log_ratio, ratio), -log_ratio.mean(), clipped]),
            ]
        )
        values = self._parallel.gather(means).mean(dim=0).tolist()
        return dict(zip((*names, "approx_kl", "old_approx_kl", "clipfrac"), values, strict=True))

    def _explained_variance(self, batch: Batch) -> float:
        """1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant."""
        both = moments_of(torch.stack([batch.returns - batch.values, batch.returns]))
        residual, total = merged_moments(self._parallel.gather(both))[:, 2].tolist()
        return 1 - residual / total if total > 0 else math.nan

    # ------------------------------------------------------------------ weights and state

    def weights(self, *, copy: bool = True) -> np.ndarray:
        """All weights [P], in the order of `ModelSpec.shapes`; without `copy` the next update changes them in place."""
        weights: np.ndarray = self._parameters.weights.numpy(force=True)
        return weights.copy() if copy else weights

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """The optimiser's state: first and second moments [P], and the number of steps; `copy` as for `weights`."""
        state = self._optimizer.state()
        return {name: array.copy() for name, array in state.items()} if copy else state

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these `weights` [P] and this optimiser state."""
        with torch.no_grad():
            self._parameters.weights.copy_(torch.tensor(weights))
        self._optimizer.load(state)


def _describe(minibatch: Batch, number: int, step: _Step, norm: float) -> str:
    """What a minibatch that cannot be learnt from looks like."""
    facts = []
    for name in ("obs", "advantages", "returns"):
        column = getattr(minibatch, name)
        facts.append(f"{name} from {float(column.min()):.3g} to {float(column.max()):.3g}")
    return (
        f"SGD step {number} of this update has policy loss {step.policy_loss.item():.3g}, value loss "
        f"{step.value_loss.item():.3g} and gradient norm {norm:.3g}; the weights before it are kept. The minibatch of "
        f"{len(minibatch)} rows has {', '.join(facts)}. Lower learning_rate, or turn on norm_obs and norm_reward if "
        f"these numbers are large."
    )
