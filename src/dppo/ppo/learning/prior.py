"""Prior: a stage that clones the controller of the first segments, and stays near the clone at first."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dppo.config.parts import PPO
from dppo.ppo.exchange.phase import ControllerPhase
from dppo.ppo.exchange.records import Experience, Update
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.batch import Batch, make_batch
from dppo.ppo.learning.cloning import LEARNING_RATE, Cloning, Demonstrations, start_from_deviations
from dppo.ppo.learning.losses import weighted_mean
from dppo.ppo.learning.minibatches import aligned_with_ranks, minibatch_generator
from dppo.ppo.learning.objective import Gradients, Objective, Outputs
from dppo.ppo.learning.stages import CurrentNetwork, Stage, StagedTrainer

ROWS_AT_ONCE = 4096  # rows that go through the network at once, to estimate returns
KL_COEF = 1.0  # weight of the KL to the clone after the first update
FADING = 3  # times the iterations of the controller, over which that weight falls to zero
PREFIX = "clone."  # begins the names in the state


@dataclass(eq=False)
class Prior(Stage):
    """Clones a controller, and adds the KL divergence from the clone to the loss, with a weight that falls to zero.

    Updates on segments of the controller learn nothing until the last one, which fits the policy to its actions and the
    values to its returns. With a policy lag of K, each of the K updates after it does so again, with more rows. Then

        L + c mean((log pi(a) - log pi_clone(a))^2) / 2

    The gradient of this estimate of KL(pi | clone) is right in the mean for actions of pi, and zero at the clone. With
    memory, the clone begins a sequence in the state of pi.

    Source: Schulman, "Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, estimator k2.
    """

    ppo: PPO
    phase: ControllerPhase
    _weights: np.ndarray | None = None
    """[P] of the clone; None before there is one, and after the last iteration near it."""
    _obs_scale: ObsScale | None = None
    _policy_start: int = 0
    """The first iteration of training near the clone."""

    def instead(self, experience: Experience, trainer: StagedTrainer) -> Update | None:
        """Clone the controller if it collected these segments; do nothing before the last of them."""
        if experience.policy.version >= self.phase.versions:
            return None
        if experience.iteration < self.phase.versions - 1:
            return Update({}, 0.0, trainer.value_scale())
        return self._clone(experience, trainer)

    def _clone(self, experience: Experience, trainer: StagedTrainer) -> Update:
        """Fit policy and values to all segments of the controller, and start the optimizer of PPO again."""
        obs_scale = experience.next_obs_scale
        experience = replace(experience, policy=replace(experience.policy, obs_scale=obs_scale))
        model = trainer.model
        parallel = trainer.parallel
        ppo = replace(self.ppo, reuse=1)
        batch = make_batch(
            experience.segments, obs_scale, experience.reward_scale, ppo, trainer.sequence_length
        )
        batch = batch.to(trainer.device)
        if parallel.size > 1:
            batch = aligned_with_ranks(batch, parallel)
        if trainer.popart is not None:
            batch = trainer.popart.learn(batch, parallel)
        rows = Demonstrations.of(experience, batch, model, self.phase.log_std)
        start_from_deviations(model, self.phase.log_std)
        scale = trainer.value_scale()
        network = CurrentNetwork(model, trainer.micro_batch_size or ROWS_AT_ONCE, scale)
        generator = minibatch_generator(trainer.seed, experience.iteration, parallel)
        clone = Cloning(model, ppo, parallel).fit(rows, experience, network, generator)
        trainer.restart_optimizer()
        self._weights = model.parameters.weights.numpy(force=True).copy()
        self._obs_scale = obs_scale
        self._policy_start = experience.iteration + 1
        figures = {"clone_kl": clone.kl, "explained_variance": clone.explained_variance}
        if scale is not None:
            figures |= scale.figures()
        return Update(figures, LEARNING_RATE, scale)

    def prepare(self, batch: Batch, network: CurrentNetwork, experience: Experience) -> Batch:
        """Return the batch with the log-probabilities of its actions under the clone."""
        fading = FADING * self.phase.versions
        share = 1 - (experience.iteration - self._policy_start) / fading
        if self._weights is None or share <= 0:
            self._weights = None
            return batch
        scale = self._obs_scale
        # the clone reads observations as they were normalized for it
        length = batch.sequence_length
        read = make_batch(experience.segments, scale, experience.reward_scale, self.ppo, length)
        clone_batch = replace(batch, table=read.to(batch.logprobs.device).table)
        parameters = network.model.parameters.weights
        current = parameters.detach().clone()
        with torch.no_grad():
            parameters.copy_(torch.from_numpy(self._weights))
            try:
                logprobs = network.log_probs(clone_batch)
            finally:
                parameters.copy_(current)
        return replace(batch, clone_logprobs=logprobs, clone_coef=KL_COEF * share)

    def objective(self, objective: Objective) -> Objective:
        """Add the distance from the clone to a loss, while there is a clone."""
        if self._weights is None:
            return objective
        return NearClone(objective)

    def state(self) -> dict[str, np.ndarray]:
        if self._weights is None:
            return {}
        state = {f"{PREFIX}weights": self._weights, f"{PREFIX}begun": np.array(self._policy_start)}
        if self._obs_scale is not None:
            state[f"{PREFIX}obs_mean"] = self._obs_scale.mean
            state[f"{PREFIX}obs_std"] = self._obs_scale.std
        return state

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Restore the clone; none without it."""
        self._weights = state.get(f"{PREFIX}weights")
        self._obs_scale = None
        if self._weights is None:
            return
        self._policy_start = int(state[f"{PREFIX}begun"])
        mean = state.get(f"{PREFIX}obs_mean")
        if mean is not None:
            self._obs_scale = ObsScale(mean, state[f"{PREFIX}obs_std"])


@dataclass(frozen=True, slots=True)
class NearClone:
    """A loss, and the distance from the clone: see `Prior`."""

    objective: Objective

    def loss(self, outputs: Outputs, batch: Batch) -> tuple[Gradients, dict[str, Tensor]]:
        """Compute the gradients of the sum, and its parts."""
        gradients, figures = self.objective.loss(outputs, batch)
        if batch.clone_logprobs is None:
            return gradients, figures
        distance = outputs.log_ratio + batch.logprobs - batch.clone_logprobs
        weights = batch.weights
        if weights is not None:
            distance = torch.where(weights > 0, distance, 0.0)
        figures["clone_distance"] = 0.5 * weighted_mean(distance.square(), weights)
        grad_log_ratio = distance * (batch.clone_coef * batch.share / len(batch))
        if weights is not None:
            grad_log_ratio *= weights
        return gradients._replace(log_ratio=gradients.log_ratio + grad_log_ratio), figures
