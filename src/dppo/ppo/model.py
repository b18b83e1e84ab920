"""PPOModel: a policy that learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dppo.ppo.distributions import Evaluation
from dppo.ppo.network import NetworkSpec


class Scored(NamedTuple):
    """Actions and observations of some rows as the model sees them, until its next forward pass."""

    policy: Evaluation
    values: Tensor
    """[rows]"""
    residuals: Any
    """What the network needs for `backward`."""


class PPOModel:
    """Score actions under weights that are being trained: a learning network with its distribution.

    `PPOAgent` is the same function in an actor; a test holds the two together.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        seed: int,
        *,
        device: str = "cpu",
        zeros_like: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Draw the initial weights from `seed` alone; torch's global generator is neither used nor changed."""
        self.spec = spec
        self.network = spec.learning(seed, device=device, zeros_like=zeros_like)
        self.parameters = self.network.parameters

    def forward(self, obs: Tensor | dict[str, Tensor], actions: Tensor) -> Scored:
        """Score `actions` [rows, *A] and observations [rows, *O]."""
        head, values, residuals = self.network.forward(obs)
        with torch.no_grad():
            return Scored(self.spec.distribution.evaluate(head, actions), values, residuals)

    def backward(
        self, scored: Scored, by_logprobs: Tensor, by_entropies: Tensor | float, by_values: Tensor, *, accumulate: bool
    ) -> None:
        """Compute the loss's gradient by every parameter from those by the scores of the last `forward`.

        It replaces the gradient of before, or is added to it.
        """
        with torch.no_grad():
            by_head = scored.policy.gradients(by_logprobs, by_entropies)
        self.network.backward(scored.residuals, by_head, by_values, accumulate=accumulate)
