"""Minibatches from a replay buffer, normalized as the policy that acts does it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.exchange.inputs import each_leaf, reader_of
from dppo.ppo.exchange.records import Experience
from dppo.ppo.exchange.scales import CLIP, ObsScale
from dppo.ppo.learning.advantages import shaped_rewards
from dppo.ppo.networks.network import LearningNetwork, NetworkSpec
from dppo.sac.replay_buffer import LaterRows, ReplayBuffer
from dppo.sac.settings import SACSettings

STEPS_AT_ONCE = 64  # gradient steps whose rows are drawn together


class Minibatch(NamedTuple):
    """Rows of a gradient step, normalized."""

    obs: Any
    """A tensor [rows, *O], or a dict of tensors by the leaf's name."""
    actions: Tensor
    """[rows, A] before squashing."""
    returns: Tensor
    """[rows], the discounted rewards of a row and of the steps after it that count."""
    discounts: Tensor
    """[rows], the weight of the successor's value in the target; 0 behind a terminal state."""
    successors: Any
    num_steps: Tensor
    """[rows], the rewards that `returns` adds up."""
    intended: Tensor | None
    """[rows, A], actions of a controller without noise, before squashing, nan in rows of the policy; None once nobody
    needs them."""
    noise: Tensor
    """[2, rows, A]: noise of the actions after the successors, and of the actions after the observations."""


@dataclass(frozen=True, slots=True)
class Minibatches:
    """Draws the minibatches of a rank, with replacement."""

    replay_buffer: ReplayBuffer
    spec: NetworkSpec
    settings: SACSettings
    size: int
    """Rows of a minibatch on this rank."""
    network: LearningNetwork
    """The policy's network, which decides how far a target looks ahead."""

    def draw(
        self, experience: Experience, count: int, generator: np.random.Generator
    ) -> Iterator[Minibatch]:
        """Yield `count` minibatches of all transitions, normalized by the scales of `experience`."""
        transitions = self.replay_buffer.transitions()
        noise_size = self.spec.distribution.noise_size
        for start in range(0, count, STEPS_AT_ONCE):
            steps = min(STEPS_AT_ONCE, count - start)
            places = transitions[generator.integers(len(transitions), size=steps * self.size)]
            noise = generator.standard_normal((steps, 2, self.size, noise_size), np.float32)
            horizon = (self.settings.n_step - 1, len(places))
            thresholds = generator.random(horizon)
            rows = self._normalized(places, experience, thresholds)
            for step in range(steps):
                chosen = slice(step * self.size, (step + 1) * self.size)
                yield _part(rows, chosen, self._tensor(noise[step]))

    def _normalized(
        self, places: np.ndarray, experience: Experience, thresholds: np.ndarray
    ) -> Minibatch:
        """Return the rows at these places, without noise.

        Args:
            places: of the first step of each row.
            experience: the newest, whose scales normalize all rows.
            thresholds: [n_step - 1, rows] uniform in [0, 1), which decide where a target stops adding up rewards.
        """
        gamma = self.settings.gamma
        obs_scale = experience.next_obs_scale or experience.policy.obs_scale

        def extends(step: int, indices: np.ndarray, later: LaterRows) -> np.ndarray:
            likelihoods = self._relative_likelihoods(later, obs_scale)
            least = self.settings.least_extension
            return thresholds[step - 1, indices] < least + (1 - least) * likelihoods

        drawn = self.replay_buffer.draw(places, self.settings.n_step, extends)
        rewards = shaped_rewards(drawn.rewards, self.settings)
        if experience.reward_scale is not None:
            rewards = np.clip(rewards / experience.reward_scale, -CLIP, CLIP)
        returns = gamma ** np.arange(len(rewards)) @ rewards
        discounts = np.where(drawn.terminated, 0.0, gamma**drawn.num_steps)
        return Minibatch(
            obs=self._inputs(drawn.obs, obs_scale),
            actions=self._tensor(drawn.actions),
            returns=self._tensor(returns),
            discounts=self._tensor(discounts),
            successors=self._inputs(drawn.successors, obs_scale),
            num_steps=self._tensor(drawn.num_steps.astype(self.spec.dtype)),
            intended=None if drawn.intended is None else self._tensor(drawn.intended),
            noise=torch.empty(0),
        )

    def _relative_likelihoods(self, rows: LaterRows, obs_scale: ObsScale | None) -> np.ndarray:
        """Return min(1, pi(a | s) / mu(a | s))^(1 / A) of rows: pi is the present policy, mu the policy that chose a.

        Source: Wang et al., arXiv:1611.01224, section 5.
        Deviation: the paper weights what follows; here a target ends with the opposite probability.
        """
        if not len(rows.obs):
            return np.zeros(0)
        head, _, _ = self.network.forward(self._inputs(rows.obs, obs_scale))
        distribution = self.spec.distribution
        logprobs = distribution.log_prob(head.numpy(force=True), rows.actions)
        differences = np.minimum(0.0, logprobs - rows.logprobs)
        return np.exp(differences / distribution.noise_size)

    def _inputs(self, obs: np.ndarray, obs_scale: ObsScale | None) -> Any:
        obs_dtype = self.spec.spaces.obs
        reader = reader_of(obs_dtype, self.spec.dtype)
        reader.load(obs_scale)
        return each_leaf(reader.read(obs), self._tensor)

    def _tensor(self, array: np.ndarray) -> Tensor:
        if array.dtype.kind == "f":
            array = array.astype(self.spec.dtype, copy=False)
        # leaves of a Dict lie between others, at distances that torch may refuse
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.settings.device)


def _part(rows: Minibatch, chosen: slice, noise: Tensor) -> Minibatch:
    def part(leaf: Tensor) -> Tensor:
        return leaf[chosen]

    return Minibatch(
        obs=each_leaf(rows.obs, part),
        actions=rows.actions[chosen],
        returns=rows.returns[chosen],
        discounts=rows.discounts[chosen],
        successors=each_leaf(rows.successors, part),
        num_steps=rows.num_steps[chosen],
        intended=None if rows.intended is None else rows.intended[chosen],
        noise=noise,
    )
