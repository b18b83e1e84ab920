"""Trainers: LocalTrainer in this process, RayTrainers on several ranks; PPOLearner does not know which."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from dppo.assemble import TrainerPlan, build_trainer
from dppo.cluster.learning.update import train_on
from dppo.ppo.network import NetworkSpec
from dppo.ppo.segment import Incident, PolicySnapshot, Segment
from dppo.spaces import Spaces


class Trainers(Protocol):
    """One trainer, wherever it runs and of however many ranks."""

    spec: NetworkSpec

    def update(
        self, segments: Sequence[Any], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> dict[str, float]:
        """Do one PPO update on the segments of `iteration` (0, 1, ...); return figures by name.

        Args:
            segments: in sampler order; or references to them, where ranks fetch them themselves.
            policy: the one that collected them.
            reward_scale: what rewards are divided by; None where they are not normalised.
        """

    def weights(self) -> np.ndarray:
        """All weights [P]; no later update changes them."""

    def state(self) -> dict[str, np.ndarray]:
        """The optimiser's state; no later update changes it."""

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these weights and this optimiser state."""

    def take_incidents(self) -> list[Incident]:
        """Return the incidents since the last call, all of them dealt with."""

    def close(self) -> None:
        """Stop; give back what was taken."""


def make_trainers(
    plan: TrainerPlan, spaces: Spaces, notify: Callable[[str], None], check: Callable[[], None] = lambda: None
) -> Trainers:
    """Make the trainers for `num_learners`; 0 does not import Ray.

    Args:
        check: called now and then while learners start; may raise, to give up.
    """
    if plan.learners.num_learners == 0:
        return LocalTrainer(plan, spaces)
    from dppo.cluster.learning.ranks import RayTrainers

    trainers = RayTrainers(plan, spaces, notify, check)
    if plan.learners.num_learners > 1:
        try:
            notify(worth_in_words(plan, trainers.spec, *trainers.worth(plan.minibatch_rows)))
        except BaseException:
            trainers.close()
            raise
    return trainers


def worth_in_words(plan: TrainerPlan, spec: NetworkSpec, alone_ms: float, shared_ms: float, summing_ms: float) -> str:
    """Return whether several learners pay, from what was measured."""
    facts = (
        f"{plan.learners.num_learners} learners, model of {spec.num_parameters:,} parameters: the gradient of a "
        f"minibatch of {plan.minibatch_rows:,} rows takes {shared_ms:.1f} ms, {summing_ms:.1f} ms of it for the sum; "
        f"one learner takes {alone_ms:.1f} ms"
    )
    if shared_ms < 0.95 * alone_ms:
        return f"{facts}. They are {alone_ms / shared_ms:.1f} times as fast."
    return f"{facts}. Several learners do not pay here; --num-learners 0 is faster."


class LocalTrainer:
    """Trains in this process."""

    def __init__(self, plan: TrainerPlan, spaces: Spaces) -> None:
        self._plan = plan
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(plan.learners.learner_threads)
        self._trainer = build_trainer(plan, spaces)
        self.spec = self._trainer.model.spec

    def update(
        self, segments: Sequence[Segment], policy: PolicySnapshot, reward_scale: float | None, iteration: int
    ) -> dict[str, float]:
        """Do one PPO update on the segments of `iteration` (0, 1, ...), which `policy` collected."""
        before = self._trainer.weights(), self._trainer.state()
        try:
            return train_on(self._trainer, self._plan, segments, policy.obs_scale, reward_scale, iteration)
        except BaseException:  # it diverged in the middle: a checkpoint shall hold what the last iteration ended with
            self._trainer.load(*before)
            raise

    def weights(self) -> np.ndarray:
        """A copy of all weights [P]."""
        return self._trainer.weights()

    def state(self) -> dict[str, np.ndarray]:
        """A copy of the optimiser's state."""
        return self._trainer.state()

    def load(self, weights: np.ndarray, state: dict[str, np.ndarray]) -> None:
        """Go on from these weights and this optimiser state."""
        self._trainer.load(weights, state)

    def take_incidents(self) -> list[Incident]:
        """Nothing befalls a trainer in this process that would not end the run."""
        return []

    def close(self) -> None:
        torch.set_num_threads(self._threads_before)
