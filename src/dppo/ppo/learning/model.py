"""PPOModel: the policy as a trainer uses it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dppo.ppo.distributions.base import IMPOSSIBLE, Evaluation
from dppo.ppo.learning.batch import Batch
from dppo.ppo.networks.choice import learning_network
from dppo.ppo.networks.network import NetworkSpec, RecurrentInputs
from dppo.ppo.networks.parameters import ZerosLike


class Scored(NamedTuple):
    """Results of one forward pass; valid until the next."""

    policy: Evaluation
    values: Tensor
    """[rows]"""
    residuals: Any
    """State of the network for `backward`."""


class PPOModel:
    """Score actions under the weights in training: a learning network and its distribution.

    `PPOAgent` is the same function in an actor; tests compare the two.
    """

    def __init__(
        self,
        spec: NetworkSpec,
        seed: int,
        *,
        device: str = "cpu",
        zeros_like: ZerosLike | None = None,
        log_std: float | None = None,
    ) -> None:
        """Draw the initial weights from `seed` alone.

        Args:
            log_std: of the free deviations; None: what the network starts with.
        """
        self.spec = spec
        self.network = learning_network(spec, seed, device=device, zeros_like=zeros_like)
        self.parameters = self.network.parameters
        if log_std is not None:
            weights = self.parameters.weights.numpy(force=True).copy()
            spec.unflatten(weights)["log_std"][:] = log_std
            self.parameters.weights.data.copy_(torch.from_numpy(weights))

    def forward(
        self, obs: Any, actions: Tensor, masks: Tensor | None = None, recurrent: RecurrentInputs | None = None
    ) -> Scored:
        """Score `actions` [rows, *A] and estimate values, given observations [rows, *O] as a `Batch` holds them.

        Args:
            masks: the actions that were allowed, [rows, H]; None if all were.
            recurrent: of the sequences that the rows are, for a network with memory.
        """
        head, values, residuals = self.network.forward(obs, recurrent)
        if masks is not None:  # the gradient of impossible logits is zero, because their probability is
            head = torch.where(masks, head, IMPOSSIBLE)
        return Scored(self.spec.distribution.evaluate(head, actions), values, residuals)

    def values(self, obs: Any, recurrent: RecurrentInputs | None = None) -> Tensor:
        """Return the values [rows] of observations; the next forward pass does not overwrite them."""
        with torch.no_grad():
            return self.network.forward(obs, recurrent)[1].detach().clone()

    def log_probs(self, pieces: Iterable[Batch]) -> Tensor:
        """Return the log-probabilities of the actions of all `pieces`, one after the other."""
        with torch.no_grad():
            scored = (self.forward(one.obs, one.actions, one.masks, one.recurrent) for one in pieces)
            return torch.cat([one.policy.logprobs.clone() for one in scored])

    def backward(self, scored: Scored, by_logprobs: Tensor, by_entropies: Tensor | float, by_values: Tensor) -> None:
        """Store the gradient of every parameter, given the gradients of the scores of the last `forward`."""
        self.network.backward(scored.residuals, scored.policy.gradients(by_logprobs, by_entropies), by_values)
