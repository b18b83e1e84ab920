"""PPOSampler: makes segments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from dppo.ppo.agent import PPOAgent
from dppo.ppo.normalizer import Moments, Statistics
from dppo.ppo.segment import (
    Episode,
    Incident,
    PolicySnapshot,
    Rebuild,
    SamplerCarry,
    Segment,
    SegmentReport,
    SegmentRequest,
    Timings,
)


class Environments(Protocol):
    """What a sampler needs of its E environments; `dppo.envs.group.EnvGroup` is one."""

    num_envs: int
    obs_shape: tuple[int, ...]
    obs_dtype: np.dtype

    def start(self, obs: np.ndarray) -> None:
        """Begin the first episode of each environment; write the observations into `obs` [E, *O]."""

    def step(
        self, actions: np.ndarray, obs: np.ndarray, rewards: np.ndarray, terminated: np.ndarray, truncated: np.ndarray
    ) -> dict[int, np.ndarray]:
        """Step each environment and reset those that are done.

        Writes rows [E, ...]: into `obs` what the next action is chosen from. Returns the final observation of each
        environment that was truncated, by its index.
        """

    def restore(self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray) -> list[Incident]:
        """Bring back the open episodes that `carry` describes; those that cannot be are begun afresh."""

    def take_episodes(self) -> tuple[Episode, ...]:
        """Episodes that ended since the last call, in the order of their ends."""

    def open_episodes(self) -> dict[str, np.ndarray]:
        """Index, return, length and checksum of the open episodes, by their names in `SamplerCarry`."""

    def take_time(self) -> float:
        """Seconds spent in the environments since the last call."""


class PPOSampler:
    """Turns a policy snapshot and what it carried over into one segment of T steps of E environments."""

    def __init__(
        self,
        sampler_id: int,
        agent: PPOAgent,
        envs: Environments,
        *,
        num_steps: int,
        gamma: float,
        noise: Callable[[int], np.random.Generator],
        track_obs: bool,
        track_returns: bool,
    ) -> None:
        """
        Args:
            noise: gives the generator of the exploration noise of a segment, by the segment's index.
            track_obs, track_returns: whether to report moments for the normalisers.
        """
        self.sampler_id = sampler_id
        self._agent = agent
        self._envs = envs
        self._num_steps = num_steps
        self._gamma = gamma
        self._noise = noise
        self._track_obs = track_obs
        self._track_returns = track_returns
        self._obs: np.ndarray | None = None  # [E, *O] what the next segment starts from; None before the first
        self._discounted_returns = np.zeros(envs.num_envs)

    def collect(self, request: SegmentRequest, snapshot: PolicySnapshot) -> tuple[Segment, SegmentReport]:
        """Make the segment that `request` names, under the weights of `snapshot`.

        Consumes: nothing of earlier segments but the state of the environments. Fails when an environment does.
        """
        incidents = self._begin(request.rebuild)
        segment, next_obs = self._roll_out(request, snapshot)
        self._obs = next_obs
        seen, self._discounted_returns = self._moments(segment)
        done = segment.terminated | segment.truncated
        report = SegmentReport(
            sampler_id=self.sampler_id,
            index=request.index,
            policy_version=snapshot.version,
            steps=int(segment.valid.sum()),
            carry=SamplerCarry(discounted_returns=self._discounted_returns.copy(), **self._envs.open_episodes()),
            open_actions=tuple(
                segment.actions[_steps_since_reset(done[:, env]) :, env].copy() for env in range(self._envs.num_envs)
            ),
            episodes=self._envs.take_episodes(),
            statistics=seen,
            incidents=tuple(incidents),
            timings=Timings(env_s=self._envs.take_time()),
        )
        return segment, report

    def _begin(self, rebuild: Rebuild | None) -> list[Incident]:
        """Make sure that there are observations to act on."""
        if rebuild is None and self._obs is not None:
            return []
        self._obs = np.empty((self._envs.num_envs, *self._envs.obs_shape), self._envs.obs_dtype)
        if rebuild is None:
            self._envs.start(self._obs)
            return []
        incidents = self._envs.restore(rebuild.carry, rebuild.actions, self._obs)
        self._discounted_returns = rebuild.carry.discounted_returns.copy()
        for incident in incidents:
            assert incident.env is not None
            self._discounted_returns[incident.env] = 0.0  # its episode was given up; a new one begins at zero
        return incidents

    def _roll_out(self, request: SegmentRequest, snapshot: PolicySnapshot) -> tuple[Segment, np.ndarray]:
        """T steps of all environments, and the observations [E, *O] after them."""
        steps, envs, agent = self._num_steps, self._envs, self._agent
        rows = (steps, envs.num_envs)
        dtype, distribution = agent.spec.dtype, agent.distribution
        agent.load(snapshot)
        noise = distribution.noise(self._noise(request.index), steps, envs.num_envs, dtype)
        obs = np.empty((steps + 1, envs.num_envs, *envs.obs_shape), envs.obs_dtype)
        obs[0] = self._obs
        actions = np.empty((*rows, *distribution.action_shape), distribution.action_dtype(dtype))
        heads = np.empty((*rows, distribution.head_size), dtype)
        values = np.empty(rows, dtype)
        rewards = np.empty(rows)
        terminated, truncated = np.empty(rows, bool), np.empty(rows, bool)
        cut: list[tuple[int, int, np.ndarray]] = []  # step, env, final observation, where a time limit struck
        for t in range(steps):
            actions[t], heads[t], values[t] = agent.act(obs[t], noise[t])
            final_obs = envs.step(actions[t], obs[t + 1], rewards[t], terminated[t], truncated[t])
            for env, final in final_obs.items():
                cut.append((t, env, final))
        next_values = np.empty(rows, dtype)
        next_values[:-1] = values[1:]
        next_values[-1] = agent.values(obs[-1])
        if cut:
            times, which, finals = zip(*cut, strict=True)
            next_values[times, which] = agent.values(np.stack(finals))
        segment = Segment(
            obs=obs[:-1],
            actions=actions,
            logprobs=agent.log_prob(heads, actions),
            values=values,
            next_values=next_values,
            rewards=rewards,
            terminated=terminated,
            truncated=truncated,
            valid=np.ones(rows, bool),
        )
        return segment, obs[-1].copy()

    def _moments(self, segment: Segment) -> tuple[Statistics, np.ndarray]:
        """Moments of what the normalisers watch, and the running discounted returns [E] after the segment.

        R <- gamma R + r, from zero in each episode. Source: detail 30; OpenAI baselines' VecNormalize.
        """
        running = self._discounted_returns
        obs = None
        if self._track_obs:
            obs = Moments.of(segment.obs.reshape(-1, *self._envs.obs_shape))
        if not self._track_returns:
            return Statistics(obs), running
        returns = np.empty(segment.rewards.shape)
        going_on = ~(segment.terminated | segment.truncated)
        for t in range(len(returns)):
            returns[t] = self._gamma * running + segment.rewards[t]
            running = returns[t] * going_on[t]
        return Statistics(obs, Moments.of(returns.reshape(-1))), running


def _steps_since_reset(done: np.ndarray) -> int:
    """The first row [T] that belongs to the episode that is still open at the end; T where none does."""
    ends = np.flatnonzero(done)
    return int(ends[-1]) + 1 if len(ends) else 0
