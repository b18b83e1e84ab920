"""Slow twins of soft actor-critic, in plain torch with autograd, and segments to learn from."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, from_numpy, nn

from dppo.ppo.distributions.simple import SquashedGaussian
from dppo.ppo.exchange.records import Experience, PolicySnapshot, Segment
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.networks.network import NetworkSpec
from dppo.sac.settings import SACSettings
from dppo.streams import Stream, generator


class FlatWeights:
    """The flat vector of `Critics`, from which the tensors of all critics are taken one after the other."""

    def __init__(self, weights: Tensor, count: int) -> None:
        self.weights = weights
        self.count = count
        self.start = 0

    def take(self, *shape: int) -> Tensor:
        """Return the next tensor of each critic."""
        size = self.count * math.prod(shape)
        end = self.start + size
        tensors = self.weights[self.start : end].view(self.count, *shape)
        self.start = end
        return tensors


def plain_critics(
    count: int, inputs: int, sizes: Sequence[int], weights: Tensor
) -> list[nn.Module]:
    """Return each critic as a module with its part of the flat `weights`."""
    flat_weights = FlatWeights(weights, count)
    layers: list[list[nn.Module]] = [[] for _ in range(count)]
    fan_in = inputs

    for fan_out in (*sizes, 1):
        kernels = flat_weights.take(fan_in, fan_out)
        biases = flat_weights.take(fan_out)
        for critic in range(count):
            layer = nn.Linear(fan_in, fan_out, dtype=weights.dtype)
            layer.weight.data = kernels[critic].t().clone()
            layer.bias.data = biases[critic].clone()
            norm = nn.LayerNorm(fan_out, elementwise_affine=False)
            layers[critic] += [layer, norm, nn.SiLU()]
        fan_in = fan_out

    # the last layer has neither a norm nor an activation
    return [nn.Sequential(*critic_layers[:-2]) for critic_layers in layers]


def flat(modules: Sequence[nn.Module]) -> Tensor:
    """Return the weights of the modules in the order of the flat vector of `Critics`."""
    parameters = [list(module.parameters()) for module in modules]
    parts = []
    for tensors in zip(*parameters, strict=True):
        stacked = torch.stack([tensor.detach() for tensor in tensors])
        if stacked.dim() == 3:
            stacked = stacked.mT
        parts.append(stacked.flatten())

    return torch.cat(parts)


class Row(NamedTuple):
    """A transition, raw."""

    obs: Any
    action: np.ndarray
    reward: float
    terminated: bool
    successor: Any
    logprob: float = 0.0
    num_steps: int = 1
    intended: np.ndarray | None = None
    """The controller's action."""


