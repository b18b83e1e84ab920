"""A diagonal Gaussian: a vector of real numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dppo.ppo.distributions.base import Distribution, Evaluation, as_column

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float
    from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class DiagonalGaussian(Distribution):
    """Independent normal variables (detail 25); the head is [mean, log of the standard deviation]."""

    size: int
    state_dependent: bool = False
    """Log std depends on the observation."""

    @property
    def head_size(self) -> int:
        """Return twice the size: mean and log std."""
        return 2 * self.size

    @property
    def free_size(self) -> int:
        """Return the size, unless log std depends on the observation."""
        return 0 if self.state_dependent else self.size

    @property
    def noise_size(self) -> int:
        """Return the size."""
        return self.size

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Return (size,)."""
        return (self.size,)

    def action_dtype(self, dtype: str) -> str:
        """Return `dtype`."""
        return dtype

    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> Float[np.ndarray, "{steps} {rows} _"]:
        """Draw standard normal noise."""
        return generator.standard_normal((steps, rows, self.size)).astype(dtype)

    def sample(
        self, head: Float[np.ndarray, "*rows H"], noise: Float[np.ndarray, "*rows N"]
    ) -> Float[np.ndarray, "*rows A"]:
        """Return mean + std * noise; not clipped (detail 27)."""
        drawn: np.ndarray = head[..., : self.size] + np.exp(head[..., self.size :]) * noise
        return drawn

    def mode(self, head: Float[np.ndarray, "*rows H"]) -> Float[np.ndarray, "*rows A"]:
        """Return the mean."""
        return head[..., : self.size]

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Float[np.ndarray, "*rows A"]
    ) -> Float[np.ndarray, "*rows"]:
        """Return sum(-((a - mean) / std)^2 / 2 - log std - log(2 pi) / 2)."""
        mean, log_std = head[..., : self.size], head[..., self.size :]
        standardised = (actions - mean) / np.exp(log_std)
        result: np.ndarray = (-0.5 * np.square(standardised) - (log_std + HALF_LOG_TWO_PI)).sum(axis=-1)
        return result

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Float[Tensor, "rows A"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Return the log-density of `actions` and the entropy."""
        mean, log_std = head[:, : self.size], head[:, self.size :]
        z = (actions - mean) / log_std.exp()
        logprobs = (-0.5 * z.square() - (log_std + HALF_LOG_TWO_PI)).sum(dim=1)
        return logprobs, (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(dim=1)

    def evaluate(self, head: Float[Tensor, "rows H"], actions: Float[Tensor, "rows A"]) -> Evaluation:
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

        def gradients(
            by_logprobs: Float[Tensor, " rows"], by_entropies: Float[Tensor, " rows"] | float
        ) -> Float[Tensor, "rows H"]:
            weight = by_logprobs.unsqueeze(1)
            by_head = head.new_empty(head.shape)
            torch.mul(weight, z, out=by_head[:, : self.size]).div_(std)
            torch.sub(squared, 1, out=by_head[:, self.size :]).mul_(weight).add_(as_column(by_entropies))
            return by_head

        return Evaluation(logprobs, entropies, gradients)
