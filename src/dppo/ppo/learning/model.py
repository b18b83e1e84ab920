"""PPOModel: the policy and value network as a trainer uses it."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.distributions.base import ScoresWithGradient
from dppo.ppo.learning.batch import Batch
from dppo.ppo.networks.choice import learning_network
from dppo.ppo.networks.network import NetworkSpec, RecurrentInputs
from dppo.ppo.networks.parameters import ZerosLike


class ForwardPass(NamedTuple):
    """Results of one forward pass; valid until the next."""

    policy: ScoresWithGradient
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

        `log_std`: initial value of state-independent log standard deviations; None: as the network draws them.
        """
        self.spec = spec
        self.network = learning_network(spec, seed, device=device, zeros_like=zeros_like)
        self.parameters = self.network.parameters
        if log_std is not None:
            self.parameters.weights.data[free_deviations(spec)] = log_std

    def forward(
        self,
        obs: Any,
        actions: Tensor,
        masks: Tensor | None = None,
        recurrent: RecurrentInputs | None = None,
    ) -> ForwardPass:
        """Score `actions` [rows, *A] and estimate values, given observations [rows, *O] as a `Batch` holds them.

        `masks`: the choices that were allowed, [rows, M]; None if all were. `recurrent`: recurrent inputs of the
        sequences that the rows form, for a network with memory.
        """
        head, values, residuals = self.network.forward(obs, recurrent)
        distribution = self.spec.distribution
        if masks is not None:
            head = distribution.limited_in_torch(head, masks)
        return ForwardPass(distribution.scores_with_gradient(head, actions), values, residuals)

    def values(self, obs: Any, recurrent: RecurrentInputs | None = None) -> Tensor:
        """Return the values [rows] of observations; the next forward pass does not overwrite them."""
        with torch.no_grad():
            _, values, _ = self.network.forward(obs, recurrent)
            return values.detach().clone()

    def log_probs(self, pieces: Iterable[Batch]) -> Tensor:
        """Return the log-probabilities of the actions of all `pieces`, one after the other."""
        logprobs = []
        with torch.no_grad():
            for piece in pieces:
                scored = self.forward(piece.obs, piece.actions, piece.masks, piece.recurrent)
                logprobs.append(scored.policy.logprobs.clone())
        return torch.cat(logprobs)

    def backward(
        self,
        scored: ForwardPass,
        grad_logprobs: Tensor,
        grad_entropies: Tensor | float,
        grad_values: Tensor,
    ) -> None:
        """Store the gradient of every parameter, given the gradients of the scores of the last `forward`."""
        self.network.backward(
            scored.residuals, scored.policy.gradient(grad_logprobs, grad_entropies), grad_values
        )


def free_deviations(spec: NetworkSpec) -> slice:
    """Return the place of state-independent log standard deviations in the flat vector; an empty slice without any."""
    places = spec.unflatten(np.arange(spec.num_parameters)).get("log_std")
    if places is None:
        return slice(0, 0)
    return slice(places.flat[0], places.flat[-1] + 1)
