"""Vectors of several processes of one machine that each of them can read and write."""

from __future__ import annotations

import mmap
import os
import secrets
from contextlib import suppress

import torch
from torch import Tensor, distributed

TOKEN_BYTES = 8


def shared_vectors(like: Tensor) -> list[Tensor] | None:
    """One vector of zeros a rank, as long as `like` and of its type, the same memory in all ranks.

    Nothing is left behind when ranks are killed: the memory has no name, and goes with the last that uses it.

    Waits for: every rank of the default group, all of which must call this at once.
    Returns: the vectors in the order of ranks; None, in every rank, where they do not run on one Linux machine.
    """
    mine = _Memory(like.numel() * like.element_size())
    try:
        seen = [_opened(pid, file, token, mine.bytes) for pid, file, token in _gathered(mine.where())]
        # Zeros again, before anybody computes with it; and nobody closes what another has yet to open.
        everybody = all(ok for (ok,) in _gathered([int(None not in seen)]))
        if mine.map is not None:
            mine.map[:TOKEN_BYTES] = bytes(TOKEN_BYTES)
        distributed.barrier()
    finally:
        mine.close()
    if not everybody:
        return None
    return [torch.frombuffer(memory, dtype=like.dtype, count=like.numel()) for memory in seen if memory is not None]


class _Memory:
    """Memory of this process that others may open, with a token at its start by which they know it."""

    def __init__(self, wanted: int) -> None:
        self.bytes = max(wanted, TOKEN_BYTES)
        self.map: mmap.mmap | None = None
        self._token = secrets.randbits(8 * TOKEN_BYTES - 1)
        self._file = -1
        if not hasattr(os, "memfd_create"):  # not Linux
            return
        with suppress(OSError):  # refused: then nobody shares, as on several machines
            self._file = os.memfd_create("dppo gradient")
            os.truncate(self._file, self.bytes)
            self.map = mmap.mmap(self._file, self.bytes)
            self.map[:TOKEN_BYTES] = self._token.to_bytes(TOKEN_BYTES, "little")

    def where(self) -> list[int]:
        return [os.getpid(), self._file, self._token]

    def close(self) -> None:
        """The memory stays as long as it is mapped."""
        if self._file >= 0:
            os.close(self._file)


def _opened(pid: int, file: int, token: int, size: int) -> mmap.mmap | None:
    """The memory of a process of this machine; None where there is no such process, or it is another's."""
    try:
        opened = os.open(f"/proc/{pid}/fd/{file}", os.O_RDWR)
        try:
            memory = mmap.mmap(opened, size)
        finally:
            os.close(opened)
    except (OSError, ValueError):
        return None
    return memory if memory[:TOKEN_BYTES] == token.to_bytes(TOKEN_BYTES, "little") else None


def _gathered(numbers: list[int]) -> list[list[int]]:
    """The numbers of every rank."""
    mine = torch.tensor(numbers)
    everybody = [torch.empty_like(mine) for _ in range(distributed.get_world_size())]
    distributed.all_gather(everybody, mine)
    return [one.tolist() for one in everybody]
