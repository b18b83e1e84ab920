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


def plain_critics(
    count: int, inputs: int, sizes: Sequence[int], weights: Tensor
) -> list[nn.Module]:
    """Return each critic as a module with its part of the flat `weights`."""
    modules: list[nn.Module] = []
    for critic in range(count):
        layers: list[nn.Module] = []
        fan_in = inputs
        start = 0
        for fan_out in (*sizes, 1):
            layer = nn.Linear(fan_in, fan_out, dtype=weights.dtype)
            end = start + count * fan_in * fan_out
            stacked = weights[start:end].view(count, fan_in, fan_out)
            layer.weight.data = stacked[critic].t().clone()
            start = end + count * fan_out
            layer.bias.data = weights[end:start].view(count, fan_out)[critic].clone()
            layers += [layer, nn.LayerNorm(fan_out, elementwise_affine=False), nn.SiLU()]
            fan_in = fan_out
        modules.append(nn.Sequential(*layers[:-2]))
    return modules


def flat(modules: Sequence[nn.Module]) -> Tensor:
    """Return the weights of the modules in the order of the flat vector of `Critics`."""
    named = [list(module.parameters()) for module in modules]
    parts = []
    for tensors in zip(*named, strict=True):
        stacked = torch.stack([tensor.detach() for tensor in tensors])
        parts.append((stacked.mT if stacked.dim() == 3 else stacked).flatten())
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


@dataclass
class World:
    """Makes successive segments of random numbers, and lists their transitions in the order of kept rows."""

    dtype: np.dtype[Any]
    num_actions: int = 2
    num_samplers: int = 2
    num_envs: int = 2
    seed: int = 0
    ends: float = 0.15
    """Probability of each kind of end, in each step."""
    invalid: float = 0.0
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)
        self.now = [self._obs(self.num_envs) for _ in range(self.num_samplers)]

    def _obs(self, count: int) -> np.ndarray:
        obs = np.zeros(count, self.dtype)
        leaves = [obs] if self.dtype.names is None else [obs[name] for name in self.dtype.names]
        for leaf in leaves:
            leaf[...] = self.random.normal(3, 2, leaf.shape)
        return obs

    def segments(self, num_steps: int) -> list[Segment]:
        steps: list[list[Row | None]] = [[] for _ in range(num_steps)]
        segments = [
            self._segment(sampler, num_steps, steps) for sampler in range(self.num_samplers)
        ]
        self.rows += [row for step in steps for row in step if row is not None]
        return segments

    def _segment(self, sampler: int, num_steps: int, steps: list[list[Row | None]]) -> Segment:
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
            self.now[sampler] = led_to[step].copy()
            self.now[sampler][done] = self._obs(int(done.sum()))
            steps[step] += [
                Row(
                    obs[step, env],
                    actions[step, env],
                    rewards[step, env],
                    terminated[step, env],
                    led_to[step, env],
                    logprobs[step, env],
                )
                if valid[step, env]
                else None
                for env in range(self.num_envs)
            ]
        column = np.zeros(shape)
        segment = Segment(
            obs, actions, logprobs, column, column, rewards, terminated, truncated, valid
        )
        return replace(segment, successors=led_to[segment.followed])


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


def experience_of(
    segments: Sequence[Segment],
    iteration: int,
    scale: ObsScale | None = None,
    reward_scale: float | None = None,
) -> Experience:
    return Experience(
        segments, PolicySnapshot(iteration, np.zeros(0), scale), reward_scale, iteration
    )


