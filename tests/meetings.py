"""Ranks that meet without Ray: threads of this process for many options, processes for the real thing."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.parallel import Parallel


class OwnOrders:
    """The order in which one trainer meets rows whose ranks shuffle their own: stands where a generator does.

    Minibatch i of all ranks together is that of the first rank, followed by that of the second, and so on.
    """

    def __init__(self, orders: list[np.random.Generator], minibatches: int) -> None:
        self._orders, self._minibatches = orders, minibatches

    def permutation(self, rows: int) -> np.ndarray:
        share = rows // len(self._orders)
        own = [order.permutation(share) + rank * share for rank, order in enumerate(self._orders)]
        parts = [np.array_split(one, min(self._minibatches, share)) for one in own]
        return np.concatenate([part for minibatch in zip(*parts, strict=True) for part in minibatch])


# ------------------------------------------------------------------ threads


class Meeting:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30)
        self._brought: list[Tensor] = [torch.empty(0)] * size
        self._ranks = [_ThreadRank(self, rank, size) for rank in range(size)]

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        """What all ranks brought, stacked in their order."""
        self._brought[rank] = tensor.clone()
        self._barrier.wait()
        everything = torch.stack(self._brought)
        self._barrier.wait()
        return everything

    def all_do(self, work: Callable[[Parallel], Any]) -> list[Any]:
        """Let every rank do its work; the results, in the order of ranks."""
        results: list[Any] = [None] * len(self._ranks)

        def run(parallel: _ThreadRank) -> None:
            try:
                results[parallel.rank] = work(parallel)
            except BaseException as error:
                results[parallel.rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=run, args=(parallel,)) for parallel in self._ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error  # the one that broke the meeting, rather than those who were left waiting
        return results


class _ThreadRank:
    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank, self.size, self._meeting = rank, size, meeting

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def sum_(self, tensor: Tensor) -> None:
        tensor.copy_(self._meeting.exchange(self.rank, tensor).sum(dim=0))

    def gather(self, tensor: Tensor) -> Tensor:
        return self._meeting.exchange(self.rank, tensor)


# ------------------------------------------------------------------ processes


class Processes:
    """Processes that have imported torch once, and form a gloo group of the size that is asked for."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()

    def all_do(self, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Let the first `size` processes meet and do their work; the results, in the order of ranks."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, pipe in enumerate(self._pipes[:size]):
            pipe.send((rank, size, store.port, work, args))
        results = []
        for pipe in self._pipes[:size]:
            assert pipe.poll(60), "a process did not answer within a minute"
            results.append(pipe.recv())
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def _serve(pipe: Connection) -> None:
    """What each process does: meet, work, part, until nobody asks any more."""
    from torch import distributed
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    while True:
        try:
            rank, size, port, work, args = pipe.recv()
        except (EOFError, OSError):
            return
        store = TCPStore("127.0.0.1", port, is_master=False)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=30))
        try:
            result = work(*args)
        except Exception as error:
            result = error
        distributed.destroy_process_group()
        pipe.send(result)