@dataclass
class World:
    """Makes successive segments of random numbers, and lists their transitions in the order of a replay buffer."""

    dtype: np.dtype[Any]
    num_actions: int = 2
    num_samplers: int = 2
    num_envs: int = 2
    seed: int = 0
    ends: float = 0.15
    """Probability of each kind of end, in each step."""
    invalid: float = 0.0
    has_controller: bool = False
    """A controller collects."""
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.now = [self._obs(self.num_envs) for _ in range(self.num_samplers)]

    def _obs(self, count: int) -> np.ndarray:
        obs = np.zeros(count, self.dtype)
        leaves = [obs]
        if self.dtype.names is not None:
            leaves = [obs[name] for name in self.dtype.names]
        for leaf in leaves:
            leaf[...] = self.random.normal(3, 2, leaf.shape)
        return obs

    def segments(self, num_steps: int) -> list[Segment]:
        segments = []
        transitions = []
        for sampler in range(self.num_samplers):
            segment, led_to = self._segment(sampler, num_steps)
            segments.append(segment)
            transitions.append(rows_of(segment, led_to))

        for step in range(num_steps):
            for sampler_transitions in transitions:
                self.rows += sampler_transitions[step]
        return segments

    def _segment(self, sampler: int, num_steps: int) -> tuple[Segment, np.ndarray]:
        """Return a segment, and the observations [T, E] that its steps led to."""
        shape = (num_steps, self.num_envs)
        random = self.random
        obs = np.zeros(shape, self.dtype)
        actions = random.normal(size=(*shape, self.num_actions))
        logprobs = random.normal(-2, 2, shape)
        rewards = random.normal(size=shape)
        terminated = random.random(shape) < self.ends
        truncated = random.random(shape) < self.ends
        valid = random.random(shape) >= self.invalid
        led_to = np.zeros(shape, self.dtype)

        for step in range(num_steps):
            obs[step] = self.now[sampler]
            led_to[step] = self._obs(self.num_envs)
            done = terminated[step] | truncated[step]
            if step + 1 < num_steps:
                done = done | ~valid[step + 1]
            following = led_to[step].copy()
            following[done] = self._obs(int(done.sum()))
            self.now[sampler] = following

        zeros = np.zeros(shape)
        segment = Segment(
            obs, actions, logprobs, zeros, zeros, rewards, terminated, truncated, valid
        )
        if self.has_controller:
            segment = replace(segment, intended=actions - 0.1 * random.normal(size=actions.shape))
        return replace(segment, successors=led_to[segment.followed]), led_to


def rows_of(segment: Segment, led_to: np.ndarray) -> list[list[Row]]:
    """Return the transitions of each step."""
    steps = []
    for step, valid in enumerate(segment.valid):
        rows = []
        for env in np.flatnonzero(valid):
            place = (step, env)
            row = Row(
                obs=segment.obs[place],
                action=segment.actions[place],
                reward=segment.rewards[place],
                terminated=segment.terminated[place],
                successor=led_to[place],
                logprob=segment.logprobs[place],
                intended=None if segment.intended is None else segment.intended[place],
            )
            rows.append(row)
        steps.append(rows)

    return steps


def look_ahead(
    rows: Sequence[Row], number: int, settings: SACSettings, extends: Callable[[int, Row], bool]
) -> Row:
    """Return a row with the rewards of the steps after it, until its episode ends or `extends` refuses a step."""
    by_obs = {row.obs.tobytes(): row for row in rows}
    last = rows[number]
    reward = last.reward
    num_steps = 1
    while num_steps < settings.n_step and not last.terminated:
        following = by_obs.get(last.successor.tobytes())
        if following is None or not extends(num_steps, following):
            break
        last = following
        reward += settings.gamma**num_steps * last.reward
        num_steps += 1

    return rows[number]._replace(
        reward=reward, terminated=last.terminated, successor=last.successor, num_steps=num_steps
    )


class Minibatch(NamedTuple):
    """Rows as tensors."""

    obs: Any
    sampled: Tensor
    """Actions before squashing."""
    intended: Tensor
    """Actions of a controller; nan in other rows."""
    rewards: Tensor
    goes_on: Tensor
    successors: Any
    discounts: Tensor


def minibatch_of(rows: Sequence[Row], gamma: float, normalize: Any) -> Minibatch:
    def column(name: str) -> Tensor:
        numbers = [float(getattr(row, name)) for row in rows]
        return torch.tensor(numbers, dtype=torch.float64)

    def stacked(name: str) -> np.ndarray:
        return np.stack([getattr(row, name) for row in rows])

    unknown = np.full_like(rows[0].action, np.nan)
    intended = [unknown if row.intended is None else row.intended for row in rows]
    return Minibatch(
        obs=normalize(stacked("obs")),
        sampled=from_numpy(stacked("action")),
        intended=from_numpy(np.stack(intended)),
        rewards=column("reward"),
        goes_on=1 - column("terminated"),
        successors=normalize(stacked("successor")),
        discounts=gamma ** column("num_steps"),
    )


