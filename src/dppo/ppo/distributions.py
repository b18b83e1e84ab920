"""Action distributions: drawn and scored in NumPy where actors act, scored again in torch where the trainer learns.

Noise comes from outside, so that an action is a pure function of the head's output and the noise. Written by hand
because `torch.distributions` costs as much as the model itself; tested against it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # actors never import torch
    from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True, slots=True)
class Categorical:
    """One of n choices; the head's output is n unnormalised log-probabilities."""

    n: int

    @property
    def head_size(self) -> int:
        return self.n

    @property
    def action_shape(self) -> tuple[int, ...]:
        return ()

    def action_dtype(self, dtype: str) -> str:
        return "int64"

    def noise(self, generator: np.random.Generator, steps: int, rows: int, dtype: str) -> np.ndarray:
        """Gumbel noise [steps, rows, n]."""
        return generator.gumbel(size=(steps, rows, self.n)).astype(dtype)

    def sample(self, head: np.ndarray, log_std: np.ndarray | None, noise: np.ndarray) -> np.ndarray:
        """argmax(logits + gumbel) is a draw from softmax(logits). [rows, n] -> [rows] int64.

        Source: Maddison, Tarlow, Minka, "A* sampling" (arXiv:1411.0030), section 2.
        """
        chosen: np.ndarray = (head + noise).argmax(axis=-1)
        return chosen

    def mode(self, head: np.ndarray) -> np.ndarray:
        """The likeliest action. [rows, n] -> [rows]."""
        likeliest: np.ndarray = head.argmax(axis=-1)
        return likeliest

    def log_prob(self, head: np.ndarray, log_std: np.ndarray | None, actions: np.ndarray) -> np.ndarray:
        """log softmax(head)[actions]. [..., n], [...] -> [...]."""
        shifted = head - head.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(shifted, actions[..., None], axis=-1)[..., 0]
        result: np.ndarray = chosen - np.log(np.exp(shifted).sum(axis=-1))
        return result

    def evaluate(self, head: Tensor, log_std: Tensor | None, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of `actions`, and entropies; both [rows] and differentiable."""
        log_probs = head.log_softmax(dim=1)
        chosen = log_probs.gather(1, actions.unsqueeze(1)).squeeze(1)
        return chosen, -(log_probs.exp() * log_probs).sum(dim=1)


@dataclass(frozen=True, slots=True)
class DiagonalGaussian:
    """Independent normal variables (detail 25); the head's output is their mean, the deviation a free parameter."""

    size: int

    @property
    def head_size(self) -> int:
        return self.size

    @property
    def action_shape(self) -> tuple[int, ...]:
        return (self.size,)

    def action_dtype(self, dtype: str) -> str:
        return dtype

    def noise(self, generator: np.random.Generator, steps: int, rows: int, dtype: str) -> np.ndarray:
        """Standard normal noise [steps, rows, size]."""
        return generator.standard_normal((steps, rows, self.size)).astype(dtype)

    def sample(self, head: np.ndarray, log_std: np.ndarray | None, noise: np.ndarray) -> np.ndarray:
        """mean + std * noise. [rows, size] -> [rows, size]; not clipped (detail 27)."""
        assert log_std is not None
        drawn: np.ndarray = head + np.exp(log_std) * noise
        return drawn

    def mode(self, head: np.ndarray) -> np.ndarray:
        """The mean, which is the likeliest action. [rows, size] -> [rows, size]."""
        return head

    def log_prob(self, head: np.ndarray, log_std: np.ndarray | None, actions: np.ndarray) -> np.ndarray:
        """-((a - mean) / std)^2 / 2 - log std - log(2 pi) / 2, summed. [..., size] twice -> [...]."""
        assert log_std is not None
        standardised = (actions - head) / np.exp(log_std)
        result: np.ndarray = (-0.5 * np.square(standardised) - (log_std + HALF_LOG_TWO_PI)).sum(axis=-1)
        return result

    def evaluate(self, head: Tensor, log_std: Tensor | None, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities of `actions`, and entropies; both [rows] and differentiable."""
        assert log_std is not None
        standardised = (actions - head) / log_std.exp()
        log_probs = (-0.5 * standardised.square() - (log_std + HALF_LOG_TWO_PI)).sum(dim=1)
        entropy = (log_std + (0.5 + HALF_LOG_TWO_PI)).sum()
        return log_probs, entropy.expand(len(log_probs))
