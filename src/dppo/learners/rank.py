"""TrainerRank: one of several processes that share the SGD of each minibatch; and waiting for these."""

import math
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dppo.errors import DppoError, GPUFailed, OutOfMemory, TrainingDiverged
from dppo.hosts.plans import TrainerPlan
from dppo.learners.sums import Group
from dppo.learners.trainers import LocalTrainer
from dppo.numerics.fingerprint import Expected
from dppo.numerics.portable import limit_blas
from dppo.ppo.exchange.records import Experience, Segment, Update
from dppo.spaces.spaces import Spaces
from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.failures import FETCH_TIMEOUT_S
from dppo.transports.ray.pickling import NO_MODEL, PackedModel, sendable, unpacked_model

COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # for one sum over all ranks; the default of torch is 30 minutes
LOOPBACK = "127.0.0.1"
REPEATS = 5  # of each measurement, to take the median
LONG_S = 1.0  # stop repeating a measurement after so long
TICK_S = 0.5  # longest single wait
ASK_EVERY_S = 3.0  # from an answer until a process is asked again whether it is running
SILENT_S = 20.0  # a process that has not answered for longer is stopped, or its node is gone
DEATH_REPORT_S = 2.0  # Ray reports a death later than the processes that were connected to the dead one notice it


@dataclass(eq=False)
class TrainerRank:
    """Hosts one rank: its trainer and its membership of the group, both made by `join`.

    The default group of torch.distributed belongs to the process, so a process hosts at most one rank.
    """

    plan: TrainerPlan
    spaces: Spaces
    rank: int
    model: PackedModel = NO_MODEL
    """The user's network; `plan` contains only its name."""
    _store: TCPStore | None = None

    def whereabouts(self) -> tuple[str, str]:
        """Return the id of this node, and an address at which other nodes reach it."""
        return ray.get_runtime_context().get_node_id(), str(ray.util.get_node_ip_address())

    def open_store(self, host: str) -> int:
        """Open the store through which ranks find each other, on rank 0, bound to `host` only; return its port."""
        listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host,
            port,
            self.plan.learners.num_learners,
            is_master=True,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return port

    def join(self, host: str, port: int, expected: Expected | None = None) -> str | DppoError:
        """Join the group, and build the trainer. Waits for: all ranks, at most a minute.

        Returns: how this process computes otherwise than `expected`, "" if it does not.
        """
        size = self.plan.learners.num_learners
        if self._store is None:
            self._store = TCPStore(host, port, size, is_master=False, timeout=COLLECTIVE_TIMEOUT)
        # By default gloo resolves the machine's host name, which on many machines gives a loopback address.
        interface = interface_of(LOOPBACK if host == LOOPBACK else self.whereabouts()[1])
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        try:
            limit_blas(self.plan.learners.learner_threads)
            backend = "nccl" if self.plan.learners.device != "cpu" and torch.cuda.is_available() else "gloo"
            distributed.init_process_group(
                backend, store=self._store, rank=self.rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
            )
            self._group = Group()
            network = replace(self.plan.network, model=unpacked_model(self.model))
            self._local = LocalTrainer(replace(self.plan, network=network), self.spaces, self._group, restores=False)
            return "" if expected is None else expected.problem(torch=True)
        except DppoError as error:
            return sendable(error)

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Continue with these weights and this optimizer state."""
        self._local.load(weights, state)

    def snapshot(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the weights [P] and the optimizer state.

        Views suffice, because Ray copies them before the next call; a copy of a large model is expensive.
        """
        return self._local.weights(copy=False), self._local.state(copy=False)

    def update(
        self, experience: Experience, with_state: bool, *segments: Segment
    ) -> tuple[Update | DppoError, np.ndarray | None, dict[str, np.ndarray] | None]:
        """Train on this rank's segments, together with the other ranks; `experience` comes without any segments.

        Returns: the update of all ranks; with `with_state`, also their new weights [P] and optimizer state.
        """
        try:
            update = self._local.update(replace(experience, segments=segments))
        except (OutOfMemory, GPUFailed):
            raise  # at once: the others wait for this rank in a sum
        except DppoError as error:
            return sendable(error), None, None
        return update, *(self.snapshot() if with_state else (None, None))

    def median_s(self, method: str, *rows: int) -> float:
        """Return the median seconds of the trainer's `rehearse` of so many rows, alone, or of `sum_gradients`.

        All ranks must measure the sum at once, equally often. Neither changes the weights.
        """
        torch.set_num_threads(self.plan.learners.learner_threads)
        work, times = partial(getattr(self._local.trainer, method), *rows), list[float]()
        while len(times) < 2 or (len(times) <= REPEATS and (not rows or sum(times[1:]) < LONG_S)):
            began = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return median(times[1:])  # the first is a warm-up, and a common start


