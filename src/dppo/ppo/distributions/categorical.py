"""Categorical distributions: one of n choices, or several independent choices."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from dppo.ppo.distributions.base import IMPOSSIBLE, Distribution, Evaluation, as_column

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float, Int64
    from torch import Tensor

    from dppo.ppo.distributions.base import Drawn, Head, Noise, Numbers, Scores, TorchHead


class _Choices(Distribution):
    """Draw choices by the Gumbel-max trick."""

    @override
    def noise(self, generator: np.random.Generator, steps: int, rows: int, dtype: str) -> Drawn:
        return generator.gumbel(size=(steps, rows, self.noise_size)).astype(dtype)

    @override
    def sample(self, head: Head, noise: Noise) -> Int64[np.ndarray, ...]:
        """Return argmax(logits + gumbel), which is a sample from softmax(logits).

        Source: Maddison, Tarlow, Minka, "A* sampling" (arXiv:1411.0030), section 2.
        """
        return self.mode(head + noise)


class Categorical(_Choices):
    """One of n choices; the head holds n logits (unnormalized log-probabilities)."""

    def __init__(self, n: int) -> None:
        super().__init__(head_size=n, noise_size=n, action_shape=(), integer=True)

    @override
    def mode(self, head: Head) -> Int64[np.ndarray, "*rows"]:
        return head.argmax(axis=-1)

    @override
    def log_prob(self, head: Head, actions: Int64[np.ndarray, "*rows"]) -> Numbers:
        return _log_softmax(head, actions)

    @override
    def scores(self, head: TorchHead, actions: Int64[Tensor, " rows"]) -> Scores:
        log_probs = head.log_softmax(dim=1)
        return log_probs.gather(1, actions.unsqueeze(1)).squeeze(1), -(log_probs.exp() * log_probs).sum(dim=1)

    @override
    def evaluate(self, head: TorchHead, actions: Int64[Tensor, " rows"]) -> Evaluation:
        """Score `actions`, with the gradient written by hand.

        d log pi(a) / d logits = onehot(a) - p        dH / d logits = -p (log p + H)
        """
        log_probs = head.log_softmax(dim=1)
        probs = log_probs.exp()
        column = actions.unsqueeze(1)
        entropies = -(probs * log_probs).sum(dim=1)

        def gradients(by_logprobs: Float[Tensor, " rows"], by_entropies: Float[Tensor, " rows"] | float) -> TorchHead:
            weighted = (log_probs + entropies.unsqueeze(1)).mul_(as_column(by_entropies))
            by_head = weighted.add_(by_logprobs.unsqueeze(1)).mul_(probs).neg_()
            return by_head.scatter_add_(1, column, by_logprobs.unsqueeze(1))

        return Evaluation(log_probs.gather(1, column).squeeze(1), entropies, gradients)


class MultiCategorical(_Choices):
    """k independent choices; the head holds the logits of the first, of the second, and so on.

    All choices are computed at once, as rows of a table [k, most], in which missing choices have impossible logits.
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        size = sum(counts)
        super().__init__(head_size=size, noise_size=size, action_shape=(len(counts),), integer=True)
        self.counts = counts

    @override
    def mode(self, head: Head) -> Int64[np.ndarray, "*rows K"]:
        return self._table(head).argmax(axis=-1)

    @override
    def log_prob(self, head: Head, actions: Int64[np.ndarray, "*rows K"]) -> Numbers:
        return _log_softmax(self._table(head), actions).sum(axis=-1)

    @override
    def scores(self, head: TorchHead, actions: Int64[Tensor, "rows K"]) -> Scores:
        import torch

        table = head.new_full((len(head), len(self.counts), max(self.counts)), IMPOSSIBLE)
        log_probs = table.masked_scatter(torch.from_numpy(self._exists()).to(head.device), head).log_softmax(dim=2)
        chosen = log_probs.gather(2, actions.unsqueeze(2)).squeeze(2)
        return chosen.sum(dim=1), -(log_probs.exp() * log_probs).sum(dim=(1, 2))

    def _table(self, head: Head) -> Float[np.ndarray, "*rows K most"]:
        most = max(self.counts)
        if len(set(self.counts)) == 1:
            return head.reshape(*head.shape[:-1], -1, most)
        table = np.full((*head.shape[:-1], len(self.counts), most), IMPOSSIBLE, head.dtype)
        table[..., self._exists()] = head
        return table

    def _exists(self) -> np.ndarray:
        """Return which cells of the table are choices, [k, most]."""
        return np.arange(max(self.counts)) < np.array(self.counts)[:, None]


def _log_softmax(logits: Float[np.ndarray, "*rows n"], actions: Int64[np.ndarray, "*rows"]) -> Numbers:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, actions[..., None], axis=-1)[..., 0]
    return chosen - np.log(np.exp(shifted).sum(axis=-1))
