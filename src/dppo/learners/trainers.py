"""Trainers: the protocol that PPOLearner uses; LocalTrainer in this process; trainers that reuse or trace segments."""

import gc
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from dppo import streams
from dppo.config.parts import annealed
from dppo.errors import ConfigError
from dppo.hosts.builders import build_trainer
from dppo.hosts.plans import TrainerPlan
from dppo.log import logger
from dppo.numerics.arithmetic import as_usual, torch_as_usual
from dppo.numerics.portable import limit_blas
from dppo.ppo.exchange.records import PolicySnapshot, Segment, Update
from dppo.ppo.learning.batch import make_batch, row_bytes
from dppo.ppo.learning.gpu import Rows, explained, gpu_bytes_of, gpu_memory_line, repeatable_on
from dppo.ppo.learning.off_policy import joined
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.networks.network import NetworkSpec
from dppo.ppo.networks.torch_settings import exact_on
from dppo.spaces.spaces import Spaces, leaves, walk
from dppo.streams import Stream

KEPT = "kept."  # begins the names of kept arrays in the state
OBSERVATIONS = {"obs": 2, "successors": 1}  # and the axes before those of an observation
# In the order in which a step makes them. Noise follows from the seed: it shows in the actions.
STEPWISE = ("obs", "masks", "values", "logprobs", "actions", "rewards", "terminated", "truncated", "valid")


