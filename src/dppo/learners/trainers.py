"""Trainers: the seam between collecting and learning; and LocalTrainer, which learns in this process."""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import numpy as np
import torch

from dppo.errors import ConfigError, GPUFailed, OutOfMemory
from dppo.hosts.plans import TrainerPlan
from dppo.hosts.trainer_builder import build_trainer
from dppo.log import logger
from dppo.numerics.arithmetic import as_usual, limit_blas
from dppo.numerics.torch_modes import exact_on, torch_as_usual
from dppo.ppo.exchange.records import Experience, TrainerState, Update
from dppo.ppo.learning.batch import row_bytes
from dppo.ppo.learning.gpu import (
    UpdateRows,
    explained,
    gpu_bytes_of,
    gpu_memory_line,
    repeatable_on,
)
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.spaces import Spaces


class Trainers(Protocol):
    """One trainer, in this process or of several ranks."""

    spec: NetworkSpec

    def update(self, experience: Experience) -> Update:
        """Do one update on the segments of an iteration."""

    def weights(self) -> np.ndarray:
        """Copy all weights [P]."""

    def state(self) -> dict[str, np.ndarray]:
        """Copy the optimizer's state."""

    def learned_state(self) -> dict[str, np.ndarray]:
        """Return the state without the replay buffer, which is large; the next update may change it."""

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Continue with these weights and this optimizer state."""

    def close(self) -> None:
        """Stop, and release all resources."""


class LocalTrainer:
    """Trains in this process, alone or as one of several ranks."""

    def __init__(
        self,
        plan: TrainerPlan,
        spaces: Spaces,
        parallel: Parallel | None = None,
        *,
        restores: bool = True,
    ) -> None:
        """Build the trainer, as a rank of `parallel` if there are several.

        `restores`: whether a failed update restores the weights and the state from before it, which costs a copy.
        """
        self._plan = plan
        self._parallel = parallel or Parallel()
        self._restores = restores
        self.interruptible: Callable[[], AbstractContextManager[None]] = nullcontext
        """The context of updates, in which a signal may raise."""
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(plan.learners.learner_threads)
        with as_usual(), torch_as_usual():
            self.trainer = build_trainer(plan, spaces, self._parallel)
        self.spec = self.trainer.spec
        self.device = self.trainer.device
        self._repeatable_on_device: Callable[[], AbstractContextManager[None]] = nullcontext
        if self.device.type != "cpu":
            self._repeatable_on_device = lambda: repeatable_on(self.device)
        # from before a GPU failed
        self._rescued: TrainerState | None = None

    def update(self, experience: Experience) -> Update:
        """Let the trainer learn from the segments of this rank."""
        with (
            self._restored_on_failure(),
            self.interruptible(),
            self._explained_errors(),
            self._repeatable(),
        ):
            return self.trainer.update(experience)

    @contextmanager
    def _repeatable(self) -> Iterator[None]:
        """Compute the same bits each time, with the default settings of NumPy and torch, which user code may change."""
        # set for each update, because torch stores them for each thread, and Ray may choose another thread
        num_threads = self._plan.learners.learner_threads
        with (
            as_usual(),
            torch_as_usual(),
            limit_blas(1),
            exact_on(num_threads),
            self._repeatable_on_device(),
        ):
            yield

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        """Raise errors of memory and of a GPU with an explanation; free the memory of the failed update."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            meaning = explained(error, self.device, self._rows())
            if meaning is None:
                raise
            release(error)
            raise meaning from error

    @contextmanager
    def _restored_on_failure(self) -> Iterator[None]:
        """Restore weights and state if the update diverges or is stopped: checkpoints hold finished iterations."""
        if not self._restores:
            yield
            return
        snapshot = self.trainer.snapshot()
        try:
            yield
        except BaseException:
            self._restore(snapshot)
            raise

    def _restore(self, snapshot: TrainerState) -> None:
        """Undo an update; keep its snapshot in this process if the GPU has failed."""
        try:
            self.trainer.restore(snapshot)
        except RuntimeError:
            if self.device.type == "cpu":
                raise
            self._rescued = snapshot

    def weights(self, *, copy: bool = True) -> np.ndarray:
        """Read all weights [P]; without `copy`, updates may overwrite them."""
        if self._rescued is not None:
            return self._rescued.weights
        return self.trainer.weights(copy=copy)

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return the optimizer's state; without `copy`, updates may overwrite it."""
        if self._rescued is not None:
            return self._rescued.state
        return self.trainer.state(copy=copy)

    def learned_state(self) -> dict[str, np.ndarray]:
        """Take views of the state without the replay buffer."""
        if self._rescued is not None:
            return self._rescued.state
        return self.trainer.learned_state(copy=False)

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Continue with these weights and this optimizer state."""
        self.trainer.load(weights, state)

    def _rows(self) -> UpdateRows:
        sizes = self._plan.sizes
        limit = self._plan.learners.micro_batch_size
        share = sizes.minibatch_rows // self._parallel.size
        at_once = share if limit is None else min(share, limit)
        return UpdateRows(at_once, limit, sizes.sequence_length)

    def check_gpu(self, batch_rows: int) -> None:
        """Log the memory that an update on `batch_rows` rows takes on a GPU; do nothing on a CPU.

        Raise ConfigError if a minibatch does not fit.
        """
        if self.device.type == "cpu":
            return
        try:
            with self._explained_errors():
                needed = self.gpu_bytes(batch_rows)
        except (GPUFailed, OutOfMemory) as error:
            raise ConfigError(str(error)) from error
        logger.info("%s", gpu_memory_line(needed, self._rows(), self.device))

    def gpu_bytes(self, batch_rows: int) -> int:
        """Estimate the bytes of GPU memory of an update on `batch_rows` rows, from one measured minibatch."""
        rows = self._rows()
        peak = gpu_bytes_of(self.trainer.rehearse, rows.at_once, self.device)
        other_rows = batch_rows + self._plan.sizes.minibatch_rows - rows.at_once
        return peak + other_rows * row_bytes(self.spec, rows.sequence_length)

    def close(self) -> None:
        """Restore torch's number of threads."""
        torch.set_num_threads(self._threads_before)


def release(error: BaseException) -> None:
    """Free the memory that the frames of `error` hold: a batch, and what the network computed from it."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()
