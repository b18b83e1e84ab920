"""Parallel: the collective operations of trainers that train one model together."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Parallel(Protocol):
    """A group of ranks with equal models, each training on its own share of the rows."""

    rank: int
    size: int

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Allocate a vector of zeros in the memory that `sum_` is fastest on; all ranks call it together."""

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks, equal to the bit on each."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the `tensor` of every rank, stacked in the order of ranks: [size, ...]."""


class Alone:
    """A group of one trainer, with nothing to exchange."""

    rank, size = 0, 1

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Return `torch.zeros_like(tensor)`."""
        return torch.zeros_like(tensor)

    def sum_(self, tensor: Tensor) -> None:
        """Leave `tensor` as it is."""

    def gather(self, tensor: Tensor) -> Tensor:
        """Return `tensor` as [1, ...]."""
        return tensor.unsqueeze(0)