def experience_of(
    segments: Sequence[Segment],
    iteration: int,
    scale: ObsScale | None = None,
    reward_scale: float | None = None,
) -> Experience:
    policy = PolicySnapshot(iteration, np.zeros(0), scale)
    return Experience(segments, policy, reward_scale, iteration)


@dataclass
class PlainSAC:
    """Soft actor-critic as in arXiv:1812.05905, algorithm 1, on the rows of a `World` of arrays, without clipping."""

    spec: NetworkSpec
    settings: SACSettings
    seed: int
    policy: nn.Module
    critics: list[nn.Module]
    log_temperature: Tensor
    normalize: Callable[[np.ndarray], Any]

    def __post_init__(self) -> None:
        self.width = self.spec.distribution.noise_size
        self.distribution = SquashedGaussian(self.width, state_dependent=True)
        self.targets = [copy.deepcopy(critic) for critic in self.critics]
        self.log_temperature.requires_grad_()
        critic_weights: list[nn.Parameter] = []
        for critic in self.critics:
            critic_weights += critic.parameters()
        rates = self.settings
        adam = torch.optim.Adam
        self.critic_optimizer = adam(critic_weights, rates.critic_learning_rate)
        self.policy_optimizer = adam(self.policy.parameters(), rates.learning_rate)
        self.temperature_optimizer = adam([self.log_temperature], rates.temperature_learning_rate)

    def update(
        self,
        ranks: Sequence[Sequence[Row]],
        iteration: int,
        count: int,
        *,
        clones: bool = False,
        clone_weight: float = 0.0,
    ) -> None:
        """Take `count` gradient steps on the rows of each rank, which all draw equally many.

        Args:
            clones: the policy's loss is the distance from the controller alone.
            clone_weight: of this distance otherwise.
        """
        size = self.settings.minibatch_size // len(ranks)
        rows: list[list[Row]] = [[] for _ in range(count)]
        noises = []
        for rank, kept in enumerate(ranks):
            index = (iteration, rank) if len(ranks) > 1 else (iteration,)
            random = generator(self.seed, Stream.MINIBATCHES, *index)
            chosen = random.integers(len(kept), size=count * size)
            shape = (count, 2, size, self.width)
            noise_of_rank = random.standard_normal(shape, np.float32)
            noises.append(noise_of_rank)
            later_steps = self.settings.n_step - 1
            thresholds = random.random((later_steps, count * size))
            drawn = self._look_ahead(kept, chosen, thresholds)
            for step in range(count):
                start = step * size
                rows[step] += drawn[start : start + size]

        noise_of_all = np.concatenate(noises, axis=2)
        noise = from_numpy(noise_of_all).double()
        for step in range(count):
            minibatch = minibatch_of(rows[step], self.settings.gamma, self.normalize)
            self._step_critics(minibatch, noise[step])
            if clones:
                self._move(self.policy_optimizer, self._clone_loss(minibatch))
            else:
                self._step_policy(minibatch, noise[step], clone_weight)

    def _look_ahead(
        self, kept: Sequence[Row], chosen: np.ndarray, thresholds: np.ndarray
    ) -> list[Row]:
        """Return the chosen rows, each with later steps, more of them where the present policy would act alike."""
        least = self.settings.least_extension
        drawn = []
        for number, row_thresholds in zip(chosen, thresholds.T, strict=True):

            def extends(step: int, row: Row, row_thresholds: np.ndarray = row_thresholds) -> bool:
                ratio = self._ratio(row)
                likelihood = min(1, ratio) ** (1 / len(row.action))
                chance = least + (1 - least) * likelihood
                return bool(row_thresholds[step - 1] < chance)

            row = look_ahead(kept, number, self.settings, extends)
            drawn.append(row)

        return drawn

    @torch.no_grad()
    def _ratio(self, row: Row) -> float:
        """Return the density of a row's action under the policy, relative to that under the policy that chose it."""
        obs = self.normalize(row.obs[None])
        head, _ = self.policy(obs)
        action = torch.tensor(row.action[None])
        logprobs, _ = self.distribution.scores(head, action)
        difference = float(logprobs) - row.logprob
        return math.exp(difference)

    def _step_critics(self, minibatch: Minibatch, noise: Tensor) -> None:
        temperature = self.log_temperature.detach().exp()
        targets = self._targets(minibatch, noise[0], temperature)
        self._move(self.critic_optimizer, self._critic_loss(minibatch, targets))
        self._follow()

    def _step_policy(self, minibatch: Minibatch, noise: Tensor, clone_weight: float) -> None:
        temperature = self.log_temperature.detach().exp()
        actions, logprobs = self._draw(minibatch.obs, noise[1])
        least = self._least(self.critics, minibatch.obs, actions)
        policy_loss = temperature * logprobs - least
        loss = policy_loss.mean() + clone_weight * self._distance(minibatch)
        self._move(self.policy_optimizer, loss)

        target_entropy = self.settings.target_entropy * self.width
        too_certain = logprobs.detach() + target_entropy
        temperature_loss = -self.log_temperature * too_certain
        self._move(self.temperature_optimizer, temperature_loss.mean())

    @torch.no_grad()
    def _targets(self, minibatch: Minibatch, noise: Tensor, temperature: Tensor) -> Tensor:
        actions, logprobs = self._draw(minibatch.successors, noise)
        least = self._least(self.targets, minibatch.successors, actions)
        soft_values = least - temperature * logprobs
        discounts = minibatch.discounts * minibatch.goes_on
        return minibatch.rewards + discounts * soft_values

    def _critic_loss(self, minibatch: Minibatch, targets: Tensor) -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for critic in self.critics:
            value = self._value(critic, minibatch.obs, torch.tanh(minibatch.sampled))
            error = value - targets
            loss = loss + 0.5 * error.square().mean()
        return loss

    def _clone_loss(self, minibatch: Minibatch) -> Tensor:
        """Return the KL divergence from a controller with the noise of these rows, up to a constant."""
        head, _ = self.policy(minibatch.obs)
        mean, log_std = head.split(self.width, dim=1)
        noise = minibatch.sampled - minibatch.intended
        squares = (mean - minibatch.intended).square() + noise.square()
        losses = log_std + squares / (2 * (2 * log_std).exp())
        return losses.sum(1).mean()

    def _distance(self, minibatch: Minibatch) -> Tensor:
        """Return half the squared distance of the policy's mean from the controller's actions; 0 in other rows."""
        rows = minibatch.intended.isfinite().all(1)
        head, _ = self.policy(minibatch.obs)
        mean, _ = head[rows].split(self.width, dim=1)
        squares = (mean - minibatch.intended[rows]).square()
        return squares.sum() / (2 * len(rows))

    @torch.no_grad()
    def _follow(self) -> None:
        tau = self.settings.tau
        for target, critic in zip(self.targets, self.critics, strict=True):
            for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                followed = tau * fast + (1 - tau) * slow
                slow.copy_(followed)

    def _move(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def _draw(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        head, _ = self.policy(obs)
        mean, log_std = head.split(self.width, dim=1)
        u = mean + log_std.exp() * noise
        logprobs, _ = self.distribution.scores(head, u)
        return torch.tanh(u), logprobs

    def _least(self, critics: Sequence[nn.Module], obs: Any, actions: Tensor) -> Tensor:
        values = [self._value(critic, obs, actions) for critic in critics]
        return torch.stack(values).amin(0)

    def _value(self, critic: nn.Module, obs: Any, actions: Tensor) -> Tensor:
        leaves = [obs]
        if isinstance(obs, dict):
            leaves = list(obs.values())
        columns = [leaf.reshape(len(leaf), -1) for leaf in leaves]
        inputs = torch.cat([*columns, actions], dim=1)
        value: Tensor = critic(inputs).squeeze(1)
        return value
