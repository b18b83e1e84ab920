"""Stages: parts of an update that only some runs have, such as the correction of a policy lag."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from dppo.config.parts import PPO, ResolvedPPO
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.exchange.records import Experience, Segment, Update
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.learning.advantages import generalized_advantages
from dppo.ppo.learning.batch import Batch, as_rows, successor_inputs, transitions_of
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.objective import Objective
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.learning.popart import PopArt
from dppo.ppo.networks.network import RecurrentInputs

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float

MAX_IMPORTANCE = 2.0


@dataclass(frozen=True, slots=True)
class CurrentNetwork:
    """The network as it is now, to measure whole batches with."""

    model: PPOModel
    rows: int
    """Most rows to pass to the network at once."""
    scale: ValueScale | None
    """Unit of its values; None: that of rewards."""

    def log_probs(self, batch: Batch) -> Float[Tensor, " B"]:
        return self.model.log_probs(batch.pieces(self.rows))

    def values(self, batch: Batch) -> Float[Tensor, " B"]:
        """Compute the values of the rows of a batch, in units of rewards."""
        pieces = [
            self.model.values(piece.obs, piece.recurrent) for piece in batch.pieces(self.rows)
        ]
        return self._in_units_of_rewards(torch.cat(pieces))

    def successor_values(self, experience: Experience, device: torch.device) -> Float[Tensor, " n"]:
        """Return the values of observations that followed a row, but are in no row, in units of rewards."""
        count, inputs, recurrent = successor_inputs(
            experience.segments, experience.policy.obs_scale
        )
        pieces = []
        for start in range(0, count, self.rows):

            def part(leaf: Tensor, start: int = start) -> Tensor:
                return leaf[start : start + self.rows].to(device)

            states = None if recurrent is None else RecurrentInputs(*map(part, recurrent))
            pieces.append(self.model.values(each_leaf(inputs, part), states))
        return self._in_units_of_rewards(torch.cat(pieces))

    def _in_units_of_rewards(self, values: Tensor) -> Tensor:
        if self.scale is None:
            return values
        return self.scale.restore(values)


class StagedTrainer(Protocol):
    """The trainer of PPO, for a stage that does another update in its place."""

    model: PPOModel
    parallel: Parallel
    device: torch.device
    popart: PopArt | None
    """The unit of values; None if it is that of rewards."""
    micro_batch_size: int | None
    sequence_length: int
    seed: int

    def value_scale(self) -> ValueScale | None:
        """The unit of values; None if it is that of rewards."""

    def restart_optimizer(self) -> None:
        """Forget the gradients so far."""


class Stage:
    """A part of an update that a run has or has not. Each method of this class changes nothing.

    A trainer calls `instead`. Unless that does the update, it calls `settings`, `prepare` and `objective` before the
    first epoch, `renew` before each further one, and `finish` at the end. `state` is a part of the trainer's state.
    """

    def instead(self, experience: Experience, trainer: StagedTrainer) -> Update | None:
        """Do another update in place of that of PPO, and return it; None where there is no other."""
        return None

    def settings(self, ppo: ResolvedPPO) -> ResolvedPPO:
        return ppo

    def prepare(self, batch: Batch, network: CurrentNetwork, experience: Experience) -> Batch:
        """Make the batch to train on from `experience`."""
        return batch

    def objective(self, objective: Objective) -> Objective:
        """Return the loss to minimize in this update, given that of the settings; called after `prepare`."""
        return objective

    def renew(self, batch: Batch, network: CurrentNetwork, experience: Experience) -> Batch:
        return batch

    def finish(self, batch: Batch, network: CurrentNetwork, ppo: ResolvedPPO) -> dict[str, float]:
        """Finish the update, once the network has been trained on `batch`; return figures for the metrics."""
        return {}

    def state(self) -> dict[str, np.ndarray]:
        """Capture the arrays on which the next update depends, by name."""
        return {}

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; `state` holds the arrays of the whole trainer, or of another run."""