@dataclass
class PlainSAC:
    """Soft actor-critic as in arXiv:1812.05905, algorithm 1, on the rows of a `World` of arrays, without clipping."""

    spec: NetworkSpec
    settings: SACSettings
    seed: int
    policy: nn.Module
    critics: list[nn.Module]
    log_temperature: Tensor

    def __post_init__(self) -> None:
        self.targets = [copy.deepcopy(critic) for critic in self.critics]
        self.log_temperature.requires_grad_()
        critic_weights = [weight for critic in self.critics for weight in critic.parameters()]
        rates = self.settings
        self.optimizers = (
            torch.optim.Adam(critic_weights, rates.critic_learning_rate),
            torch.optim.Adam(self.policy.parameters(), rates.learning_rate),
            torch.optim.Adam([self.log_temperature], rates.temperature_learning_rate),
        )

    def update(
        self, ranks: Sequence[Sequence[Row]], iteration: int, count: int, normalize: Any
    ) -> None:
        """Take `count` gradient steps on the rows of each rank, which all draw equally many."""
        size = self.settings.minibatch_size // len(ranks)
        width = self.spec.distribution.noise_size
        rows: list[list[Row]] = [[] for _ in range(count)]
        noises = []
        for rank, kept in enumerate(ranks):
            index = (iteration, rank) if len(ranks) > 1 else (iteration,)
            random = generator(self.seed, Stream.MINIBATCHES, *index)
            chosen = random.integers(len(kept), size=count * size).reshape(count, size)
            noises.append(random.standard_normal((count, 2, size, width), np.float32))
            thresholds = random.random((self.settings.n_step - 1, count * size))
            drawn = self._look_ahead(kept, chosen.flatten(), thresholds, normalize)
            for step in range(count):
                rows[step] += drawn[step * size : (step + 1) * size]
        noise = from_numpy(np.concatenate(noises, axis=2)).double()
        for step in range(count):
            self._step(rows[step], noise[step], normalize)

    def _look_ahead(
        self, kept: Sequence[Row], chosen: np.ndarray, thresholds: np.ndarray, normalize: Any
    ) -> list[Row]:
        """Return the chosen rows, each with later steps, more of them where the present policy would act alike."""
        drawn = []
        for number, of_row in zip(chosen, thresholds.T, strict=True):

            def extends(step: int, row: Row, of_row: np.ndarray = of_row) -> bool:
                ratio = self._ratio(row, normalize)
                likelihood = min(1, ratio) ** (1 / len(row.action))
                least = self.settings.least_extension
                return bool(of_row[step - 1] < least + (1 - least) * likelihood)

            row = look_ahead(kept, number, self.settings, extends)
            drawn.append(row)
        return drawn

    @torch.no_grad()
    def _ratio(self, row: Row, normalize: Any) -> float:
        """Return the density of a row's action under the policy, relative to that under the policy that chose it."""
        obs = normalize(row.obs[None])
        head, _ = self.policy(obs)
        distribution = SquashedGaussian(self.spec.distribution.noise_size, state_dependent=True)
        action = from_numpy(row.action[None])
        logprobs, _ = distribution.scores(head, action)
        difference = float(logprobs) - row.logprob
        return math.exp(difference)

    def _step(self, rows: Sequence[Row], noise: Tensor, normalize: Any) -> None:
        obs = normalize(np.stack([row.obs for row in rows]))
        successors = normalize(np.stack([row.successor for row in rows]))
        rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
        ends = torch.tensor([float(row.terminated) for row in rows], dtype=torch.float64)
        num_steps = torch.tensor([row.num_steps for row in rows], dtype=torch.float64)
        discounts = self.settings.gamma**num_steps
        actions = torch.tanh(from_numpy(np.stack([row.action for row in rows])))
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            following, logprobs = self._draw(successors, noise[0])
            values = torch.stack(
                [self._value(critic, successors, following) for critic in self.targets]
            )
            targets = rewards + discounts * (1 - ends) * (values.amin(0) - temperature * logprobs)
        loss = sum(
            0.5 * (self._value(critic, obs, actions) - targets).square().mean()
            for critic in self.critics
        )
        self._move(0, loss)
        with torch.no_grad():
            for target, critic in zip(self.targets, self.critics, strict=True):
                for slow, fast in zip(target.parameters(), critic.parameters(), strict=True):
                    slow.copy_(self.settings.tau * fast + (1 - self.settings.tau) * slow)
        drawn, logprobs = self._draw(obs, noise[1])
        least = torch.stack([self._value(critic, obs, drawn) for critic in self.critics]).amin(0)
        self._move(1, (temperature * logprobs - least).mean())
        target_entropy = self.settings.target_entropy * noise.shape[2]
        self._move(2, (-self.log_temperature * (logprobs.detach() + target_entropy)).mean())

    def _move(self, number: int, loss: Any) -> None:
        self.optimizers[number].zero_grad()
        loss.backward()
        self.optimizers[number].step()

    def _draw(self, obs: Any, noise: Tensor) -> tuple[Tensor, Tensor]:
        head, _ = self.policy(obs)
        mean, log_std = head.split(noise.shape[1], dim=1)
        u = mean + log_std.exp() * noise
        logprobs, _ = SquashedGaussian(noise.shape[1], state_dependent=True).scores(head, u)
        return torch.tanh(u), logprobs

    def _value(self, critic: nn.Module, obs: Any, actions: Tensor) -> Tensor:
        leaves = list(obs.values()) if isinstance(obs, dict) else [obs]
        columns = [leaf.reshape(len(leaf), -1) for leaf in leaves]
        value: Tensor = critic(torch.cat([*columns, actions], dim=1)).squeeze(1)
        return value