def interface_of(address: str) -> str | None:
    """Return the network interface with this address; None if it cannot be found."""
    import psutil

    return next((name for name, own in psutil.net_if_addrs().items() if address in (one.address for one in own)), None)


@calls_ray
def wait_for(
    calls: Sequence[ObjectRef[Any]],
    check: Callable[[], None],
    timeout_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> list[Any]:
    """Return the answers of processes that may still be starting.

    Fails when: a call fails, time is up, or `check` raises, which is called at least every `TICK_S`.
    """
    deadline, pending = clock() + timeout_s, list(calls)
    try:
        while pending:
            check()
            if clock() > deadline:
                raise GetTimeoutError
            ready, pending = ray.wait(pending, num_returns=1, timeout=TICK_S)
            ray.get(ready, timeout=FETCH_TIMEOUT_S)
        return ray.get(list(calls), timeout=FETCH_TIMEOUT_S)
    except RayTaskError as error:
        raise _death_behind(error, calls) from None


@calls_ray
def wait_while_alive(
    ranks: Sequence[Any],
    calls: Sequence[ObjectRef[Any]],
    check: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Any]:
    """Return the answers to one call of each of `ranks`, without a deadline.

    Fails when: a rank fails, dies or stops answering, or `check` raises, which is called at least every `TICK_S`. The
    silence of a rank is measured by `clock`.
    """
    heard, asked = [clock()] * len(ranks), dict[ObjectRef[Any], int]()

    @calls_ray
    def check_all() -> None:
        check()
        for ref in ray.wait(list(asked), num_returns=len(asked), timeout=0)[0] if asked else ():
            ray.get(ref, timeout=FETCH_TIMEOUT_S)
            heard[asked.pop(ref)] = clock()
        for rank, handle in enumerate(ranks):
            silent_s = clock() - heard[rank]
            if silent_s > SILENT_S:
                raise TimeoutError(f"stopped answering: rank {rank} has been silent for {SILENT_S:.0f} s")
            if silent_s > ASK_EVERY_S and rank not in asked.values():
                asked[handle.__ray_ready__.options(concurrency_group="life").remote()] = rank

    return wait_for(calls, check_all)


def pause(seconds: float, check: Callable[[], None]) -> None:
    """Wait for so long, unless `check` raises."""
    ends_at = time.monotonic() + seconds
    while time.monotonic() < ends_at:
        check()
        time.sleep(min(TICK_S, max(0.0, ends_at - time.monotonic())))


@calls_ray
def _death_behind(error: RayTaskError, calls: Sequence[ObjectRef[Any]]) -> RayError:
    """Return the death of another rank that made a sum fail; `error` itself if none died."""
    for call in ray.wait(list(calls), num_returns=len(calls), timeout=DEATH_REPORT_S)[0]:
        try:
            ray.get(call, timeout=FETCH_TIMEOUT_S)
        except RayActorError as death:
            return death
        except RayError:
            continue
    return error


def raise_faults(answers: list[Any]) -> None:
    """Raise the fault of a rank, if any. A divergence concerns all ranks, and each describes its own rows."""
    faults = {rank: answer for rank, answer in enumerate(answers) if isinstance(answer, DppoError)}
    for error in faults.values():
        if len(faults) > 1 and isinstance(error, TrainingDiverged):
            raise TrainingDiverged("\n".join(f"Learner {rank}: {each}" for rank, each in faults.items()))
        raise error