class LagCorrection(Stage):
    """Measures ratios from the policy to update, where an older policy has collected."""

    def prepare(self, batch: Batch, network: CurrentNetwork, experience: Experience) -> Batch:
        if experience.lagged:
            return from_current_policy(batch, network)
        return batch


@dataclass(eq=False)
class RecomputedAdvantages(Stage):
    """Estimates advantages and returns again before each further epoch, by the values of the network as it is then.

    With memory, sequences and successors start from the states that were stored with them, as in training.

    Source: Andrychowicz et al., arXiv:2006.05990, section 3.5.
    """

    ppo: PPO

    def renew(self, batch: Batch, network: CurrentNetwork, experience: Experience) -> Batch:
        """Return the batch with new advantages and returns, and with the old values."""
        estimates = estimate_again(batch, network, experience, self.ppo)
        returns = estimates.returns
        if network.scale is not None:
            returns = network.scale.standardize(returns)
        return replace(batch, advantages=estimates.advantages, returns=returns)


@dataclass(frozen=True, slots=True)
class Estimates:
    """Values by the current network, and advantages and returns by these values, in units of rewards."""

    values: Float[Tensor, " B"]
    advantages: Float[Tensor, " B"]
    returns: Float[Tensor, " B"]


def estimate_again(
    batch: Batch, network: CurrentNetwork, experience: Experience, ppo: PPO
) -> Estimates:
    """Return the estimates of the current network for a batch that was made from `experience`.

    With `reuse`, advantages are those of V-trace: the traces are the importance of rows, at most one.
    """
    segments = experience.segments
    transitions = transitions_of(segments, experience.reward_scale, ppo)
    length = batch.sequence_length
    device = batch.logprobs.device
    shape = transitions.rewards.shape

    def in_steps(column: Tensor) -> np.ndarray:
        """Return a column of the batch as [T, envs], which undoes `in_sequences`."""
        array = column.numpy(force=True)
        if length > 1:
            array = array.reshape(-1, shape[1], length).swapaxes(1, 2)
        return array.reshape(shape)

    def in_rows(array: np.ndarray) -> Tensor:
        return as_rows(array, length).to(device)

    values = network.values(batch)
    step_values = in_steps(values)
    next_values = np.empty_like(step_values)
    next_values[:-1] = step_values[1:]
    next_values[_followed(segments)] = network.successor_values(experience, device).numpy(
        force=True
    )
    traces = None
    if ppo.reuse > 1:
        assert batch.importance is not None
        traces = in_steps(batch.importance.clamp(max=1))
    advantages = generalized_advantages(
        transitions,
        step_values,
        next_values,
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        traces=traces,
    )
    returns = (advantages if traces is None else traces * advantages) + step_values
    if transitions.valid is not None:
        returns = np.where(transitions.valid, returns, step_values.dtype.type(0))
    return Estimates(values, in_rows(advantages), in_rows(returns))


def _followed(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Return step and environment of the row that each successor followed, in the order of successors."""
    samplers, steps, envs = np.nonzero(np.stack([segment.followed for segment in segments]))
    return steps, samplers * segments[0].valid.shape[1] + envs


def from_current_policy(batch: Batch, network: CurrentNetwork) -> Batch:
    """Return the batch with ratios measured from the current policy, and weights that correct for the older one.

        L = mean(max(-w A r, -w A clip(r, 1 - c, 1 + c)))        r = pi / pi_now        w = min(pi_now / pi_old, 2)

    With ratios to `pi_old`, an update away from `pi_now`, most of the clipping range would be spent from the start.

    Source: Hilton, Cobbe, Schulman, arXiv:2110.00641 (the decoupled objective).
    Deviation: w is limited to 2, because where an update moves the policy far, a few rows would outweigh the others.
    """
    logprobs = network.log_probs(batch)
    # rows that are not transitions hold zeros, which no policy has chosen
    if batch.weights is not None:
        logprobs = torch.where(batch.weights > 0, logprobs, batch.logprobs)
    importance = (logprobs - batch.logprobs).exp().clamp(max=MAX_IMPORTANCE)
    return replace(batch, logprobs=logprobs, importance=importance)
