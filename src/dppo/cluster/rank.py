"""TrainerRank: one of several learners that share the SGD of each minibatch."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from statistics import median

import numpy as np
import torch
from torch import distributed

from dppo import streams
from dppo.assemble import build_trainer
from dppo.cluster.actor import Fault
from dppo.config import Config
from dppo.errors import DppoError
from dppo.ppo.batch import make_batch
from dppo.ppo.normalizer import Statistics
from dppo.ppo.parallel import Group
from dppo.ppo.segment import Segment
from dppo.spaces import Spaces
from dppo.streams import Stream

COLLECTIVE_TIMEOUT = timedelta(seconds=60)  # for one sum over all ranks; torch's default is 30 minutes


class TrainerRank:
    """Hosts one rank: its trainer, and its place in the group.

    The default group of torch.distributed belongs to the process, so a process hosts one rank at most.
    """

    def __init__(self, config: Config, spaces: Spaces, rank: int) -> None:
        """Do nothing that can fail; `join` does."""
        self._config = config
        self._spaces = spaces
        self._rank = rank
        self._store: distributed.TCPStore | None = None

    def open_store(self) -> tuple[str, int]:
        """Rank 0 opens the place where ranks meet: address and port, free because the system chose it."""
        host = _own_address()
        size = self._config.num_learners
        self._store = distributed.TCPStore(
            host, 0, size, is_master=True, timeout=COLLECTIVE_TIMEOUT, wait_for_workers=False
        )
        return host, self._store.port

    def join(self, host: str, port: int) -> None | Fault:
        """Meet the other ranks, and build the trainer. Waits for: all ranks, at most a minute."""
        size = self._config.num_learners
        if self._store is None:
            self._store = distributed.TCPStore(host, port, size, is_master=False, timeout=COLLECTIVE_TIMEOUT)
        if host.startswith("127."):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # or gloo looks for this machine's name in the network
        try:
            torch.set_num_threads(self._config.learner_threads)
            backend = "nccl" if self._config.device != "cpu" and torch.cuda.is_available() else "gloo"
            distributed.init_process_group(
                backend, store=self._store, rank=self._rank, world_size=size, timeout=COLLECTIVE_TIMEOUT
            )
            self._trainer = build_trainer(self._config, self._spaces, Group())
        except DppoError as error:
            return Fault.of(error)
        return None

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these weights and this optimiser state."""
        self._trainer.load(weights, state)

    def update(
        self, statistics: Statistics, iteration: int, *segments: Segment
    ) -> tuple[dict[str, float] | Fault, np.ndarray | None, dict[str, np.ndarray] | None]:
        """Train on this rank's segments, together with the others.

        Returns: figures of all ranks; and from rank 0 the new weights [P] and optimiser state.
        """
        config = self._config
        torch.set_num_threads(config.learner_threads)  # a setting of the thread, and Ray chooses ours
        batch = make_batch(segments, statistics, gamma=config.gamma, gae_lambda=config.gae_lambda)
        # One learner draws what training in the driver draws.
        index = (iteration,) if config.num_learners == 1 else (iteration, self._rank)
        order = streams.generator(config.seed, Stream.MINIBATCHES, *index)
        try:
            figures = self._trainer.update(batch, config.learning_rate_at(iteration), order)
        except DppoError as error:
            return Fault.of(error), None, None
        if self._rank > 0:
            return figures, None, None
        return figures, self._trainer.weights(), self._trainer.state()

    def measure(self, rows: int, repeats: int = 5) -> tuple[float, float]:
        """Seconds of forward and backward on `rows` rows, and of the sum over all ranks; the weights stay as they are."""
        torch.set_num_threads(self._config.learner_threads)
        learning, summing = [], []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            self._trainer.rehearse(rows)
            learnt = time.perf_counter()
            self._trainer.sum_gradients()
            learning.append(learnt - began)
            summing.append(time.perf_counter() - learnt)
        return median(learning[1:]), median(summing[1:])  # the first one warms up

    def snapshot(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Weights [P] and optimiser state."""
        return self._trainer.weights(), self._trainer.state()

    def answer(self) -> bool:
        """Show that the process is running; answered beside an update."""
        return True


def _own_address() -> str:
    """An address of this machine that the other ranks can reach."""
    import ray

    return str(ray.util.get_node_ip_address())
