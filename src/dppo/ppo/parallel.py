"""What trainers that train together have to agree on. Alone, there is nothing to do."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Parallel(Protocol):
    """The ranks of a training: equal models, each with its own share of the rows."""

    rank: int
    size: int

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """A vector that `sum_` sums fastest. All ranks ask at once, for equal lengths."""

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks; the same bits on each."""

    def gather(self, tensor: Tensor) -> Tensor:
        """`tensor` of every rank, stacked in the order of ranks: [size, ...]."""


class Alone:
    """One trainer."""

    rank, size = 0, 1

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def sum_(self, tensor: Tensor) -> None:
        pass

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)
