"""PPOTrainer: K epochs of minibatch SGD on a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dppo.errors import TrainingDiverged
from dppo.ppo.adam import FlatAdam
from dppo.ppo.architecture import ModelSpec
from dppo.ppo.batch import Batch
from dppo.ppo.losses import (
    approximate_kl,
    clipped_value_loss,
    explained_variance,
    policy_loss,
    standardize,
    value_loss,
)
from dppo.ppo.model import FlatParameters, PPOModel


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """What an update does; the meaning of each is in `dppo.config.Config`."""

    update_epochs: int
    minibatches: int
    norm_adv: bool
    clip_coef: float
    clip_vloss: bool
    ent_coef: float
    vf_coef: float
    max_grad_norm: float
    target_kl: float | None


class PPOTrainer:
    """Owns the model's weights and the optimiser; nothing else changes them."""

    def __init__(self, spec: ModelSpec, seed: int, options: TrainerOptions) -> None:
        self.model = PPOModel(spec, seed)
        self.options = options
        self._distribution = spec.distribution
        self._parameters = FlatParameters(self.model.ordered_parameters())
        self._optimizer = FlatAdam(self._parameters)

    def update(self, batch: Batch, learning_rate: float, order: np.random.Generator) -> dict[str, float]:
        """Train K epochs on `batch`, its minibatches drawn by `order`.

        Returns: the losses and diagnostics of detail 12, means over the rows trained on.
        Raises:
            TrainingDiverged: a gradient is not finite; the weights are those of the minibatch before.
        """
        steps: list[_Step] = []
        for _ in range(self.options.update_epochs):
            for minibatch in self._minibatches(batch, order):
                steps.append(self._step(minibatch, learning_rate, len(steps)))
            if self.options.target_kl is not None and steps[-1].approximate_kl() > self.options.target_kl:
                break
        return self._figures(steps) | {
            "explained_variance": explained_variance(batch.values, batch.returns),
            "minibatches": float(len(steps)),
        }

    def _figures(self, steps: list[_Step]) -> dict[str, float]:
        """Means over all rows of all steps: once an update, not once a minibatch, for each costs as much."""
        rows = torch.tensor([float(len(step.log_ratio)) for step in steps])
        per_step = {
            name: torch.stack([getattr(step, name) for step in steps])
            for name in ("policy_loss", "value_loss", "entropy", "grad_norm")
        }
        means = {name: float(values @ rows.to(values.dtype) / rows.sum()) for name, values in per_step.items()}
        log_ratio = torch.cat([step.log_ratio for step in steps])
        ratio = log_ratio.exp()
        return means | {
            "approx_kl": float(approximate_kl(log_ratio, ratio)),
            "old_approx_kl": float(-log_ratio.mean()),
            "clipfrac": float(((ratio - 1).abs() > self.options.clip_coef).to(ratio.dtype).mean()),
        }

    def _minibatches(self, batch: Batch, order: np.random.Generator) -> Iterator[Batch]:
        """Every row once, in a new order (detail 6); sizes differ by one at most, so that no row is left over."""
        shuffled = batch.rows(torch.from_numpy(order.permutation(len(batch))))
        count = min(self.options.minibatches, len(batch))
        small, larger = divmod(len(batch), count)
        yield from shuffled.split([small + 1] * larger + [small] * (count - larger))

    def _step(self, minibatch: Batch, learning_rate: float, number: int) -> _Step:
        """One step of SGD on one minibatch."""
        options = self.options
        head, values = self.model(minibatch.obs)
        with torch.no_grad():
            policy = self._distribution.evaluate(head, self.model.log_std, minibatch.actions)
            log_ratio = policy.logprobs - minibatch.logprobs
            advantages = standardize(minibatch.advantages) if options.norm_adv else minibatch.advantages
            pi_loss, by_logprob = policy_loss(log_ratio.exp(), advantages, options.clip_coef)
            if options.clip_vloss:
                v_loss, by_value = clipped_value_loss(values, minibatch.values, minibatch.returns, options.clip_coef)
            else:
                v_loss, by_value = value_loss(values, minibatch.returns)
            # One loss for all: policy - ent_coef * entropy + vf_coef * value (detail 10).
            by_head, by_log_std = policy.gradients(by_logprob, -options.ent_coef / len(minibatch))
            by_value *= options.vf_coef
        self._parameters.gradient.zero_()
        torch.autograd.backward([head, values], [by_head, by_value])
        with torch.no_grad():
            if by_log_std is not None:
                assert self.model.log_std is not None
                assert self.model.log_std.grad is not None
                self.model.log_std.grad += by_log_std
            norm = torch.linalg.vector_norm(self._parameters.gradient)
            if not math.isfinite(norm.item()):
                raise TrainingDiverged(_describe(minibatch, number, pi_loss.item(), v_loss.item(), norm.item()))
            self._parameters.gradient.mul_((options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))  # detail 11
            self._optimizer.step(learning_rate)
        return _Step(pi_loss, v_loss, policy.entropy, norm, log_ratio)

    # ------------------------------------------------------------------ weights and state

    def weights(self) -> np.ndarray:
        """A copy of all weights [P], in the order of `ModelSpec.shapes`."""
        copy: np.ndarray = self._parameters.weights.detach().numpy().copy()
        return copy

    def state(self) -> dict[str, np.ndarray]:
        """The optimiser's state, copied: first and second moments [P] and the number of steps."""
        return self._optimizer.state()

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these `weights` [P] and this optimiser state."""
        with torch.no_grad():
            self._parameters.weights.copy_(torch.from_numpy(weights))
        self._optimizer.load(state)


class _Step(NamedTuple):
    """What a step of SGD leaves behind for the figures of its update."""

    policy_loss: Tensor
    value_loss: Tensor
    entropy: Tensor
    grad_norm: Tensor
    """Before clipping."""
    log_ratio: Tensor
    """[rows] new minus old log-probability."""

    def approximate_kl(self) -> float:
        return float(approximate_kl(self.log_ratio, self.log_ratio.exp()))


def _describe(minibatch: Batch, number: int, policy_loss: float, value_loss: float, norm: float) -> str:
    """What a minibatch that cannot be learnt from looks like."""
    facts = []
    for name in ("obs", "advantages", "returns"):
        column = getattr(minibatch, name)
        facts.append(f"{name} from {float(column.min()):.3g} to {float(column.max()):.3g}")
    return (
        f"SGD step {number} of this update has policy loss {policy_loss:.3g}, value loss {value_loss:.3g} and gradient "
        f"norm {norm:.3g}; the weights before it are kept. "
        f"The minibatch of {len(minibatch)} rows has {', '.join(facts)}. Lower learning_rate, or turn on norm_obs and "
        f"norm_reward if these numbers are large."
    )
