"""Groups of ranks without Ray: threads of this process for many options, or processes connected by gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.learning.parallel import Parallel


class OwnOrders:
    """Order in which one trainer visits all rows when each rank shuffles its own; replaces a generator.

    Minibatch i of all ranks is that of the first rank, followed by that of the second, and so on.
    """

    def __init__(self, orders: list[np.random.Generator], minibatches: int) -> None:
        self._orders = orders
        self._minibatches = minibatches

    def permutation(self, rows: int) -> np.ndarray:
        share = rows // len(self._orders)
        orders = [
            order.permutation(share) + rank * share for rank, order in enumerate(self._orders)
        ]
        parts = [np.array_split(order, min(self._minibatches, share)) for order in orders]
        return np.concatenate(
            [part for minibatch in zip(*parts, strict=True) for part in minibatch]
        )


class Meeting:
    """Ranks that are threads of this process."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=120)
        self._brought: list[Tensor] = [torch.empty(0)] * size
        self._ranks = [_ThreadRank(self, rank, size) for rank in range(size)]

    def exchange(self, rank: int, tensor: Tensor) -> Tensor:
        """Return the tensors of all ranks, stacked in order."""
        self._brought[rank] = tensor.clone()
        self._barrier.wait()
        everything = torch.stack(self._brought)
        self._barrier.wait()
        return everything

    def all_do(self, work: Callable[[Parallel], Any]) -> list[Any]:
        """Run `work` in every rank; return the results in the order of ranks."""
        results: list[Any] = [None] * len(self._ranks)

        def run(parallel: _ThreadRank) -> None:
            try:
                results[parallel.rank] = work(parallel)
            except BaseException as error:
                results[parallel.rank] = error
                self._barrier.abort()

        with ThreadPoolExecutor(len(self._ranks)) as threads:
            list(threads.map(run, self._ranks))
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in sorted(
            errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)
        ):
            raise error  # the error that broke the barrier, rather than those of the ranks that waited
        return results


class _ThreadRank(Parallel):
    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._meeting = meeting

    def zeros_like(self, tensor: Tensor) -> Tensor:
        return torch.zeros_like(tensor)

    def sum_(self, tensor: Tensor) -> None:
        tensor.copy_(self._meeting.exchange(self.rank, tensor).sum(dim=0))

    def gather(self, tensor: Tensor) -> Tensor:
        return self._meeting.exchange(self.rank, tensor)


class Processes:
    """Processes that import torch once, and form a gloo group of any size for each task."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("forkserver")  # imports torch once for all of them
        context.set_forkserver_preload(["torch", "gymnasium", "hypothesis", "pytest"])
        # A store in a file, because torch's over TCP looks up host names, which takes seconds where DNS is slow.
        self._folder = tempfile.TemporaryDirectory()
        self._groups = 0
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def all_do(self, size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `work` in the first `size` processes, as one group; return the results in the order of ranks."""
        self._groups += 1
        store = f"{self._folder.name}/{self._groups}"
        for rank, pipe in enumerate(self._pipes[:size]):
            pipe.send((rank, size, store, work, args))
        results = []
        for pipe in self._pipes[:size]:
            assert pipe.poll(60), "a process did not answer within a minute"
            results.append(pipe.recv())
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


def _serve(pipe: Connection) -> None:
    """Serve one task after the other in a process, each in a group of its own, until the pipe is closed."""
    from torch import distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    while True:
        try:
            rank, size, path, work, args = pipe.recv()
        except (EOFError, OSError):
            return
        store = FileStore(path, size)
        distributed.init_process_group(
            "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120)
        )
        try:
            result = work(*args)
        except Exception as error:
            result = error
        distributed.destroy_process_group()
        pipe.send(result)
