"""Action distributions: drawn and scored in NumPy where actors act, scored again in torch where the trainer learns.

Noise comes from outside, so that an action is a pure function of the head's output and the noise. Written by hand
because `torch.distributions` costs as much as the model itself; tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # actors never import torch
    from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class Evaluation(NamedTuple):
    """How likely actions are under a policy, and how to differentiate that."""

    logprobs: Tensor
    """[rows]"""
    entropy: Tensor
    """Mean over the rows, a scalar."""
    gradients: Callable[[Tensor, float], tuple[Tensor, Tensor | None]]
    """The loss's gradients by the head [rows, H] and by log_std, from those by `logprobs` [rows] and by the entropy of
    each single row."""


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

    def evaluate(self, head: Tensor, log_std: Tensor | None, actions: Tensor) -> Evaluation:
        """Score `actions` [rows] under the outputs `head` [rows, n].

        d log pi(a) / d logits = onehot(a) - p        dH / d logits = -p (log p + H)
        """
        log_probs = head.log_softmax(dim=1)
        probs = log_probs.exp()
        column = actions.unsqueeze(1)
        entropies = -(probs * log_probs).sum(dim=1)

        def gradients(by_logprob: Tensor, by_entropy: float) -> tuple[Tensor, None]:
            by_head = (
                (log_probs + entropies.unsqueeze(1)).mul_(by_entropy).add_(by_logprob.unsqueeze(1)).mul_(probs).neg_()
            )
            return by_head.scatter_add_(1, column, by_logprob.unsqueeze(1)), None

        return Evaluation(log_probs.gather(1, column).squeeze(1), entropies.mean(), gradients)


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

    def evaluate(self, head: Tensor, log_std: Tensor | None, actions: Tensor) -> Evaluation:
        """Score `actions` [rows, size] under the means `head` [rows, size].

        z = (a - mean) / std        d log pi / d mean = z / std        d log pi / d log std = z^2 - 1
        H = sum(log std) + const    dH / d log std = 1
        """
        assert log_std is not None
        std = log_std.exp()
        z = (actions - head) / std
        log_probs = (-0.5 * z.square() - (log_std + HALF_LOG_TWO_PI)).sum(dim=1)
        entropy = (log_std + (0.5 + HALF_LOG_TWO_PI)).sum()

        def gradients(by_logprob: Tensor, by_entropy: float) -> tuple[Tensor, Tensor]:
            weight = by_logprob.unsqueeze(1)
            by_log_std = (weight * (z.square() - 1)).sum(dim=0) + by_entropy * len(z)
            return weight * z / std, by_log_std

        return Evaluation(log_probs, entropy, gradients)
