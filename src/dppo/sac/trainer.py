"""SACTrainer: soft actor-critic on the rows of all segments so far."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from dppo import streams
from dppo.errors import TrainingDiverged
from dppo.ppo.exchange.records import Experience, Update
from dppo.ppo.learning.adam import FlatAdam
from dppo.ppo.learning.batch import zero_batch
from dppo.ppo.learning.minibatches import minibatch_generator
from dppo.ppo.learning.parallel import Parallel
from dppo.ppo.networks.network import NetworkSpec
from dppo.ppo.networks.parameters import FlatParameters
from dppo.sac.critics import Critics
from dppo.sac.inputs import CriticInputs
from dppo.sac.minibatches import Minibatch, Minibatches
from dppo.sac.policy import clone_gradient, head_gradient, policy_network, sample
from dppo.sac.replay_buffer import BufferSnapshot, ReplayBuffer
from dppo.sac.settings import SACSettings
from dppo.streams import Stream

CRITICS_INDEX = 1  # of their initial weights in the stream of weights; the policy's have no index
ADAM_EPSILON = 1e-8


class _Figures(NamedTuple):
    """Results of a gradient step, each a scalar: the metrics of an update are their means."""

    critic_loss: Tensor
    critic_grad_norm: Tensor
    policy_loss: Tensor
    grad_norm: Tensor
    q_mean: Tensor
    entropy: Tensor
    temperature: Tensor
    action_std: Tensor
    target_steps: Tensor


class _PolicyFigures(NamedTuple):
    """Results of a gradient of the policy, each a scalar."""

    loss: Tensor
    q_mean: Tensor
    """nan where the critics are not asked."""
    entropy: Tensor
    action_std: Tensor
    """Mean deviation of actions before squashing."""


class _Part:
    """Parameters that are learned together, with their optimizer."""

    def __init__(self, name: str, parameters: FlatParameters) -> None:
        """`name`: that of the part in the state and in messages."""
        self.name = name
        self.parameters = parameters
        self.optimizer = FlatAdam(parameters, eps=ADAM_EPSILON)

    def state(self) -> dict[str, np.ndarray]:
        """Name the arrays of the optimizer's state; they are views."""
        return {f"{self.name}.{key}": array for key, array in self.optimizer.state().items()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Restore what `state` returned, if `state` has it."""
        prefix = f"{self.name}."
        arrays = {
            name.removeprefix(prefix): array
            for name, array in state.items()
            if name.startswith(prefix)
        }
        if arrays:
            self.optimizer.load(arrays)


class Snapshot(NamedTuple):
    """A trainer at some time, without a copy of its replay buffer."""

    weights: np.ndarray
    learned: dict[str, np.ndarray]
    replay_buffer: BufferSnapshot


class SACTrainer:
    """Learn a policy, K critics and a temperature from a replay buffer. It owns them; nothing else changes them.

    As long as a controller collects, the policy becomes its clone, and the critics learn from its rewards. For as many
    iterations afterwards, the policy is held near the controller, because the critics know little of other actions.

    It may be one of several ranks. Each keeps and draws the rows of its own samplers; gradients are summed over all
    ranks, so that their weights stay equal.

    Source: Haarnoja et al., arXiv:1812.05905, algorithm 1.
    Deviation: those in docs/ALGORITHM.md, Soft actor-critic.
    """

    def __init__(
        self, spec: NetworkSpec, settings: SACSettings, seed: int, parallel: Parallel | None = None
    ) -> None:
        """Draw the initial weights from `seed`, the run's; actions must be squashed."""
        self.spec = spec
        self.settings = settings
        self.parallel = parallel or Parallel()
        self._seed = seed
        self._dtype = getattr(torch, spec.dtype)
        self.device = torch.device(settings.device)
        self._action_size = spec.distribution.noise_size  # A
        weights_seed = streams.integer(seed, Stream.WEIGHTS)
        self._network = policy_network(spec, weights_seed, settings.device)
        self._critic_inputs = CriticInputs(spec.spaces, self._action_size, self.device)
        self._critics = self._new_critics()
        log_temperature = torch.tensor([math.log(settings.initial_temperature)])
        self._log_temperature = FlatParameters(
            [nn.Parameter(log_temperature.to(self.device, self._dtype))]
        )
        self._policy_part = _Part("policy", self._network.parameters)
        self._critics_part = _Part("critics", self._critics.parameters)
        self._temperature_part = _Part("temperature", self._log_temperature)
        self._parts = (self._policy_part, self._critics_part, self._temperature_part)
        ranks = self.parallel.size
        self._replay_buffer = ReplayBuffer(settings.replay_rows // ranks, spec.spaces.obs)
        minibatch_size = max(1, settings.minibatch_size // ranks)
        self._minibatches = Minibatches(
            self._replay_buffer, spec, settings, minibatch_size, self._network
        )

    def _new_critics(self) -> Critics:
        seed = streams.integer(self._seed, Stream.WEIGHTS, CRITICS_INDEX)
        generator = torch.Generator().manual_seed(seed)
        critics = Critics(
            self._critic_inputs.size,
            self.settings.critic_sizes,
            self.settings.num_critics,
            generator,
            self.parallel.zeros_like,
        )
        return critics.to(self.device, self._dtype)

    # a gradient that is not finite is reported by number
    @np.errstate(invalid="ignore", over="ignore")
    @torch.no_grad()
    def update(self, experience: Experience) -> Update:
        """Keep the rows of an iteration, and take the gradient steps that are due.

        Waits for: all ranks, in each gradient step.
        Returns: figures that are means over the gradient steps; nan where there were none.

        Raise TrainingDiverged if a gradient is not finite.
        """
        clones = experience.segments[0].intended is not None
        clone_weight = self.settings.clone_weight_at(experience.iteration)
        self._replay_buffer.append(experience.segments, keeps_intended=clone_weight > 0)
        rows = sum(segment.valid.size for segment in experience.segments) * self.parallel.size
        step = experience.iteration * rows
        num_rows = self._replay_buffer.num_steps * self._replay_buffer.num_envs * self.parallel.size
        count = 0
        if num_rows >= self.settings.first_rows:
            count = self.settings.gradient_steps_between(step, step + rows)
        generator = minibatch_generator(self._seed, experience.iteration, self.parallel)
        results = [
            torch.stack(self._gradient_step(minibatch, clone_weight, clones=clones))
            for minibatch in self._minibatches.draw(experience, count, generator)
        ]
        figures = dict.fromkeys(_Figures._fields, math.nan)
        if results:
            means = self.parallel.gather(torch.stack(results).mean(dim=0)).mean(dim=0)
            figures = dict(zip(_Figures._fields, means.tolist(), strict=True))
        figures |= {"kept_rows": float(num_rows), "gradient_steps": float(count)}
        return Update(figures, self.settings.learning_rate, value_scale=None)

    # ------------------------------------------------------------------ one gradient step

    def _gradient_step(
        self, minibatch: Minibatch, clone_weight: float, *, clones: bool
    ) -> _Figures:
        """Move critics, their targets, policy and temperature; return the figures.

        Args:
            clone_weight: as in `_policy_gradient`.
            clones: make the policy a clone of the controller that collected, if all rows have its actions.
        """
        settings = self.settings
        max_norm = settings.max_grad_norm
        temperature = self._log_temperature.weights.exp()
        critic_loss = self._critics_gradient(minibatch, temperature)
        critic_grad_norm = self._move(self._critics_part, settings.critic_learning_rate, max_norm)
        self._critics.follow(settings.tau)
        clones = clones and minibatch.intended is not None
        if clones:
            policy = self._clone_gradient(minibatch)
        else:
            policy = self._policy_gradient(minibatch, temperature, clone_weight)
        grad_norm = self._move(self._policy_part, settings.learning_rate, max_norm)
        if not clones:  # a controller's noise is not the policy's
            target_entropy = settings.target_entropy * self._action_size
            self._log_temperature.gradient.fill_(policy.entropy - target_entropy)
            self._move(self._temperature_part, settings.temperature_learning_rate)
        return _Figures(
            critic_loss=critic_loss,
            critic_grad_norm=critic_grad_norm,
            policy_loss=policy.loss,
            grad_norm=grad_norm,
            q_mean=policy.q_mean,
            entropy=policy.entropy,
            temperature=temperature.squeeze(0),
            action_std=policy.action_std,
            target_steps=minibatch.num_steps.mean(),
        )

    def _critics_gradient(self, minibatch: Minibatch, temperature: Tensor) -> Tensor:
        """Store the gradient of the critics; return their loss, the sum over critics of mean (Q - y)^2 / 2.

        y = r + discount (min_k Q'_k(s', a') - temperature log pi(a' | s')),  a' ~ pi(s')
        """
        head, _, _ = self._network.forward(minibatch.successors)
        following = sample(head, minibatch.noise[0])
        inputs = self._critic_inputs(minibatch.successors, following.actions)
        values = self._critics.target_values(inputs).amin(dim=0)
        values -= temperature * following.logprobs
        targets = minibatch.returns + minibatch.discounts * values
        outputs, residuals = self._critics.forward(
            self._critic_inputs(minibatch.obs, torch.tanh(minibatch.actions))
        )
        errors = outputs - targets
        self._critics.backward(residuals, errors / errors.shape[1])
        return 0.5 * errors.square().mean(dim=1).sum()

    def _policy_gradient(
        self, minibatch: Minibatch, temperature: Tensor, clone_weight: float
    ) -> _PolicyFigures:
        """Store the gradient of the policy.

            L = mean(temperature log pi(a | s) - min_k Q_k(s, a)),  a = tanh(mean(s) + std(s) noise)

        Args:
            clone_weight: w of another term, w mean((mean(s) - c)^2 / 2), where c is the controller's action, and rows
                of the policy count as zero. The returned loss leaves this term out.
        """
        head, head_values, residuals = self._network.forward(minibatch.obs)
        drawn = sample(head, minibatch.noise[1])
        inputs = self._critic_inputs(minibatch.obs, drawn.actions)
        values, critic_residuals = self._critics.forward(inputs)
        least, critic = values.min(dim=0)
        grad_values = torch.zeros_like(values)
        grad_values.scatter_(0, critic.unsqueeze(0), -1.0)
        grad_actions = self._critics.action_gradients(
            critic_residuals, grad_values, self._action_size
        )
        grad_heads = head_gradient(head, drawn, grad_actions, temperature)
        if clone_weight > 0 and minibatch.intended is not None:
            distance = head[:, : self._action_size] - minibatch.intended
            grad_heads[:, : self._action_size] += clone_weight * distance.nan_to_num(0.0)
        grad_heads /= len(head)
        self._network.backward(residuals, grad_heads, torch.zeros_like(head_values))
        entropy = -drawn.logprobs.mean()
        q_mean = least.mean()
        action_std = head[:, self._action_size :].exp().mean()
        loss = -temperature.squeeze(0) * entropy - q_mean
        return _PolicyFigures(loss, q_mean, entropy, action_std)

    def _clone_gradient(self, minibatch: Minibatch) -> _PolicyFigures:
        """Store the gradient of the policy's distance from the controller, without the critics."""
        assert minibatch.intended is not None
        head, head_values, residuals = self._network.forward(minibatch.obs)
        losses, grad_heads = clone_gradient(head, minibatch.intended, minibatch.actions)
        self._network.backward(residuals, grad_heads / len(head), torch.zeros_like(head_values))
        entropy = -sample(head, minibatch.noise[1]).logprobs.mean()
        action_std = head[:, self._action_size :].exp().mean()
        loss = losses.sum(dim=1).mean()
        q_mean = torch.full_like(entropy, math.nan)
        return _PolicyFigures(loss, q_mean, entropy, action_std)

    def _move(self, part: _Part, learning_rate: float, max_norm: float = math.inf) -> Tensor:
        """Take a step by the mean gradient of all ranks, clipped to `max_norm`; return its norm before clipping."""
        gradient = part.parameters.gradient
        ranks = self.parallel.size
        self.parallel.sum_(gradient)
        grad_norm = torch.linalg.vector_norm(gradient) / ranks
        norm = grad_norm.item()
        if not math.isfinite(norm):
            raise _diverged(part.name, norm, self.settings)
        factor = min(1.0, max_norm / (norm + 1e-6)) / ranks
        if factor != 1.0:
            gradient.mul_(factor)
        part.optimizer.step(learning_rate)
        return grad_norm

    def sum_gradients(self) -> None:
        """Replace the gradients of critics and policy by their sums over all ranks."""
        self.parallel.sum_(self._critics.parameters.gradient)
        self.parallel.sum_(self._network.parameters.gradient)

    @torch.no_grad()
    def rehearse(self, rows: int) -> None:
        """Compute the gradients of `rows` rows of zeros, to measure the time; nothing that is learned changes."""
        batch = zero_batch(self.spec, rows, sequence_length=1).to(self.device)
        column = batch.values
        actions = column.unsqueeze(1).repeat(1, self._action_size)
        noise = torch.zeros_like(actions).repeat(2, 1, 1)
        minibatch = Minibatch(
            obs=batch.obs,
            actions=actions,
            returns=column,
            discounts=column,
            successors=batch.obs,
            num_steps=column,
            intended=None,
            noise=noise,
        )
        temperature = self._log_temperature.weights.exp()
        self._critics_gradient(minibatch, temperature)
        self._policy_gradient(minibatch, temperature, clone_weight=0.0)

    # ------------------------------------------------------------------ weights and state

    def weights(self, *, copy: bool = True) -> np.ndarray:
        """Return the policy's weights [P] in the order of `NetworkSpec.shapes`; without `copy`, updates change them."""
        weights: np.ndarray = self._network.parameters.weights.numpy(force=True)
        return weights.copy() if copy else weights

    def state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return critics, temperature, optimizers and the replay buffer; `copy` as in `weights`."""
        state = self.learned_state(copy=False) | self._replay_buffer.state()
        return _copied(state) if copy else state

    def learned_state(self, *, copy: bool = True) -> dict[str, np.ndarray]:
        """Return the state that is equal on all ranks: critics, temperature and optimizers; no replay buffer."""
        state = {name: vector.numpy(force=True) for name, vector in self._vectors().items()}
        for part in self._parts:
            state |= part.state()
        return _copied(state) if copy else state

    def _vectors(self) -> dict[str, Tensor]:
        """Name what is learned besides the policy."""
        return {
            "critics.weights": self._critics.parameters.weights,
            "critics.targets": self._critics.targets,
            "temperature.log": self._log_temperature.weights,
        }

    def load(self, weights: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        """Restore `weights` [P] and the result of `state`; what that lacks stays, and the replay buffer is emptied."""
        self._load_learned(weights, state)
        self._replay_buffer.load(state)

    def _load_learned(self, weights: np.ndarray, state: Mapping[str, np.ndarray]) -> None:
        self._network.parameters.weights.data.copy_(torch.tensor(weights))
        for name, vector in self._vectors().items():
            if name in state:
                vector.data.copy_(torch.tensor(state[name]))
        for part in self._parts:
            part.load(state)

    def snapshot(self) -> Snapshot:
        """Return the trainer as it is, for `restore`, which is possible until the end of the next update."""
        return Snapshot(self.weights(), self.learned_state(), self._replay_buffer.snapshot())

    def restore(self, snapshot: Snapshot) -> None:
        """Undo all since `snapshot`."""
        self._load_learned(snapshot.weights, snapshot.learned)
        self._replay_buffer.restore(snapshot.replay_buffer)


def _copied(state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in state.items()}


def _diverged(part: str, norm: float, settings: SACSettings) -> TrainingDiverged:
    return TrainingDiverged(
        f"the gradient of the {part} has norm {norm:.3g}; the weights from before the update are kept. Lower "
        f"`learning_rate` ({settings.learning_rate:g}) and `critic_learning_rate` "
        f"({settings.critic_learning_rate:g}), or turn on `norm_obs` and `norm_reward`."
    )
