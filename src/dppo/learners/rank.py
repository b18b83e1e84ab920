"""TrainerRank: one of several processes that share the SGD of each minibatch."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from statistics import median

import numpy as np
import ray
import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dppo.errors import DppoError, GPUFailed, OutOfMemory
from dppo.hosts.plans import TrainerPlan
from dppo.learners.sums import RankGroup
from dppo.learners.trainers import LocalTrainer
from dppo.numerics.arithmetic import limit_blas
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Experience, Segment, Update
from dppo.spaces.spaces import Spaces
from dppo.transports.ray.pickling import NO_MODEL, PackedModel, sendable, unpacked_model

# Time limit of a sum over all ranks; the default of torch is 30 minutes.
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
LOOPBACK = "127.0.0.1"
REPEATS = 5  # repetitions of each measurement; the median counts
LONG_S = 1.0  # seconds after which a measurement is not repeated again


@dataclass(eq=False)
class TrainerRank:
    """Hosts one rank: its trainer and its membership of the group, which `join` creates.

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
        """Open the store through which the ranks find each other; return its port. Call it on rank 0 only.

        The store listens on the address `host` only, not on all interfaces.
        """
        is_ipv6 = ":" in host
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)  # 0: any free port
        port = int(listener.getsockname()[1])
        self._store = TCPStore(
            host,
            port,
            self.plan.learners.num_learners,
            is_master=True,
            timeout=COLLECTIVE_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store takes over the socket
            use_libuv=False,  # with it, torch 2.6 and 2.7 take no socket that listens
        )
        return port

    def join(self, host: str, port: int, expected: Expected | None = None) -> str | DppoError:
        """Join the group, and build the trainer. Waits for: all ranks, at most a minute.

        Returns:
            Differences between the numerics of this process and `expected`, or "". Or the error that was raised, in
            a form that can be sent.
        """
        try:
            self._join_group(host, port)
            network = replace(self.plan.network, model=unpacked_model(self.model))
            plan = replace(self.plan, network=network)
            self._local = LocalTrainer(plan, self.spaces, self._group, restores=False)
            if expected is None:
                return ""
            return expected.problem(torch=True)
        except DppoError as error:
            return sendable(error)

    def _join_group(self, host: str, port: int) -> None:
        learners = self.plan.learners
        if self._store is None:
            self._store = TCPStore(
                host, port, learners.num_learners, is_master=False, timeout=COLLECTIVE_TIMEOUT
            )
        # By default gloo resolves the machine's host name, which on many machines gives a loopback address.
        _, address = self.whereabouts()
        interface = interface_of(LOOPBACK if host == LOOPBACK else address)
        if interface is not None:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        limit_blas(learners.learner_threads)
        on_gpu = learners.device != "cpu" and torch.cuda.is_available()
        distributed.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=learners.num_learners,
            timeout=COLLECTIVE_TIMEOUT,
        )
        self._group = RankGroup()

    def load(
        self, weights: np.ndarray, state: dict[str, np.ndarray], rows: dict[str, np.ndarray]
    ) -> None:
        """Continue with these weights, this optimizer state, and the replay buffer of this rank, if it has one."""
        self._local.load(weights, state | rows)

    def snapshot(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Return the weights [P] and the optimizer state.

        Views suffice, because Ray copies them before the next call; a copy of a large model is expensive.
        """
        return self._local.weights(copy=False), self._local.learned_state()

    def update(
        self, experience: Experience, with_state: bool, *segments: Segment
    ) -> tuple[Update | DppoError, np.ndarray | None, dict[str, np.ndarray] | None]:
        """Train on the segments of this rank, together with the other ranks; `experience` contains no segments.

        Returns:
            The update of all ranks, or an error in a form that can be sent; with `with_state`, also the new weights [P]
            and the optimizer state.
        """
        try:
            update = self._local.update(replace(experience, segments=segments))
        except (OutOfMemory, GPUFailed):
            raise  # not returned, because the other ranks are waiting for this one in a sum
        except DppoError as error:
            return sendable(error), None, None
        if not with_state:
            return update, None, None
        return update, *self.snapshot()

    def rehearse_s(self, rows: int) -> float:
        """Return the median seconds of a forward and backward pass on `rows` rows; the weights do not change."""
        return self._median_s(partial(self._local.trainer.rehearse, rows), LONG_S)

    def sum_s(self) -> float:
        """Return the median seconds of a sum of gradients; all ranks must call this at the same time."""
        # without a time limit, so that each rank takes part in the same number of sums
        return self._median_s(self._local.trainer.sum_gradients)

    def _median_s(self, work: Callable[[], None], long_s: float = float("inf")) -> float:
        torch.set_num_threads(self.plan.learners.learner_threads)
        work()  # a warm-up, after which all ranks start together
        times: list[float] = []
        while not times or (len(times) < REPEATS and sum(times) < long_s):
            began = time.perf_counter()
            work()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return median(times)


def interface_of(address: str) -> str | None:
    """Return the network interface with this address; None if it cannot be found."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address == address for entry in addresses):
            return name
    return None
