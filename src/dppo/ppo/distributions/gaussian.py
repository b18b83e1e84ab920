"""Gaussians with a diagonal covariance: a vector of real numbers, as drawn or squashed into bounds."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from dppo.ppo.distributions.base import Distribution, Evaluation, as_column

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float
    from torch import Tensor

    from dppo.ppo.distributions.base import Drawn, Head, Noise, Numbers, Scores, TorchHead

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)
NODES = 32  # of the quadrature: its error is below 0.005 up to a standard deviation of 3


class _Gaussian(Distribution):
    """Independent normal variables u; the head is [mean, log of the standard deviation] of u.

    Actions are stored as u: not clipped (detail 27), and not squashed, because tanh(u) rounds to 1 for large u.
    """

    def __init__(self, size: int, state_dependent: bool = False) -> None:
        free = 0 if state_dependent else size
        super().__init__(head_size=2 * size, noise_size=size, action_shape=(size,), integer=False, free_size=free)
        self.size = size

    @override
    def noise(self, generator: np.random.Generator, steps: int, rows: int, dtype: str) -> Drawn:
        return generator.standard_normal((steps, rows, self.size)).astype(dtype)

    @override
    def sample(self, head: Head, noise: Noise) -> Float[np.ndarray, "*rows A"]:
        return head[..., : self.size] + np.exp(head[..., self.size :]) * noise

    @override
    def mode(self, head: Head) -> Float[np.ndarray, "*rows A"]:
        return head[..., : self.size]

    @override
    def log_prob(self, head: Head, actions: Float[np.ndarray, "*rows A"]) -> Numbers:
        """Return log N(u) = sum(-((u - mean) / std)^2 / 2 - log std - log(2 pi) / 2)."""
        mean, log_std = head[..., : self.size], head[..., self.size :]
        standardized = (actions - mean) / np.exp(log_std)
        return (-0.5 * np.square(standardized) - (log_std + HALF_LOG_TWO_PI)).sum(axis=-1)

    @override
    def scores(self, head: TorchHead, actions: Float[Tensor, "rows A"]) -> Scores:
        mean, log_std = head[:, : self.size], head[:, self.size :]
        z = (actions - mean) / log_std.exp()
        logprobs = (-0.5 * z.square() - (log_std + HALF_LOG_TWO_PI)).sum(dim=1)
        return logprobs, (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(dim=1)


class DiagonalGaussian(_Gaussian):
    """Independent normal variables (detail 25)."""

    @override
    def evaluate(self, head: TorchHead, actions: Float[Tensor, "rows A"]) -> Evaluation:
        """Score `actions`, with the gradient written by hand.

        z = (a - mean) / std        d log pi / d mean = z / std        d log pi / d log std = z^2 - 1
        H = sum(log std) + const    dH / d log std = 1
        """
        import torch

        mean, log_std = head[:, : self.size], head[:, self.size :]
        std = log_std.exp()
        z = (actions - mean).div_(std)
        squared = z.square()
        logprobs = squared.mul(-0.5).sub_(log_std + HALF_LOG_TWO_PI).sum(dim=1)
        entropies = (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(dim=1)

        def gradients(by_logprobs: Float[Tensor, " rows"], by_entropies: Float[Tensor, " rows"] | float) -> TorchHead:
            weight = by_logprobs.unsqueeze(1)
            by_head = head.new_empty(head.shape)
            torch.mul(weight, z, out=by_head[:, : self.size]).div_(std)
            torch.sub(squared, 1, out=by_head[:, self.size :]).mul_(weight).add_(as_column(by_entropies))
            return by_head

        return Evaluation(logprobs, entropies, gradients)


class SquashedGaussian(_Gaussian):
    """tanh(u) for independent normal variables u: real numbers within (-1, 1).

    Log-probabilities and entropies are those of tanh(u). The mode is the median, tanh(mean).

    Source: Haarnoja et al., "Soft actor-critic" (arXiv:1801.01290), appendix C.
    """

    @override
    def log_prob(self, head: Head, actions: Float[np.ndarray, "*rows A"]) -> Numbers:
        """Return log N(u) - sum(log(1 - tanh(u)^2))."""
        slope = 2 * (math.log(2) - actions - np.logaddexp(0, -2 * actions))  # as in `_log_slope`
        return super().log_prob(head, actions) - slope.sum(axis=-1)

    @override
    def scores(self, head: TorchHead, actions: Float[Tensor, "rows A"]) -> Scores:
        """Return the log-density of tanh(u), and its entropy H(u) + E[sum(log(1 - tanh(u)^2))].

        The expectation has no closed form. It is computed by Gauss-Hermite quadrature, so it needs no samples.
        """
        logprobs, entropies = super().scores(head, actions)
        mean, std = head[:, : self.size], head[:, self.size :].exp()
        nodes, weights = (head.new_tensor(values) for values in _quadrature())
        drawn = mean.unsqueeze(2) + std.unsqueeze(2) * nodes
        return logprobs - _log_slope(actions).sum(dim=1), entropies + (_log_slope(drawn) @ weights).sum(dim=1)


def _log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2) without rounding to minus infinity: 2 (log 2 - u - softplus(-2u))."""
    from torch.nn.functional import softplus

    return 2 * (math.log(2) - u - softplus(-2 * u))


@cache
def _quadrature() -> tuple[list[float], list[float]]:
    """Return nodes and weights with which sum(weights * f(nodes)) is the mean of f over a standard normal variable."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes.tolist(), (weights / weights.sum()).tolist()
