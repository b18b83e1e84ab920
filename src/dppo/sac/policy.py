"""The policy of soft actor-critic: squashed actions that are a function of noise, and the gradient through them.

The head [rows, 2 A] is [mean, log std] of u, as that of `SquashedGaussian`; actions are a = tanh(u).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dppo.ppo.distributions.base import HALF_LOG_TWO_PI
from dppo.ppo.distributions.simple import log_slope
from dppo.ppo.kernels.mlp import HandwrittenMLP
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.choice import learning_network
from dppo.ppo.networks.network import LearningNetwork, NetworkSpec

MIN_LOG_STD = -5.0
MAX_LOG_STD = 1.0


class Sample(NamedTuple):
    """Actions drawn from a head."""

    actions: Tensor
    """[rows, A] within (-1, 1)."""
    logprobs: Tensor
    """[rows], log-densities of the actions."""
    deviations: Tensor
    """[rows, A], std times noise."""


def policy_network(spec: NetworkSpec, seed: int, device: str) -> LearningNetwork:
    """Build the network of a policy, with initial weights drawn from `seed`; its values are not learned."""
    if isinstance(spec, BuiltInSpec) and spec.is_mlp:
        return HandwrittenMLP(spec.mlp(seed).to(device), values=False)
    return learning_network(spec, seed, device=device)


def sample(head: Tensor, noise: Tensor) -> Sample:
    """Return a = tanh(mean + std noise), with log pi(a) = log N(u) - sum(log(1 - tanh(u)^2)).

    Source: Haarnoja et al., arXiv:1801.01290, appendix C.
    """
    mean, log_std = head.split(noise.shape[1], dim=1)
    deviations = log_std.exp() * noise
    u = mean + deviations
    logprobs = (-0.5 * noise.square() - log_std - HALF_LOG_TWO_PI - log_slope(u)).sum(dim=1)
    return Sample(torch.tanh(u), logprobs, deviations)


def head_gradient(head: Tensor, drawn: Sample, grad_actions: Tensor, temperature: Tensor) -> Tensor:
    """Return the gradient of the sum over rows of temperature log pi(a) + L(a), given that of L by the actions.

        dL/du = 2 temperature a + dL/da (1 - a^2)
        dL/d mean = dL/du        dL/d log std = dL/du std noise - temperature

    Deviation: the gradient does not push log std beyond -5 and 1; Haarnoja et al. clip log std itself, which everything
    that acts would have to repeat.
    """
    actions = drawn.actions
    log_std = head[:, actions.shape[1] :]
    grad_mean = 2 * temperature * actions + grad_actions * (1 - actions.square())
    grad_log_std = grad_mean * drawn.deviations - temperature
    return torch.cat([grad_mean, _within_range(log_std, grad_log_std)], dim=1)


def clone_gradient(head: Tensor, intended: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
    """Return L = log std + ((mean - c)^2 + (u - c)^2) / (2 std^2) of all components, and its gradient by the head.

        dL/d mean = (mean - c) / std^2        dL/d log std = 1 - ((mean - c)^2 + (u - c)^2) / std^2

    Up to a constant, the expectation over u = c + noise is the KL divergence of the policy from the controller with
    noise; without the product of both differences, whose expectation is zero, it varies less than -log N(u).

    Source: behavioral cloning by maximum likelihood, as in Pomerleau, "ALVINN" (1989).

    Args:
        head: [rows, 2 A]
        intended: c [rows, A], the controller's actions before squashing.
        actions: u [rows, A], these actions with noise.
    """
    mean, log_std = head.split(actions.shape[1], dim=1)
    inverse_variance = (-2 * log_std).exp()
    difference = mean - intended
    ratio = (difference.square() + (actions - intended).square()) * inverse_variance
    grad_log_std = _within_range(log_std, 1 - ratio)
    gradient = torch.cat([difference * inverse_variance, grad_log_std], dim=1)
    return log_std + ratio / 2, gradient


def _within_range(log_std: Tensor, grad_log_std: Tensor) -> Tensor:
    """Return the gradient without what pushes deviations out of their range; a step moves against the gradient."""
    leaves_range = ((log_std >= MAX_LOG_STD) & (grad_log_std < 0)) | (
        (log_std <= MIN_LOG_STD) & (grad_log_std > 0)
    )
    return grad_log_std.masked_fill(leaves_range, 0.0)
