"""A categorical distribution: one of n choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dppo.ppo.distributions.base import Distribution, Evaluation, as_column

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float, Int64
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Categorical(Distribution):
    """One of n choices; the head holds n logits (unnormalised log-probabilities)."""

    n: int

    @property
    def head_size(self) -> int:
        """Return n."""
        return self.n

    @property
    def noise_size(self) -> int:
        """Return n."""
        return self.n

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Return (): an action is one number."""
        return ()

    def action_dtype(self, dtype: str) -> str:
        """Return int64."""
        return "int64"

    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> Float[np.ndarray, "{steps} {rows} _"]:
        """Draw Gumbel noise."""
        return generator.gumbel(size=(steps, rows, self.n)).astype(dtype)

    def sample(
        self, head: Float[np.ndarray, "*rows H"], noise: Float[np.ndarray, "*rows N"]
    ) -> Int64[np.ndarray, "*rows"]:
        """Return argmax(logits + gumbel), which is a sample from softmax(logits).

        Source: Maddison, Tarlow, Minka, "A* sampling" (arXiv:1411.0030), section 2.
        """
        chosen: np.ndarray = (head + noise).argmax(axis=-1)
        return chosen

    def mode(self, head: Float[np.ndarray, "*rows H"]) -> Int64[np.ndarray, "*rows"]:
        """Return the choice with the largest logit."""
        likeliest: np.ndarray = head.argmax(axis=-1)
        return likeliest

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Int64[np.ndarray, "*rows"]
    ) -> Float[np.ndarray, "*rows"]:
        """Return log softmax(head)[actions]."""
        shifted = head - head.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(shifted, actions[..., None], axis=-1)[..., 0]
        result: np.ndarray = chosen - np.log(np.exp(shifted).sum(axis=-1))
        return result

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Return log softmax(head)[actions] and the entropy."""
        log_probs = head.log_softmax(dim=1)
        return log_probs.gather(1, actions.unsqueeze(1)).squeeze(1), -(log_probs.exp() * log_probs).sum(dim=1)

    def evaluate(self, head: Float[Tensor, "rows H"], actions: Int64[Tensor, " rows"]) -> Evaluation:
        """Score `actions`, with the gradient written by hand.

        d log pi(a) / d logits = onehot(a) - p        dH / d logits = -p (log p + H)
        """
        log_probs = head.log_softmax(dim=1)
        probs = log_probs.exp()
        column = actions.unsqueeze(1)
        entropies = -(probs * log_probs).sum(dim=1)

        def gradients(
            by_logprobs: Float[Tensor, " rows"], by_entropies: Float[Tensor, " rows"] | float
        ) -> Float[Tensor, "rows H"]:
            by_head = (
                (log_probs + entropies.unsqueeze(1))
                .mul_(as_column(by_entropies))
                .add_(by_logprobs.unsqueeze(1))
                .mul_(probs)
                .neg_()
            )
            return by_head.scatter_add_(1, column, by_logprobs.unsqueeze(1))

        return Evaluation(log_probs.gather(1, column).squeeze(1), entropies, gradients)
