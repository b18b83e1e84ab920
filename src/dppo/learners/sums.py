"""Group: the ranks of a training, which exchange messages, or sum in memory that they share."""

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, distributed

from dppo.ppo.learning.parallel import Parallel

FEW = 1 << 18  # elements up to which two ranks exchange messages faster than they pass two barriers
TOKEN_BYTES = 8
CACHED = 1 << 16  # elements that stay in the cache of a core between adding and copying


class RankGroup(Parallel):
    """Ranks that communicate through the default group of torch.distributed, which must have been joined.

    On CPUs numbers are added in the order of ranks on any machine, with the same bits. On GPUs nccl decides the order.

    Waits for: every rank, in each call. Fails when: a rank is gone, or the timeout of the group passes.
    """

    def __init__(self) -> None:
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()
        # in memory that the ranks share; None if they exchange messages
        self.vectors: list[Tensor] | None = None

    def zeros_like(self, tensor: Tensor) -> Tensor:
        """Return a vector of zeros for `sum_`, in shared memory if that makes sums faster."""
        pays = self.size > 2 or (self.size == 2 and tensor.numel() > FEW)
        self.vectors = self._shared_vectors(tensor) if pays and not tensor.is_cuda else None
        if self.vectors is None:
            return torch.zeros_like(tensor)
        return self.vectors[self.rank]

    def sum_(self, tensor: Tensor) -> None:
        """Replace `tensor` by its sum over all ranks."""
        if self.vectors is not None and tensor is self.vectors[self.rank]:
            self._sum_in_memory(self.vectors)
        elif self.size <= 2 or tensor.is_cuda:
            # the sum of two numbers does not depend on their order
            distributed.all_reduce(tensor)
        else:
            self._sum_by_messages(tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()  # costs nothing: the norm of the gradient, computed next, does it as well

    def gather(self, tensor: Tensor) -> Tensor:
        """Stack the tensors of all ranks in the order of ranks."""
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        distributed.all_gather(parts, tensor)
        return torch.stack(parts)

    def _sum_in_memory(self, vectors: list[Tensor]) -> None:
        """Let each rank add up one slice of all vectors, and write the sum into all.

        Nothing passes through sockets; `python benchmarks/sums.py` compares it with gloo.
        """
        distributed.barrier()  # all vectors are written
        slices = [vector.tensor_split(self.size)[self.rank] for vector in vectors]
        for total, *addends in zip(*(torch.split(part, CACHED) for part in slices), strict=True):
            for addend in addends:
                total.add_(addend)
            for addend in addends:
                addend.copy_(total)
        distributed.barrier()  # all slices are summed

    def _sum_by_messages(self, tensor: Tensor) -> None:
        """Let each rank add up one slice in the order of ranks and send it to the others; the order of gloo varies."""
        slices = [len(part) for part in tensor.tensor_split(self.size)]
        equal = [slices[self.rank]] * self.size
        parts = tensor.new_empty(self.size, slices[self.rank])  # of my slice
        distributed.all_to_all_single(parts.view(-1), tensor, equal, slices)
        for part in parts[1:]:
            parts[0].add_(part)
        distributed.all_to_all_single(tensor, parts[0].repeat(self.size), slices, equal)

    def _shared_vectors(self, like: Tensor) -> list[Tensor] | None:
        """Create one vector of zeros per rank, with the length and dtype of `like`, in memory that all ranks share.

        The memory is anonymous: it is freed with the last process that maps it, also if ranks are killed.

        Waits for: every rank of the default group; all must call this at once.
        Returns: the vectors in the order of ranks; None, in every rank, unless all run on one Linux machine.
        """
        size = max(like.numel() * like.element_size(), TOKEN_BYTES)
        with offered_memory(size) as place:
            places = self.gather(torch.tensor(place)).tolist()
            memories = [open_memory(pid, file, token, size) for pid, file, token in places]
            opened = [memory for memory in memories if memory is not None]
            all_opened = bool(self.gather(torch.tensor([len(opened)])).eq(self.size).all())
            # Clear the token before any rank computes with the vector; close no file before all have opened it.
            own_memory = memories[self.rank]
            if own_memory is not None:
                own_memory[:TOKEN_BYTES] = bytes(TOKEN_BYTES)
            distributed.barrier()
        if not all_opened:
            return None
        return [torch.frombuffer(memory, dtype=like.dtype, count=like.numel()) for memory in opened]


@contextmanager
def offered_memory(size: int) -> Iterator[list[int]]:
    """Let others open memory of this process: yield its process id, a file descriptor and a token at its start.

    The descriptor is -1 if this is not Linux, or the system refuses: then no rank shares, as on several machines. The
    memory stays as long as it is mapped.
    """
    file = -1
    token = secrets.randbits(8 * TOKEN_BYTES - 1)
    with suppress(AttributeError, OSError):
        file = os.memfd_create("dppo gradient")
        os.truncate(file, size)
        os.pwrite(file, token.to_bytes(TOKEN_BYTES, "little"), 0)
    try:
        yield [os.getpid(), file, token]
    finally:
        with suppress(OSError):
            os.close(file)


def open_memory(pid: int, file: int, token: int, size: int) -> mmap.mmap | None:
    """Map the memory of another process; return None if that process is not on this machine."""
    try:
        with open(f"/proc/{pid}/fd/{file}", "r+b", buffering=0) as opened:
            memory = mmap.mmap(opened.fileno(), size)
    except (OSError, ValueError):
        return None
    if memory[:TOKEN_BYTES] == token.to_bytes(TOKEN_BYTES, "little"):
        return memory
    return None
