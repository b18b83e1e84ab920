"""Vectors in memory shared by several processes of one machine."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Callable
from contextlib import suppress

import torch
from torch import Tensor, distributed

TOKEN_BYTES = 8


def shared_vectors(like: Tensor, gather: Callable[[Tensor], Tensor]) -> list[Tensor] | None:
    """Create one vector of zeros per rank, with the length and dtype of `like`, in memory that all ranks share.

    The memory is anonymous: it is freed with the last process that maps it, also if ranks are killed.

    Waits for: every rank of the default group; all must call this at once. `gather` stacks one tensor of each.
    Returns: the vectors in the order of ranks; None, in every rank, unless all run on one Linux machine.
    """
    mine = Memory(like.numel() * like.element_size())
    try:
        places = gather(torch.tensor(mine.where())).tolist()
        seen = [open_memory(pid, file, token, mine.bytes) for pid, file, token in places]
        # Clear the token before anybody computes with the vector; close no file before all have opened it.
        everybody = bool(gather(torch.tensor([int(None not in seen)])).all())
        if mine.map is not None:
            mine.map[:TOKEN_BYTES] = bytes(TOKEN_BYTES)
        distributed.barrier()
    finally:
        mine.close()
    if not everybody:
        return None
    return [torch.frombuffer(memory, dtype=like.dtype, count=like.numel()) for memory in seen if memory is not None]


class Memory:
    """Memory of this process that others can open; a token at its start identifies it."""

    def __init__(self, wanted: int) -> None:
        self.bytes = max(wanted, TOKEN_BYTES)
        self.map: mmap.mmap | None = None
        self._token = secrets.randbits(8 * TOKEN_BYTES - 1)
        self._file = -1
        # Not on Linux, or refused by the system: then no rank shares, as on several machines.
        with suppress(AttributeError, OSError):
            self._file = os.memfd_create("dppo gradient")
            os.truncate(self._file, self.bytes)
            self.map = mmap.mmap(self._file, self.bytes)
            self.map[:TOKEN_BYTES] = self._token.to_bytes(TOKEN_BYTES, "little")

    def where(self) -> list[int]:
        """Return the process id, the file descriptor and the token."""
        return [os.getpid(), self._file, self._token]

    def close(self) -> None:
        """Close the file; the memory stays as long as it is mapped."""
        if self._file >= 0:
            os.close(self._file)


def open_memory(pid: int, file: int, token: int, size: int) -> mmap.mmap | None:
    """Map the memory of another process; return None if that process is not on this machine."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        try:
            memory = mmap.mmap(opened, size)
        finally:
            os.close(opened)
    except (OSError, ValueError):
        return None
    return memory if memory[:TOKEN_BYTES] == token.to_bytes(TOKEN_BYTES, "little") else None
