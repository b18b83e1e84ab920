"""Trainers: the protocol that PPOLearner uses; LocalTrainer in this process, RayTrainers on several ranks."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from dppo import streams
from dppo.cluster.builders import build_trainer
from dppo.cluster.plans import TrainerPlan
from dppo.config.parts import annealed
from dppo.numerics.portable import limit_blas
from dppo.ppo.exchange.records import PolicySnapshot, Segment, Update
from dppo.ppo.learning.batch import make_batch
from dppo.ppo.learning.parallel import Alone, Parallel
from dppo.ppo.networks.network import NetworkSpec
from dppo.ppo.networks.parameters import exact_on
from dppo.spaces.spaces import Spaces
from dppo.streams import Stream


class Trainers(Protocol):
    """One trainer, in this process or of several ranks."""

    spec: NetworkSpec

    def update(
        self, segments: Sequence[Any], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one PPO update on the segments of `iteration` (0, 1, ...).

        Args:
            segments: in sampler order; references to them if ranks fetch them from the actors.
            policy: the policy that collected them.
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
        self._plan, self._parallel = plan, parallel or Alone()
        self.interruptible: Callable[[], AbstractContextManager[None]] = nullcontext  # there, a signal raises
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(plan.learners.learner_threads)
        self.trainer = build_trainer(plan, spaces, parallel)
        self.spec = self.trainer.model.spec
        self.weights, self.state, self.load = self.trainer.weights, self.trainer.state, self.trainer.load

    def update(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Do one PPO update on the segments of `iteration` (0, 1, ...), collected with `policy`."""
        before = self.weights(), self.state()
        try:
            with self.interruptible():
                return self.train(segments, policy, reward_scale, iteration)
        except BaseException:  # it diverged or was stopped; the checkpoint must hold the result of the last iteration
            self.load(*before)
            raise

    def train(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> Update:
        """Make a batch of the segments of this rank, and train on it."""
        plan, parallel = self._plan, self._parallel
        batch = make_batch(segments, policy.obs_scale, reward_scale, plan.ppo, plan.sizes.sequence_length)
        batch = replace(batch, iterations=min(iteration + 1, plan.ppo.reuse))
        index = (iteration,) if parallel.size == 1 else (iteration, parallel.rank)  # one draws as the driver does
        order, now = streams.generator(plan.seed, Stream.MINIBATCHES, *index), iteration / plan.sizes.iterations
        with limit_blas(1), exact_on(plan.learners.learner_threads):  # per thread, and Ray chooses the thread
            return self.trainer.update(batch, annealed(plan.ppo, now), order, lagged=policy.version < iteration)

    def close(self) -> None:
        """Restore torch's number of threads."""
        torch.set_num_threads(self._threads_before)
