"""Cloning: the policy of a controller by maximum likelihood, and the values of its returns."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dppo.config.parts import PPO
from dppo.errors import TrainingDiverged
from dppo.ppo.exchange.records import Experience
from dppo.ppo.learning.adam import FlatAdam
from dppo.ppo.learning.batch import Batch, as_rows, merged, recurrent_inputs
from dppo.ppo.learning.model import PPOModel, free_deviations
from dppo.ppo.learning.parallel import Parallel, moments_of_all
from dppo.ppo.learning.stages import CurrentNetwork, estimate_again
from dppo.ppo.learning.states import StatesAlongSegments
from dppo.ppo.networks.network import RecurrentInputs

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float, Int64, Shaped

LEARNING_RATE = 3e-3  # learning rate of the first SGD step; it falls linearly to zero
ROWS = 256  # rows of a minibatch
EPOCHS = 500  # most epochs
STEPS = 6000  # most SGD steps
ROUNDS = 40  # after each, returns are estimated again, and the clone is compared with the best one so far
HELD_OUT = 0.1  # share of the rows, by which the best clone is chosen


@dataclass(frozen=True, slots=True)
class Demonstrations:
    """All rows that a controller collected: a batch, and two actions of each row to make likely.

    The mean log-likelihood of the two is, up to a constant, minus the KL divergence from the controller with noise.
    """

    batch: Batch
    first: Shaped[Tensor, " B *A"]
    second: Shaped[Tensor, " B *A"]
    log_likelihood: Float[Tensor, " B"]
    """Mean of both actions under the controller with noise: what a perfect clone reaches."""

    def take(self, index: Int64[Tensor, " n"]) -> Demonstrations:
        """Copy the sequences at `index`, which are single rows without memory."""
        length = self.batch.sequence_length
        steps = torch.arange(length, device=index.device)
        rows = (index[:, None] * length + steps).flatten()
        columns = (self.first, self.second, self.log_likelihood)
        return Demonstrations(
            self.batch.take(index), *(column.index_select(0, rows) for column in columns)
        )

    @staticmethod
    def of(
        experience: Experience, batch: Batch, model: PPOModel, log_std: np.ndarray
    ) -> Demonstrations:
        """Return the rows of `experience`, from which `batch` was made.

        `log_std`: [width] of the controller's noise.
        """
        distribution = model.spec.distribution
        intended = merged(experience.segments, "intended")
        head = distribution.head_at(intended, log_std.astype(model.spec.dtype))
        if batch.masks is not None:
            head = distribution.limited(head, merged(experience.segments, "masks"))
        sampled = merged(experience.segments, "actions")
        first, second = distribution.targets(head, sampled)
        likelihood = distribution.log_prob(head, first) + distribution.log_prob(head, second)
        device = batch.logprobs.device
        columns = [
            as_rows(column, batch.sequence_length) for column in (first, second, likelihood / 2)
        ]
        return Demonstrations(batch, *(column.to(device) for column in columns))


@dataclass(frozen=True, slots=True)
class CloneFigures:
    """The quality of a clone on the rows that were held out."""

    kl: float
    """KL divergence of the clone from the controller with noise, in nats."""
    explained_variance: float
    """Explained variance of the returns by the values."""

    @property
    def badness(self) -> float:
        return self.kl + 1 - self.explained_variance


class Cloning:
    """Fits a model to the actions of a controller and to its returns, on all rows, in many epochs.

        L = mean(-(log pi(a1) + log pi(a2)) / 2 + c (v - R)^2 / 2)        a1, a2 = controller's action +- deviation

    R are lambda-returns by the values of the round before, so that the first rounds learn returns of short horizons.
    The weights of the round that is best on the rows held out are kept. All ranks fit the same model, each on its rows.
    With memory, the rows are sequences, and each round computes again the states from which they start.

    Source: behavioral cloning by maximum likelihood, as in Pomerleau, "ALVINN" (1989).
    """

    def __init__(self, model: PPOModel, ppo: PPO, parallel: Parallel) -> None:
        """Prepare to fit `model`; `ppo` has the discount, lambda, and the weight of the value loss."""
        self._model = model
        self._ppo = ppo
        self._parallel = parallel
        self._optimizer = FlatAdam(model.parameters)
        self._states: StatesAlongSegments | None = None
        """Computes the states of a network with memory."""

    def fit(
        self,
        rows: Demonstrations,
        experience: Experience,
        network: CurrentNetwork,
        generator: np.random.Generator,
    ) -> CloneFigures:
        """Fit the model, which then has the weights of the best round; return its quality.

        Raise TrainingDiverged if a gradient is not finite.
        """
        batch = rows.batch
        if batch.recurrent is not None:
            self._states = StatesAlongSegments(
                self._model.spec, experience.segments, experience.policy.obs_scale
            )
        shuffled = torch.from_numpy(generator.permutation(batch.sequences)).to(
            batch.logprobs.device
        )
        num_held = max(1, int(HELD_OUT * len(shuffled)))
        held_out = shuffled[:num_held]
        fitted = shuffled[num_held:]
        per_epoch = math.ceil(len(fitted) * batch.sequence_length / ROWS)
        epochs = max(1, min(EPOCHS, STEPS // per_epoch))
        per_round = math.ceil(epochs / ROUNDS)
        weights = self._model.parameters.weights
        best: tuple[CloneFigures, Tensor] | None = None
        for epoch in range(epochs):
            if epoch % per_round == 0:
                rows = self._with_returns(rows, experience, network)
            for number, index in enumerate(_minibatches(fitted, generator, per_epoch)):
                done = (epoch * per_epoch + number) / (epochs * per_epoch)
                self._step(rows.take(index), LEARNING_RATE * (1 - done))
            if (epoch + 1) % per_round == 0 or epoch == epochs - 1:
                figures = self._figures(rows.take(held_out), network)
                if best is None or figures.badness < best[0].badness:
                    best = (figures, weights.detach().clone())
        assert best is not None, "no round of cloning"
        with torch.no_grad():
            weights.copy_(best[1])
        return best[0]

    def _with_returns(
        self, rows: Demonstrations, experience: Experience, network: CurrentNetwork
    ) -> Demonstrations:
        """Return the rows with lambda-returns by the values of the network as it is, in its unit.

        With memory, also with the states of the network as it is.
        """
        batch = rows.batch
        if self._states is not None:
            weights = self._model.parameters.weights.numpy(force=True)
            segments = self._states.by(weights, batch.sequence_length)
            experience = replace(experience, segments=segments)
            inputs = recurrent_inputs(segments, batch.sequence_length)
            device = batch.logprobs.device
            batch = replace(batch, recurrent=RecurrentInputs(*(part.to(device) for part in inputs)))
        returns = estimate_again(batch, network, experience, self._ppo).returns
        if network.scale is not None:
            returns = network.scale.standardize(returns)
        return replace(rows, batch=replace(batch, returns=returns))

    def _step(self, rows: Demonstrations, learning_rate: float) -> None:
        batch = rows.batch
        head, values, residuals = self._model.network.forward(batch.obs, batch.recurrent)
        distribution = self._model.spec.distribution
        with torch.no_grad():
            if batch.masks is not None:
                head = distribution.limited_in_torch(head, batch.masks)
            weights = torch.ones_like(values) if batch.weights is None else batch.weights
            grad_logprobs = weights / (-2 * len(batch))
            grad_head = torch.zeros_like(head)
            for actions in (rows.first, rows.second):
                scores = distribution.scores_with_gradient(head, actions)
                grad_head += scores.gradient(grad_logprobs, 0.0)
            grad_values = weights * (values - batch.returns) * (self._ppo.vf_coef / len(batch))
        self._model.network.backward(residuals, grad_head, grad_values)
        with torch.no_grad():
            gradient = self._model.parameters.gradient
            self._parallel.sum_(gradient)
            if self._parallel.size > 1:
                gradient.div_(self._parallel.size)
            norm = torch.linalg.vector_norm(gradient).item()
            if not math.isfinite(norm):
                raise TrainingDiverged(
                    f"cloning the controller: the gradient of a minibatch of {len(batch)} rows has the norm {norm}"
                )
            self._optimizer.step(learning_rate)

    def _figures(self, rows: Demonstrations, network: CurrentNetwork) -> CloneFigures:
        """Measure the network on these rows of all ranks."""
        batch = rows.batch
        log_likelihood = torch.zeros_like(rows.log_likelihood)
        for actions in (rows.first, rows.second):
            log_likelihood += network.log_probs(replace(batch, actions=actions)) / 2
        returns = batch.returns if network.scale is None else network.scale.restore(batch.returns)
        errors = returns - network.values(batch)
        gaps = rows.log_likelihood - log_likelihood
        samples = torch.stack([gaps, errors, returns])
        moments = moments_of_all(samples, batch.weights, self._parallel)
        (_, kl, _), (_, _, residual), (_, _, total) = moments.tolist()
        explained_variance = 1 - residual / total if total > 0 else 1.0
        return CloneFigures(kl, explained_variance)


def _minibatches(
    rows: Int64[Tensor, " n"], generator: np.random.Generator, count: int
) -> Iterator[Int64[Tensor, " m"]]:
    shuffled = rows[torch.from_numpy(generator.permutation(len(rows))).to(rows.device)]
    yield from shuffled.chunk(count)


def start_from_deviations(model: PPOModel, log_std: np.ndarray) -> None:
    """Give a policy the deviations of a controller's noise, where they do not depend on observations."""
    distribution = model.spec.distribution
    deviations = free_deviations(model.spec)
    size = distribution.free_size
    if deviations.start == deviations.stop or not size:
        return
    dtype = model.spec.dtype
    actions = np.zeros(distribution.action_shape, distribution.action_dtype(dtype))
    head = distribution.head_at(actions, log_std.astype(dtype))
    model.parameters.weights.data[deviations] = torch.from_numpy(head[-size:])
