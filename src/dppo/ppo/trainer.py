"""PPOTrainer: K epochs of minibatch SGD on a batch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dppo.errors import TrainingDiverged
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

ADAM_EPSILON = 1e-5  # detail 3
LOSS_NAMES = ("policy_loss", "value_loss", "entropy", "approx_kl", "old_approx_kl", "clipfrac", "grad_norm")


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
        self._parameters = FlatParameters(self.model.ordered_parameters())
        self._optimizer = torch.optim.Adam([self._parameters.weights], eps=ADAM_EPSILON, fused=True)

    def update(self, batch: Batch, learning_rate: float, order: np.random.Generator) -> dict[str, float]:
        """Train K epochs on `batch`, its minibatches drawn by `order`.

        Returns: the losses and diagnostics of detail 12, means over the minibatches trained on.
        Raises:
            TrainingDiverged: a loss or gradient is not finite; the weights are those of the minibatch before.
        """
        self._optimizer.param_groups[0]["lr"] = learning_rate
        seen: list[Tensor] = []
        for _ in range(self.options.update_epochs):
            for minibatch in self._minibatches(batch, order):
                seen.append(self._step(minibatch, len(seen)))
            if self.options.target_kl is not None and float(seen[-1][LOSS_NAMES.index("approx_kl")]) > self.options.target_kl:
                break
        means = torch.stack(seen).mean(dim=0).tolist()
        return dict(zip(LOSS_NAMES, means, strict=True)) | {
            "explained_variance": explained_variance(batch.values, batch.returns),
            "minibatches": float(len(seen)),
        }

    def _minibatches(self, batch: Batch, order: np.random.Generator) -> Iterator[Batch]:
        """Every row once, in a new order (detail 6); sizes differ by one at most, so that no row is left over."""
        shuffled = batch.rows(torch.from_numpy(order.permutation(len(batch))))
        count = min(self.options.minibatches, len(batch))
        small, larger = divmod(len(batch), count)
        yield from shuffled.split([small + 1] * larger + [small] * (count - larger))

    def _step(self, minibatch: Batch, number: int) -> Tensor:
        """One step of SGD on one minibatch; returns the figures of LOSS_NAMES."""
        options = self.options
        logprobs, entropies, values = self.model.evaluate(minibatch.obs, minibatch.actions)
        log_ratio = logprobs - minibatch.logprobs
        ratio = log_ratio.exp()
        advantages = standardize(minibatch.advantages) if options.norm_adv else minibatch.advantages
        policy = policy_loss(ratio, advantages, options.clip_coef)
        if options.clip_vloss:
            value = clipped_value_loss(values, minibatch.values, minibatch.returns, options.clip_coef)
        else:
            value = value_loss(values, minibatch.returns)
        entropy = entropies.mean()
        loss = policy - options.ent_coef * entropy + options.vf_coef * value

        self._parameters.gradient.zero_()
        loss.backward()
        norm = torch.linalg.vector_norm(self._parameters.gradient)
        if not math.isfinite(norm.item()) or not math.isfinite(loss.item()):
            raise TrainingDiverged(_describe(minibatch, number, loss.item(), norm.item()))
        self._parameters.gradient.mul_((options.max_grad_norm / (norm + 1e-6)).clamp(max=1.0))  # detail 11
        self._optimizer.step()
        with torch.no_grad():
            clipped = ((ratio - 1).abs() > options.clip_coef).to(loss.dtype).mean()
            kl = approximate_kl(log_ratio, ratio)
            return torch.stack([policy, value, entropy, kl, -log_ratio.mean(), clipped, norm]).detach()

    # ------------------------------------------------------------------ weights and state

    def weights(self) -> np.ndarray:
        """A copy of all weights [P], in the order of `ModelSpec.shapes`."""
        copy: np.ndarray = self._parameters.weights.detach().numpy().copy()
        return copy

    def state(self) -> dict[str, np.ndarray]:
        """The optimiser's state, copied: first and second moments [P] and the number of steps."""
        state = self._optimizer.state[self._parameters.weights]
        if not state:
            return {}
        return {name: state[name].numpy().copy() for name in ("exp_avg", "exp_avg_sq", "step")}

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these `weights` [P] and this optimiser state."""
        with torch.no_grad():
            self._parameters.weights.copy_(torch.from_numpy(weights))
        if state:
            tensors = {name: torch.from_numpy(np.array(array)) for name, array in state.items()}
            self._optimizer.state[self._parameters.weights] = tensors


def _describe(minibatch: Batch, number: int, loss: float, norm: float) -> str:
    """What a minibatch that cannot be learnt from looks like."""
    facts = []
    for name in ("obs", "advantages", "returns"):
        column = getattr(minibatch, name)
        facts.append(f"{name} from {float(column.min()):.3g} to {float(column.max()):.3g}")
    return (
        f"SGD step {number} of this update has loss {loss} and gradient norm {norm}; the weights before it are kept. "
        f"The minibatch of {len(minibatch)} rows has {', '.join(facts)}. Lower learning_rate, or turn on norm_obs and "
        f"norm_reward if these numbers are large."
    )
