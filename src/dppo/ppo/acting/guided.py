"""GuidedAgent: acts as controllers beside the environments would, in the first segments of a run."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.environments import Environments
from dppo.ppo.exchange.phase import ControllerPhase
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.networks.network import NetworkOutputs


def guided_agent(
    phase: ControllerPhase, agent: PPOAgent, envs: Sequence[Environments], snapshot: PolicySnapshot
) -> GuidedAgent | None:
    """Return what acts in the environments of several samplers under `snapshot`; None if it is the policy."""
    is_on = snapshot.version < phase.versions
    for group in envs:
        group.follow(is_on=is_on)
    return GuidedAgent(agent, envs, phase.log_std) if is_on else None


class GuidedAgent:
    """Act as the controllers beside environments would, with noise, in place of the policy.

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
