"""Several independent categorical choices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dppo.ppo.distributions.base import IMPOSSIBLE, Distribution

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float, Int64
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class MultiCategorical(Distribution):
    """k independent choices; the head holds the logits of the first, of the second, and so on.

    All choices are computed at once, as rows of a table [k, most], in which missing choices have impossible logits.
    """

    counts: tuple[int, ...]
    """Number of choices of each element."""

    @property
    def head_size(self) -> int:
        """Return the sum of the counts."""
        return sum(self.counts)

    @property
    def noise_size(self) -> int:
        """Return the sum of the counts."""
        return sum(self.counts)

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Return (k,)."""
        return (len(self.counts),)

    def action_dtype(self, dtype: str) -> str:
        """Return int64."""
        return "int64"

    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> Float[np.ndarray, "{steps} {rows} _"]:
        """Draw Gumbel noise."""
        return generator.gumbel(size=(steps, rows, self.noise_size)).astype(dtype)

    def sample(
        self, head: Float[np.ndarray, "*rows H"], noise: Float[np.ndarray, "*rows N"]
    ) -> Int64[np.ndarray, "*rows K"]:
        """Return argmax(logits + gumbel) of each element; see `Categorical.sample`."""
        return self.mode(head + noise)

    def mode(self, head: Float[np.ndarray, "*rows H"]) -> Int64[np.ndarray, "*rows K"]:
        """Return the choices with the largest logits."""
        likeliest: np.ndarray = self._table(head).argmax(axis=-1)
        return likeliest

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Int64[np.ndarray, "*rows K"]
    ) -> Float[np.ndarray, "*rows"]:
        """Return the sum of the elements' log softmax(logits)[action]."""
        table = self._table(head)
        table = table - table.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(table, actions[..., None], axis=-1)[..., 0]
        result: np.ndarray = (chosen - np.log(np.exp(table).sum(axis=-1))).sum(axis=-1)
        return result

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Int64[Tensor, "rows K"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Return the sums of the elements' log-probabilities and entropies."""
        import torch

        table = head.new_full((len(head), len(self.counts), max(self.counts)), IMPOSSIBLE)
        log_probs = table.masked_scatter(torch.from_numpy(self._exists()).to(head.device), head).log_softmax(dim=2)
        chosen = log_probs.gather(2, actions.unsqueeze(2)).squeeze(2)
        return chosen.sum(dim=1), -(log_probs.exp() * log_probs).sum(dim=(1, 2))

    def _table(self, head: Float[np.ndarray, "*rows H"]) -> Float[np.ndarray, "*rows K most"]:
        """Return the logits as rows of equal length."""
        most = max(self.counts)
        if len(set(self.counts)) == 1:
            return head.reshape(*head.shape[:-1], -1, most)
        table = np.full((*head.shape[:-1], len(self.counts), most), IMPOSSIBLE, head.dtype)
        table[..., self._exists()] = head
        return table

    def _exists(self) -> np.ndarray:
        """Return which cells of the table are choices, [k, most]."""
        exists: np.ndarray = np.arange(max(self.counts)) < np.array(self.counts)[:, None]
        return exists
