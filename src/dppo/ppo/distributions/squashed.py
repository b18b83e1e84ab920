"""A squashed Gaussian: the tanh of a normal variable, for real numbers within bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from dppo.ppo.distributions.base import Distribution, Evaluation
from dppo.ppo.distributions.gaussian import DiagonalGaussian

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float
    from torch import Tensor

NODES = 32  # of the quadrature: its error is below 0.005 up to a standard deviation of 3


@dataclass(frozen=True, slots=True)
class SquashedGaussian(DiagonalGaussian):
    """tanh(u), where u is a vector of independent normal variables; the head is [mean, log std] of u.

    Actions are kept as u, because tanh(u) rounds to 1 for large u, and could not be inverted. Log-probabilities and
    entropies are those of tanh(u), which lies in (-1, 1). The mode is the median, tanh(mean).

    Source: Haarnoja et al., "Soft actor-critic" (arXiv:1801.01290), appendix C.
    """

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Float[np.ndarray, "*rows A"]
    ) -> Float[np.ndarray, "*rows"]:
        """Return log N(u) - sum(log(1 - tanh(u)^2))."""
        result: np.ndarray = DiagonalGaussian.log_prob(self, head, actions) - _log_slope_numpy(actions).sum(axis=-1)
        return result

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Float[Tensor, "rows A"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Return the log-density of tanh(u), and its entropy H(u) + E[sum(log(1 - tanh(u)^2))].

        The expectation has no closed form. It is computed by Gauss-Hermite quadrature, so it needs no samples.
        """
        logprobs, entropies = DiagonalGaussian.scores(self, head, actions)
        mean, std = head[:, : self.size], head[:, self.size :].exp()
        nodes, weights = (head.new_tensor(values) for values in _quadrature())
        drawn = mean.unsqueeze(2) + std.unsqueeze(2) * nodes
        return logprobs - _log_slope(actions).sum(dim=1), entropies + (_log_slope(drawn) @ weights).sum(dim=1)

    def evaluate(self, head: Float[Tensor, "rows H"], actions: Float[Tensor, "rows A"]) -> Evaluation:
        """Score `actions`, with a gradient by autograd."""
        return Distribution.evaluate(self, head, actions)


def _log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2) without rounding to minus infinity: 2 (log 2 - u - softplus(-2u))."""
    from torch.nn.functional import softplus

    return 2 * (math.log(2) - u - softplus(-2 * u))


def _log_slope_numpy(u: np.ndarray) -> np.ndarray:
    slope: np.ndarray = 2 * (math.log(2) - u - np.logaddexp(0, -2 * u))
    return slope


@cache
def _quadrature() -> tuple[list[float], list[float]]:
    """Return nodes and weights with which sum(weights * f(nodes)) is the mean of f over a standard normal variable."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    return nodes.tolist(), (weights / weights.sum()).tolist()
