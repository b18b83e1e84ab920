"""GuidedExploration: controllers of the environments act in the first segments of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from typing_extensions import override

from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.environments import Environments
from dppo.ppo.acting.sampler import Act, Exploration, Rollout, with_successors
from dppo.ppo.exchange.phase import ControllerPhase
from dppo.ppo.exchange.records import Episode, Segment
from dppo.ppo.networks.network import NetworkOutputs


@dataclass(frozen=True, eq=False)
class GuidedExploration(Exploration):
    """The segments in which controllers of the environments act, with noise."""

    phase: ControllerPhase
    segments: int
    """Segments of a sampler that controllers act in: with a policy lag of K, K more than policy versions."""

    @override
    def act_in(self, rollout: Rollout) -> Act | None:
        is_on = self._is_on(rollout)
        envs = [sampler.envs for sampler in rollout.samplers]
        for group in envs:
            group.follow(is_on=is_on)
        if is_on:
            return GuidedAgent(rollout.agent, envs, self.phase.log_std).act
        return None

    def _is_on(self, rollout: Rollout) -> bool:
        return rollout.snapshot.version < self.phase.versions

    @override
    def covers_episode(self, sampler_id: int, episode: Episode, segments: range) -> bool:
        """Return whether a controller began the episode."""
        return segments[0] < self.segments

    @override
    def added(self, rollout: Rollout, s: int, segment: Segment) -> Segment:
        """Add the actions of the controller, and the successors that its clone learns from, while it acts."""
        if not self._is_on(rollout):
            return segment
        intended = rollout.agent.distribution.mode(rollout.heads[s]).copy()
        return replace(with_successors(rollout, s, segment), intended=intended)


class GuidedAgent:
    """Act with the noisy actions of the environments' controllers, in place of the policy.

    The actions are samples of a distribution around the controller's actions, so that their log-probabilities
    are as true as a policy's.
    """

    def __init__(self, agent: PPOAgent, envs: Sequence[Environments], log_std: np.ndarray) -> None:
        """Act in the environments of several samplers; `agent` estimates the values."""
        self._agent = agent
        self._envs = envs
        self._distribution = agent.distribution
        self._dtype = self._distribution.action_dtype(agent.spec.dtype)
        self._log_std = log_std.astype(agent.spec.dtype)

    def act(
        self, obs: np.ndarray, noise: np.ndarray, state: np.ndarray | None = None
    ) -> tuple[np.ndarray, NetworkOutputs]:
        """Sample an action for each row of `obs`, as `PPOAgent.act`; the head belongs to the controller."""
        outputs = self._agent.outputs(obs, state)
        intended = np.stack([group.intended() for group in self._envs]).astype(self._dtype)
        if len(self._envs) == 1:
            intended = intended[0]
        head = self._distribution.head_at(intended, self._log_std)
        _, masks = self._agent.split(obs)
        if masks is not None:
            head = self._distribution.limited(head, masks)
        return self._distribution.sample(head, noise), outputs._replace(head=head)
