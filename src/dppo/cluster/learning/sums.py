"""Group: the ranks of a training, in processes that communicate through torch.distributed."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from dppo.cluster.learning.shared_memory import shared_vectors

FEW = 1 << 18  # numbers up to which two ranks exchange messages faster than they pass two barriers
CACHED = 1 << 16  # elements that stay in the cache of a core between adding and copying


class Group:
    """Ranks that communicate through the default group of torch.distributed, which must have been joined.

    On CPUs numbers are added in the order of ranks on any machine, so a group that is rebuilt elsewhere computes the
    same bits. On GPUs nccl decides the order.

    Waits for: every rank, in each call. Fails when: a rank is gone, or the timeout of the group passes.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        self.seconds = 0.0
        """Time spent in `sum_` and `gather` so far, waiting included."""
        self.vectors: list[Tensor] | None = None
        """Vectors in memory that the ranks share; None if they exchange messages."""

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Return a vector of zeros for `sum_`, in shared memory if that makes sums faster."""
        pays = self.size > 2 or (self.size == 2 and tensor.numel() > FEW)
        self.vectors = shared_vectors(tensor, self.gather) if pays and not tensor.is_cuda else None
        return torch.zeros_like(tensor) if self.vectors is None else self.vectors[self.rank]

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""
        began = time.perf_counter()
        if self.vectors is not None and tensor is self.vectors[self.rank]:
            self._sum_in_memory(self.vectors)
        elif self.size <= 2 or tensor.is_cuda:  # the sum of two numbers does not depend on their order
            distributed.all_reduce(tensor)
        else:
            self._sum_by_messages(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()  # costs nothing: the norm of the gradient, computed next, does it as well
        self.seconds += time.perf_counter() - began

    def gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in the order of ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        began = time.perf_counter()
        distributed.all_gather(parts, tensor)
        self.seconds += time.perf_counter() - began
        return torch.stack(parts)

    def _sum_in_memory(self, vectors: list[Tensor]) -> None:
        """Let each rank add up one slice of all vectors, and write the sum into all.

        Nothing passes through sockets; `python benchmarks/sums.py` compares it with gloo.
        """
        distributed.barrier()  # all vectors are written
        slices = (vector.tensor_split(self.size)[self.rank] for vector in vectors)
        for total, *others in zip(*(torch.split(part, CACHED) for part in slices), strict=True):
            for other in others:
                total.add_(other)
            for other in others:
                other.copy_(total)
        distributed.barrier()  # all slices are summed

    def _sum_by_messages(self, tensor: Tensor) -> None:
        """Let each rank add up one slice in the order of ranks and send it to the others; the order of gloo varies."""
        slices = tensor.tensor_split(self.size)
        mine = slices[self.rank]
        parts = [torch.empty_like(mine) for _ in slices]
        parts[self.rank].copy_(mine)
        self._exchange(slices, parts)
        for part in parts[1:]:
            parts[0].add_(part)
        mine.copy_(parts[0])
        self._exchange([mine] * self.size, slices)

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Send one tensor to each other rank, and receive one from each."""
        others = [rank for rank in range(self.size) if rank != self.rank]
        arriving = [distributed.irecv(received[rank], rank) for rank in others]
        leaving = [distributed.isend(sent[rank], rank) for rank in others]
        for work in arriving + leaving:
            assert work is not None, "this process is not in the group"
            work.wait()
