"""What trainers that train together have to agree on. Alone, there is nothing to do."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, distributed


class Parallel(Protocol):
    """The ranks of a training: equal models, each with its own share of the rows."""

    rank: int
    size: int

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks; the same bits on each."""

    def gather(self, tensor: Tensor) -> Tensor:
        """`tensor` of every rank, stacked in the order of ranks: [size, ...]."""


class Alone:
    """One trainer."""

    rank, size = 0, 1

    def sum_(self, tensor: Tensor) -> None:
        pass

    def gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)


class Group:
    """Ranks that talk through the default group of torch.distributed, which must have been joined.

    Waits for: every rank, in each call. Fails when: one of them is gone, or the group's timeout passes.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()

    def sum_(self, tensor: Tensor) -> None:
        distributed.all_reduce(tensor)

    def gather(self, tensor: Tensor) -> Tensor:
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor)
        return torch.stack(parts)