class Trainers(Protocol):
    """One trainer, in this process or of several ranks."""

    spec: NetworkSpec

    def update(
        self, segments: Sequence[Any], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one PPO update on the segments of `iteration` (0, 1, ...), collected with `policy`.

        Args:
            segments: in sampler order; references to them if ranks fetch them from the actors.
            reward_scale: divisor of rewards; None if they are not normalized.
        """

    def weights(self) -> np.ndarray:
        """Return all weights [P]; later updates do not change them."""

    def state(self) -> dict[str, np.ndarray]:
        """Return the optimizer's state; later updates do not change it."""

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Continue with these weights and this optimizer state."""

    def close(self) -> None:
        """Stop, and release all resources."""


class LocalTrainer:
    """Trains in this process, alone or as one of several ranks."""

    def __init__(self, plan: TrainerPlan, spaces: Spaces, parallel: Parallel | None = None) -> None:
        self._plan, self._parallel = plan, parallel or Parallel()
        self.interruptible: Callable[[], AbstractContextManager[None]] = nullcontext  # there, a signal raises
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(plan.learners.learner_threads)
        with as_usual(), torch_as_usual():
            self.trainer = build_trainer(plan, spaces, parallel)
        self.spec, self.device = self.trainer.model.spec, self.trainer.model.parameters.weights.device
        self.load = self.trainer.load
        self._rescued: tuple[np.ndarray, dict[str, np.ndarray]] | None = None  # from before a GPU failed

    def update(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one PPO update on the segments of `iteration` (0, 1, ...), collected with `policy`."""
        before = self.weights(), self.state()
        try:
            with self.interruptible():
                return self.train(segments, policy, reward_scale, iteration)
        except BaseException:  # it diverged or was stopped; the checkpoint must hold the result of the last iteration
            self._go_back_to(*before)
            raise

    def _go_back_to(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore what was there before an update; keep it in this process if the GPU takes nothing any more."""
        try:
            self.load(weights, state)
        except RuntimeError:
            if self.device.type == "cpu":
                raise
            self._rescued = weights, state

    def weights(self, *, copy: bool = True) -> np.ndarray:
        """Return all weights [P]; without `copy`, updates may overwrite them."""
        return self.trainer.weights(copy=copy) if self._rescued is None else self._rescued[0]

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return the optimizer's state; without `copy`, updates may overwrite it."""
        return self.trainer.state(copy=copy) if self._rescued is None else self._rescued[1]

    def train(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Make a batch of the segments of this rank, and train on it."""
        try:
            with as_usual(), torch_as_usual():
                return self._train(segments, policy, reward_scale, iteration)
        except (MemoryError, RuntimeError) as error:
            meaning = explained(error, self.device, self._rows())
            if meaning is None:
                raise
            release(error)
            raise meaning from error

    def _rows(self) -> Rows:
        sizes, limit = self._plan.sizes, self._plan.learners.micro_batch_size
        own = sizes.minibatch_rows // self._parallel.size
        return Rows(own if limit is None else min(own, limit), limit, sizes.sequence_length)

    def _train(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        plan, parallel = self._plan, self._parallel
        batch = make_batch(segments, policy.obs_scale, reward_scale, plan.ppo, plan.sizes.sequence_length)
        batch = replace(batch, iterations=min(iteration + 1, plan.ppo.reuse))
        index = (iteration,) if parallel.size == 1 else (iteration, parallel.rank)  # one draws as the driver does
        order, now = streams.generator(plan.seed, Stream.MINIBATCHES, *index), iteration / plan.sizes.iterations
        exact = exact_on(plan.learners.learner_threads)  # per thread, and Ray chooses the thread
        with limit_blas(1), exact, repeatable_on(self.device):
            return self.trainer.update(batch, annealed(plan.ppo, now), order, lagged=policy.version < iteration)

    def gpu_bytes(self, batch_rows: int) -> int:
        """Return about how many bytes of a GPU an update on so many rows takes; measured with one minibatch."""
        rows, minibatch = self._rows(), self._plan.sizes.minibatch_rows
        each = row_bytes(self.spec, rows.sequence_length)
        peak = gpu_bytes_of(self.trainer.rehearse, rows.at_once, self.device)
        return peak + each * (batch_rows + minibatch - rows.at_once)

    def check_gpu(self, batch_rows: int) -> None:
        """Log the memory that updates of so many rows take on a GPU; nothing on a CPU.

        Raise ConfigError if a minibatch does not fit.
        """
        if self.device.type == "cpu":
            return
        try:
            needed = self.gpu_bytes(batch_rows)
        except RuntimeError as error:
            meaning = explained(error, self.device, self._rows())
            if meaning is None:
                raise
            release(error)
            raise ConfigError(str(meaning)) from error
        logger.info("%s", gpu_memory_line(needed, self._rows(), self.device))

    def close(self) -> None:
        """Restore torch's number of threads."""
        torch.set_num_threads(self._threads_before)


def release(error: BaseException) -> None:
    """Free the memory that the frames of `error` hold: a batch, and what the network computed from it."""
    traceback.clear_frames(error.__traceback__)
    gc.collect()


class ReusingTrainers:
    """Trainers that train on the segments of the last R iterations in each update.

    This process keeps the R - 1 older ones, in the state, because only the policies that made them could make them
    again. So neither the loss of an actor, a rank or a node nor a resume changes what is trained on.
    """

    def __init__(self, trainers: Trainers, reuse: int, obs: np.dtype[Any]) -> None:
        """Wrap `trainers`; `obs` is the dtype of an observation in segments."""
        self._trainers, self._reuse, self._obs = trainers, reuse, obs
        self.spec, self.weights, self.close = trainers.spec, trainers.weights, trainers.close
        self._kept: list[list[Segment]] = []  # oldest first

    def update(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one update on these segments and the kept ones, those of each sampler as one long segment."""
        newest = [_copied(_arrays(one), self._obs) for one in segments]  # views of Ray's store would fill it
        whole = [joined(of_sampler) for of_sampler in zip(*self._kept, newest, strict=True)]  # alike to the byte
        update = self._trainers.update(whole, policy, reward_scale, iteration)
        self._kept = [*self._kept, newest][1 - self._reuse :]
        return update

    def state(self) -> dict[str, np.ndarray]:
        """Return the state of the trainers, and all kept segments."""
        return self._trainers.state() | {
            f"{KEPT}{number}.{sampler}.{name}": array
            for number, batch in enumerate(self._kept)
            for sampler, segment in enumerate(batch)
            for name, array in _arrays(segment).items()
        }

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`; that of another run holds no segments."""
        self._trainers.load(weights, {name: array for name, array in state.items() if not name.startswith(KEPT)})
        kept: dict[int, dict[int, dict[str, np.ndarray]]] = {}
        for name, array in state.items():
            if name.startswith(KEPT):
                number, sampler, rest = name.removeprefix(KEPT).split(".", 2)
                kept.setdefault(int(number), {}).setdefault(int(sampler), {})[rest] = array
        batches = [[batch[sampler] for sampler in sorted(batch)] for _, batch in sorted(kept.items())]
        self._kept = [[_copied(arrays, self._obs) for arrays in batch] for batch in batches]


def _arrays(segment: Segment) -> dict[str, np.ndarray]:
    """Return the arrays of a segment by name; observations leaf by leaf."""
    columns = ((name, getattr(segment, name)) for name in Segment.__slots__)
    parts = (part for name, column in columns if column is not None for part in walk(column, name=name))
    return {name: np.ascontiguousarray(leaf) for name, leaf, is_leaf in parts if is_leaf}


def _copied(arrays: Mapping[str, np.ndarray], obs: np.dtype[Any]) -> Segment:
    """Return the segment of copies of these arrays, whose observations have dtype `obs`."""
    columns = {name: array.copy() for name, array in arrays.items() if name in Segment.__slots__}
    for name, axes in OBSERVATIONS.items():
        names = [leaf for leaf, _, is_leaf in walk(obs, name=name) if is_leaf]
        columns[name] = np.empty(arrays[names[0]].shape[:axes], obs)
        for leaf, to in zip(names, leaves(columns[name]).values(), strict=True):
            to[...] = arrays[leaf]
    return Segment(**columns)


class TracingTrainers:
    """Trainers that take checksums of each update; all else is left to those inside."""

    def __init__(self, trainers: Trainers, plan: TrainerPlan) -> None:
        self._trainers, self._plan = trainers, plan
        self.spec, self.weights, self.state = trainers.spec, trainers.weights, trainers.state
        self.load, self.close = trainers.load, trainers.close
        self._latest: dict[str, str] = {}  # of no update yet: an evaluation that is repeated reports a row before one

    def update(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one update, and take its checksums, in the order of their causes."""
        update = self._trainers.update(segments, policy, reward_scale, iteration)
        ppo, length = self._plan.ppo, self._plan.sizes.sequence_length
        scales = [scale for scale in (policy.obs_scale, policy.value_scale) if scale is not None]
        of_policy = _checksum(policy.weights, *(getattr(scale, name) for scale in scales for name in scale.__slots__))
        self._latest = {"policy": of_policy}
        for name in STEPWISE:
            self._latest |= {f"{name}/{number}": _of_steps(one, name) for number, one in enumerate(segments)}
        for number, one in enumerate(segments):
            batch = make_batch([one], policy.obs_scale, reward_scale, ppo, length)
            self._latest[f"advantages/{number}"] = _checksum(batch.advantages)
        gradients = self.state()["exp_avg"]  # Adam's running mean of all of them
        self._latest |= {"gradients": _checksum(gradients), "weights": _checksum(self.weights())}
        return update

    def line(self, row: Mapping[str, float]) -> dict[str, Any]:
        """Return the checksums of the iteration of a row of metrics, by quantity and sampler: `rewards/3`."""
        if not self._latest:
            return {}
        return {"iteration": row["iteration"], **self._latest, "global_step": row["global_step"]}


def _of_steps(segment: Segment, name: str) -> str:
    """Return 16 bits of the checksum of a column up to each step, then all of it: [4 T + 8] digits."""
    column = getattr(segment, name)
    if column is None:
        return ""
    crc, digits, first = 0, "", 1 + len(column) - len(segment.values)  # of stacks of K frames, K are of the first step
    for step in (column[:first], *column[first:]):
        crc = zlib.crc32(step.tobytes(), crc)
        digits += f"{crc & 0xFFFF:04x}"
    return f"{digits}{crc:08x}"


def _checksum(*values: Any) -> str:
    return f"{zlib.crc32(b''.join(np.asarray(value).tobytes() for value in values)):08x}"
