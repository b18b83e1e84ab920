"""PPOTrainer: K epochs of minibatch SGD on a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dppo.config.parts import PPO
from dppo.errors import TrainingDiverged
from dppo.ppo.adam import FlatAdam
from dppo.ppo.batch import Batch
from dppo.ppo.losses import approximate_kl, clipped_value_loss, policy_loss, value_loss, weighted_mean
from dppo.ppo.model import PPOModel
from dppo.ppo.moments import merged_moments, moments_of
from dppo.ppo.parallel import Alone, Parallel


class _Losses(NamedTuple):
    """Losses of a minibatch: means over its transitions on this rank."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    log_ratio: Tensor
    """[rows] new minus old log-probability; zero for rows that are not transitions."""


class _Step(NamedTuple):
    """Results of a step of SGD, for the figures of its update."""

    losses: _Losses
    grad_norm: Tensor
    """Of all ranks, before clipping."""
    rows: float
    """Transitions per rank."""


class PPOTrainer:
    """Own the model's weights and the optimiser; nothing else changes them.

    May be one of several ranks, each with as many rows as the others: then advantages, gradients, early stop and
    figures are those of all rows together, and the weights of all ranks stay equal.
    """

    def __init__(
        self,
        model: PPOModel,
        ppo: PPO,
        *,
        minibatches: int,
        micro_batch_size: int | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        """Args:
        minibatches: of an epoch.
        micro_batch_size: rows of a minibatch that go through the network at once; None: all.
        """
        self.model = model
        self.ppo = ppo
        self.minibatches = minibatches
        self.micro_batch_size = micro_batch_size
        self._parameters = model.parameters
        self.device = self._parameters.weights.device
        self._parallel = parallel or Alone()
        self._optimizer = FlatAdam(self._parameters)

    def update(self, batch: Batch, learning_rate: float, order: np.random.Generator) -> dict[str, float]:
        """Train K epochs on `batch`, its minibatches drawn by `order`.

        A minibatch without a single transition on any rank is skipped: it makes no step of SGD.

        Waits for: all ranks, in each minibatch.
        Returns: the losses and diagnostics of detail 12, means over the transitions of all ranks.

        Raises:
            TrainingDiverged: a gradient is not finite; the weights are those of the minibatch before.
        """
        batch = self._weighted_as_all(batch.to(self.device))
        steps: list[_Step] = []
        for _ in range(self.ppo.update_epochs):
            for minibatch, rows in self._minibatches(batch, order):
                steps.append(self._step(minibatch, rows, learning_rate, len(steps)))
            if self.ppo.target_kl is not None and steps and self._kl(steps[-1]) > self.ppo.target_kl:
                break
        return self._figures(steps) | {
            "explained_variance": self._explained_variance(batch),
            "minibatches": float(len(steps)),
        }

    # ------------------------------------------------------------------ minibatches

    def _weighted_as_all(self, batch: Batch) -> Batch:
        """Give the batch weights if that of any rank has some: then all ranks count their transitions."""
        if self._parallel.size == 1:
            return batch
        some = self._parallel.gather(torch.tensor([batch.weights is not None], dtype=torch.int32, device=self.device))
        if batch.weights is not None or not some.any():
            return batch
        return replace(batch, weights=torch.ones_like(batch.logprobs))

    def _minibatches(self, batch: Batch, order: np.random.Generator) -> Iterator[tuple[Batch, float]]:
        """Yield every sequence once, in a new order (detail 6), with the transitions per rank of each minibatch.

        Sizes differ by one sequence at most, so that none is left over.
        """
        permutation = torch.from_numpy(order.permutation(batch.sequences)).to(self.device)
        shuffled = batch.take(permutation)
        count = min(self.minibatches, batch.sequences)
        small, larger = divmod(batch.sequences, count)
        if self.ppo.norm_adv:
            edge = larger * (small + 1) * batch.length  # minibatches side by side, first those with one sequence more
            shuffled = replace(shuffled, advantages=self._standardized(shuffled, edge, larger, count - larger))
        minibatches = shuffled.split([small + 1] * larger + [small] * (count - larger))
        if batch.weights is None:
            yield from ((minibatch, float(len(minibatch))) for minibatch in minibatches)
            return
        ranks = self._parallel.size
        own = torch.stack([minibatch.weights.sum() for minibatch in minibatches if minibatch.weights is not None])
        for minibatch, valid in zip(minibatches, self._parallel.gather(own).sum(dim=0).tolist(), strict=True):
            if valid:
                assert minibatch.weights is not None
                scale = len(minibatch) * ranks / valid
                yield replace(minibatch, weights=minibatch.weights * scale), valid / ranks

    def _standardized(self, shuffled: Batch, edge: int, larger: int, smaller: int) -> Tensor:
        """Return advantages [rows] with mean zero and deviation one within each minibatch of all ranks (detail 7).

        A lone transition has the advantage zero. All minibatches of an epoch are done at once.

        Args:
            edge: rows of the `larger` minibatches, which come first; `smaller` ones have one sequence less.
        """

        def tables(column: Tensor) -> list[Tensor]:
            both = column[:edge].view(larger, -1) if larger else None
            rest = column[edge:].view(smaller, -1) if smaller else None
            return [table for table in (both, rest) if table is not None]

        advantages = tables(shuffled.advantages)
        weights = tables(shuffled.weights) if shuffled.weights is not None else [None] * len(advantages)
        own = torch.cat([moments_of(table, weight) for table, weight in zip(advantages, weights, strict=True)])
        moments = merged_moments(self._parallel.gather(own))
        means = moments[:, 1:2]
        scales = (moments[:, 2:3] / (moments[:, :1] - 1).clamp(min=1)).sqrt() + 1e-8
        done, parts = 0, []
        for table in advantages:
            rows = slice(done, done + len(table))
            parts.append(((table - means[rows]) / scales[rows]).flatten())
            done += len(table)
        return torch.cat(parts)

    # ------------------------------------------------------------------ one step

    def _step(self, minibatch: Batch, rows: float, learning_rate: float, number: int) -> _Step:
        """Take one step of SGD on one minibatch of `rows` transitions per rank; one sum over all ranks."""
        losses = self._backward(minibatch)
        with torch.no_grad():
            self.sum_gradients()
            gradient, ranks = self._parameters.gradient, self._parallel.size
            norm = torch.linalg.vector_norm(gradient) / ranks
            length = norm.item()
            if not math.isfinite(length):
                raise TrainingDiverged(_describe(minibatch, number, losses, length))
            # Clipped (detail 11), and the mean of means over equally many rows, in one pass over memory or none.
            factor = min(1.0, self.ppo.max_grad_norm / (length + 1e-6)) / ranks
            if factor != 1.0:
                gradient.mul_(factor)
            self._optimizer.step(learning_rate)
        return _Step(losses, norm, rows)

    def sum_gradients(self) -> None:
        """Replace the gradient by its sum over all ranks."""
        self._parallel.sum_(self._parameters.gradient)

    def rehearse(self, rows: int) -> None:
        """Run forward and backward on `rows` rows of zeros, to see what it costs; the weights stay as they are."""
        spec, dtype = self.model.spec, self._parameters.weights.dtype
        distribution = spec.distribution
        actions = torch.zeros(
            (rows, *distribution.action_shape),
            dtype=getattr(torch, distribution.action_dtype(spec.dtype)),
            device=self.device,
        )
        zeros = torch.zeros(rows, dtype=dtype, device=self.device)
        batch = Batch(spec.zeros(rows), actions, zeros, zeros, zeros, zeros)
        self._backward(batch.to(self.device))
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _backward(self, minibatch: Batch) -> _Losses:
        """Compute the gradient of the minibatch's loss, in pieces of at most `micro_batch_size` rows."""
        rows = self.micro_batch_size or len(minibatch)
        most, sequences = max(1, rows // minibatch.length), minibatch.sequences
        if sequences <= most:
            return self._backward_at_once(minibatch, 1.0, accumulate=False)
        pieces = minibatch.split([min(most, sequences - start) for start in range(0, sequences, most)])
        shares = [len(piece) / len(minibatch) for piece in pieces]
        losses = [
            self._backward_at_once(piece, share, accumulate=number > 0)
            for number, (piece, share) in enumerate(zip(pieces, shares, strict=True))
        ]

        def mean(name: str) -> Tensor:
            weighted = [getattr(one, name) * share for one, share in zip(losses, shares, strict=True)]
            return torch.stack(weighted).sum()

        return _Losses(
            policy_loss=mean("policy_loss"),
            value_loss=mean("value_loss"),
            entropy=mean("entropy"),
            log_ratio=torch.cat([one.log_ratio for one in losses]),
        )

    def _backward_at_once(self, rows: Batch, share: float, *, accumulate: bool) -> _Losses:
        """Compute `share` times the gradient of the mean loss over `rows`; it replaces the stored one, or is added."""
        ppo, weights = self.ppo, rows.weights
        scored = self.model.forward(rows.obs, rows.actions)
        with torch.no_grad():
            log_ratio = scored.policy.logprobs - rows.logprobs
            if weights is not None:
                log_ratio = torch.where(weights > 0, log_ratio, 0.0)
            pi_loss, by_logprobs = policy_loss(log_ratio.exp(), rows.advantages, ppo.clip_coef, weights)
            if ppo.clip_vloss:
                v_loss, by_values = clipped_value_loss(scored.values, rows.values, rows.returns, ppo.clip_coef, weights)
            else:
                v_loss, by_values = value_loss(scored.values, rows.returns, weights)
            entropy = weighted_mean(scored.policy.entropies, weights)
            # One loss for all: policy - ent_coef * entropy + vf_coef * value (detail 10).
            if share != 1.0:
                by_logprobs *= share
            by_each = -ppo.ent_coef * share / len(rows)
            by_entropies = by_each if weights is None else weights * by_each
            by_values *= ppo.vf_coef * share
        self.model.backward(scored, by_logprobs, by_entropies, by_values, accumulate=accumulate)
        return _Losses(pi_loss, v_loss, entropy, log_ratio)

    # ------------------------------------------------------------------ figures, of all ranks

    def _kl(self, step: _Step) -> float:
        """Return the approximate KL of one minibatch: one for all ranks, so that all stop together."""
        log_ratio = step.losses.log_ratio
        kl = approximate_kl(log_ratio, log_ratio.exp()) * (len(log_ratio) / step.rows)
        return float(self._parallel.gather(kl).mean())

    def _figures(self, steps: list[_Step]) -> dict[str, float]:
        """Return means over the transitions of all steps and ranks; nan where there were none.

        Once an update, for once a minibatch costs as much as a layer.
        """
        names = ("policy_loss", "value_loss", "entropy")
        of_ratios = ("approx_kl", "old_approx_kl", "clipfrac")
        if not steps:
            return dict.fromkeys((*names, "grad_norm", *of_ratios), math.nan)
        columns = [[getattr(step.losses, name) for step in steps] for name in names]
        columns.append([step.grad_norm for step in steps])
        per_step = torch.stack([torch.stack(column) for column in columns])
        rows = torch.tensor([step.rows for step in steps], dtype=torch.float32, device=self.device)
        log_ratio = torch.cat([step.losses.log_ratio for step in steps])
        ratio = log_ratio.exp()
        clipped = ((ratio - 1).abs() > self.ppo.clip_coef).to(ratio.dtype).mean()
        # Rows that are not transitions have the ratio one: they add nothing, and are not counted.
        share = len(log_ratio) / sum(step.rows for step in steps)
        means = torch.cat(
            [
                per_step @ rows.to(per_step.dtype) / rows.sum(),
                torch.stack([approximate_kl(log_ratio, ratio), -log_ratio.mean(), clipped]) * share,
            ]
        )
        values = self._parallel.gather(means).mean(dim=0).tolist()
        return dict(zip((*names, "grad_norm", *of_ratios), values, strict=True))

    def _explained_variance(self, batch: Batch) -> float:
        """Return 1 - Var(returns - values) / Var(returns): 1 is perfect, 0 no better than a constant."""
        both = torch.stack([batch.returns - batch.values, batch.returns])
        own = moments_of(both, None if batch.weights is None else batch.weights.expand_as(both))
        residual, total = merged_moments(self._parallel.gather(own))[:, 2].tolist()
        return 1 - residual / total if total > 0 else math.nan

    # ------------------------------------------------------------------ weights and state

    def weights(self, *, copy: bool = True) -> np.ndarray:
        """Return all weights [P] in the order of `NetworkSpec.shapes`; without `copy` the next update changes them."""
        weights: np.ndarray = self._parameters.weights.numpy(force=True)
        return weights.copy() if copy else weights

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return the optimiser's state: both moments [P] and the number of steps; `copy` as for `weights`."""
        state = self._optimizer.state()
        return {name: array.copy() for name, array in state.items()} if copy else state

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these `weights` [P] and this optimiser state."""
        with torch.no_grad():
            self._parameters.weights.copy_(torch.tensor(weights))
        self._optimizer.load(state)


def _describe(minibatch: Batch, number: int, losses: _Losses, norm: float) -> str:
    """Describe a minibatch whose gradient is not finite."""
    facts = []
    leaves = minibatch.obs if isinstance(minibatch.obs, dict) else {"": minibatch.obs}
    columns = {f"obs {name}".rstrip(): leaf for name, leaf in leaves.items()}
    for name, column in (columns | {"advantages": minibatch.advantages, "returns": minibatch.returns}).items():
        facts.append(f"{name} from {float(column.min()):.3g} to {float(column.max()):.3g}")
    return (
        f"SGD step {number} of this update has policy loss {losses.policy_loss.item():.3g}, value loss "
        f"{losses.value_loss.item():.3g} and gradient norm {norm:.3g}; the weights before it are kept. The minibatch "
        f"of {len(minibatch)} rows has {', '.join(facts)}. Lower learning_rate, or turn on norm_obs and norm_reward if "
        f"these numbers are large."
    )
