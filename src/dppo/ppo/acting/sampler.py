"""PPOSampler: collects segments from environments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Protocol

import numpy as np

from dppo.config.parts import PPO
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.inputs import normalized_part
from dppo.ppo.exchange.moments import Moments
from dppo.ppo.exchange.records import (
    EnvLog,
    Incident,
    PolicySnapshot,
    Rebuild,
    SamplerCarry,
    Segment,
    SegmentReport,
    SegmentRequest,
)
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.exchange.stacks import frames_of
from dppo.ppo.exchange.statistics import Statistics
from dppo.ppo.learning.advantages import shaped_rewards


class Environments(Protocol):
    """The E environments of a sampler; implemented by `dppo.envs.group.EnvGroup`."""

    num_envs: int
    obs: np.dtype[Any]
    """One observation as it is stored: `dppo.spaces.spaces.Spaces.obs`."""

    def start(self, obs: np.ndarray, log: EnvLog) -> None:
        """Start the first episode of each environment; write the observations to `obs` [E, *O]."""

    def step(
        self,
        actions: np.ndarray,
        obs: np.ndarray,
        rewards: np.ndarray,
        terminated: np.ndarray,
        truncated: np.ndarray,
        log: EnvLog,
    ) -> dict[int, np.ndarray]:
        """Step each environment, and reset those whose episode ends.

        Args:
            actions: [E, *A] as sampled from the policy.
            obs, rewards, terminated, truncated: rows [E, ...] to write; `obs` is what the next action follows from.
            log: receives the episodes that end, the environments that failed in this step, the incidents, the time.

        Returns: the final observation of each environment that was truncated and not terminated, by its index.
        Raises EnvironmentFault if an environment raised or returned an invalid result, and that ends the run.
        """

    def restore(
        self, carry: SamplerCarry, actions: tuple[np.ndarray, ...], obs: np.ndarray, log: EnvLog
    ) -> list[Incident]:
        """Restore the open episodes that `carry` describes, from its `states` or by replaying `actions`.

        An episode whose replay ends with another observation or return is abandoned, and a new one starts.

        Args:
            actions: for each environment [n, *A], the actions since its reset; empty to abandon all episodes.
            obs: [E, *O] to write.
            log: receives the time, but no episodes.

        Returns: one incident for each abandoned episode.
        """

    def check(self, obs: np.ndarray, log: EnvLog, *, first: bool) -> None:
        """Check the stored observations [T + 1, E, *O] of a segment, perhaps the `first` of the run.

        Raises EnvironmentFault if one is outside its space.
        """

    def open_episodes(self, log: EnvLog) -> dict[str, np.ndarray]:
        """Return index, return, length and checksum of the open episodes [E], under their names in `SamplerCarry`.

        Also the environments' own states, if they have any; `log` receives the time.
        """


@dataclass(eq=False)
class PPOSampler:
    """Collect segments of T steps from E environments, whose episodes continue from one segment to the next."""

    sampler_id: int
    agent: PPOAgent
    envs: Environments
    """Not started yet."""
    _: KW_ONLY
    ppo: PPO
    num_steps: int
    noise: Callable[[int], np.random.Generator]
    """Returns the generator of a segment's exploration noise, given the segment's index."""
    sequence_length: int = 1
    """L, the steps of a sequence in training, for a network with memory; divides T."""
    stack: int = 1
    """K, the frames of an observation that segments hold once each; 1 for whole observations."""

    def __post_init__(self) -> None:
        agent, num_envs = self.agent, self.envs.num_envs
        self.obs: np.ndarray | None = None  # [E, *O] where the next segment starts; None: the environments must start
        self.memory = agent.start(num_envs) if agent.state_size else None  # [E, S]
        self.keep_successors = self.ppo.recompute_advantages or self.ppo.reuse > 1  # those of `Segment`
        self._discounted_returns = np.zeros(num_envs)

    def collect(self, request: SegmentRequest, snapshot: PolicySnapshot) -> tuple[SegmentReport, Segment]:
        """Collect one segment, as `collect_together` does."""
        return collect_together([self], [request], snapshot)[0]

    def begin(self, rebuild: Rebuild | None, log: EnvLog) -> list[Incident]:
        """Start or restore the episodes, so that `obs` holds observations to act on."""
        self.obs = np.empty(self.envs.num_envs, self.envs.obs)
        if rebuild is None:
            self.envs.start(self.obs, log)
            return []
        incidents = self.envs.restore(rebuild.carry, rebuild.actions, self.obs, log)
        self._discounted_returns = rebuild.carry.discounted_returns.copy()
        self.memory = copy(rebuild.carry.memory)
        anew = [one.env for one in incidents if one.env is not None]  # their episodes were abandoned, new ones start
        self._discounted_returns[anew] = 0.0
        if self.memory is not None:
            self.memory[anew] = 0.0
        return incidents

    def finish(self, run: _Collection, at: int) -> tuple[SegmentReport, Segment]:
        """Return report and segment of this sampler, number `at` of `run`, and keep the state for the next one."""
        segment, request, snapshot, log = run.segment(at, self), run.requests[at], run.snapshot, run.logs[at]
        self.obs = run.obs[at, -1].copy()
        self.memory = None if run.states is None else run.states[at, -1].copy()
        seen = self._moments(segment, snapshot.obs_scale)
        self.envs.check(run.obs[at], log, first=request.index == 0)
        open_episodes = self.envs.open_episodes(log)
        lengths, actions = enumerate(open_episodes["episode_lengths"]), segment.actions
        report = SegmentReport(
            sampler_id=self.sampler_id,
            index=request.index,
            policy_version=snapshot.version,
            steps=int(segment.valid.sum()),
            carry=SamplerCarry(
                discounted_returns=self._discounted_returns.copy(), memory=copy(self.memory), **open_episodes
            ),
            open_actions=tuple(actions[max(0, self.num_steps - length) :, env].copy() for env, length in lengths),
            episodes=tuple(log.episodes),
            ended_actions=tuple(
                actions[max(0, one.end - one.length) : one.end, one.env].copy() for one in log.episodes
            ),
            statistics=seen,
            incidents=(*run.incidents[at], *log.incidents),
            env_s=log.seconds,
        )
        return report, segment

    def _moments(self, segment: Segment, scale: ObsScale | None) -> Statistics:
        """Return moments for the normalizers; of returns R <- gamma R + r, which run on from segment to segment.

        Rows that are not transitions are not counted, and reset R. Source: detail 30; OpenAI baselines' VecNormalize.
        """
        valid = segment.valid
        obs = None if scale is None else Moments.of(normalized_part(segment.obs[valid], scale.names))
        if not self.ppo.norm_reward:
            return Statistics(obs)
        running, returns = self._discounted_returns, np.empty(segment.rewards.shape)
        going_on = ~(segment.terminated | segment.truncated) & valid
        rewards = np.where(valid, shaped_rewards(segment.rewards, self.ppo), 0.0)
        for t in range(len(returns)):
            returns[t] = self.ppo.gamma * running + rewards[t]
            running = returns[t] * going_on[t]
        self._discounted_returns = running
        return Statistics(obs, Moments.of(returns[valid]))


class _Collection:
    """Segments of S samplers while they are collected: arrays [S, T, E, ...], and the loop over T."""

    def __init__(
        self, samplers: Sequence[PPOSampler], requests: Sequence[SegmentRequest], snapshot: PolicySnapshot
    ) -> None:
        self.requests, self.snapshot, first = requests, snapshot, samplers[0]
        self._agent, self._envs = first.agent, [sampler.envs for sampler in samplers]
        steps, envs, distribution = first.num_steps, first.envs, first.agent.distribution
        rows, dtype = (len(samplers), steps, envs.num_envs), first.agent.spec.dtype
        actions = np.empty((*rows, *distribution.action_shape), distribution.action_dtype(dtype))
        self.logs = [EnvLog(one.index, own, snapshot.env_options) for one, own in zip(requests, actions, strict=True)]
        self.incidents = [
            sampler.begin(request.rebuild, log) if request.rebuild is not None or sampler.obs is None else []
            for sampler, request, log in zip(samplers, requests, self.logs, strict=True)
        ]
        self._agent.load(snapshot)
        streams = [sampler.noise(request.index) for sampler, request in zip(samplers, requests, strict=True)]
        self._noise = np.stack([distribution.noise(one, steps, envs.num_envs, dtype) for one in streams])
        self._heads = np.empty((*rows, distribution.head_size), dtype)
        self._columns = {"actions": actions, "rewards": np.empty(rows), "valid": np.ones(rows, bool)}
        self._columns |= {name: np.empty(rows, dtype) for name in ("values", "next_values")}
        self._columns |= {name: np.empty(rows, bool) for name in ("terminated", "truncated")}
        self.obs = np.empty((len(samplers), steps + 1, envs.num_envs), envs.obs)
        self.states: np.ndarray | None = None
        """States of the memory before each step, and after the last: [S, T + 1, E, n]; zero where an episode starts."""
        if first.memory is not None:
            self.states = np.empty((len(samplers), steps + 1, *first.memory.shape), first.memory.dtype)
        for own, sampler in enumerate(samplers):
            self.obs[own, 0] = sampler.obs
            if self.states is not None:
                self.states[own, 0] = sampler.memory
        self._cut: list[tuple[int, int, int, np.ndarray, np.ndarray | None]] = []
        """Sampler, step and environment of each time limit; the final observation; the state of the memory after it."""

    def go(self) -> None:
        """Take T steps of all environments: all samplers act at once, then each steps its environments."""
        one, columns = len(self._envs) == 1, self._columns  # a single sampler needs no leading axis: faster
        names = ("actions", "values", "terminated", "truncated")
        arrays = self.obs, self._noise, self._heads, *(columns[name] for name in names)
        obs, noise, heads, actions, values, terminated, truncated = (
            own[0] if one else own.swapaxes(0, 1) for own in arrays
        )
        states = None if self.states is None else self.states[0] if one else self.states.swapaxes(0, 1)
        rows = (columns[name] for name in ("actions", "rewards", "terminated", "truncated"))
        worlds = list(zip(self._envs, self.obs, *rows, self.logs, strict=True))
        for t in range(len(values)):
            before = None if states is None else states[t]
            actions[t], (heads[t], values[t], after) = self._agent.act(obs[t], noise[t], before)
            for s, (envs, seen, chosen, rewards, ended, cut, log) in enumerate(worlds):
                final_obs = envs.step(chosen[t], seen[t + 1], rewards[t], ended[t], cut[t], log)
                for env, final in final_obs.items():
                    state = None if after is None else after[env] if one else after[s, env]
                    self._cut.append((s, t, env, final, state))
                while log.dropped:
                    columns["valid"][s, t, log.dropped.pop()] = False
            if states is not None:
                states[t + 1] = after
                states[t + 1, terminated[t] | truncated[t]] = 0.0
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Estimate the values of the true successors of all steps."""
        values, next_values, states = self._columns["values"], self._columns["next_values"], self.states
        next_values[:, :-1] = values[:, 1:]
        next_values[:, -1] = self._agent.values(self.obs[:, -1], None if states is None else states[:, -1])
        for s in sorted({one[0] for one in self._cut}):
            times, which, finals, ends = zip(*(one[1:] for one in self._cut if one[0] == s), strict=True)
            state = None if states is None else np.stack(ends)
            next_values[s, times, which] = self._agent.values(np.stack(finals), state)

    def segment(self, s: int, of: PPOSampler) -> Segment:
        """Return the segment of sampler number `s`."""
        seen, masks = self._agent.split(self.obs[s, :-1])
        columns = {name: column[s] for name, column in self._columns.items()}
        segment = Segment(
            obs=seen if of.stack == 1 else frames_of(seen),
            logprobs=self._agent.distribution.log_prob(self._heads[s], columns["actions"]),
            masks=masks,
            states=None if self.states is None else self.states[s, : -1 : of.sequence_length].copy(),
            **columns,
        )
        return self._with_successors(s, segment) if of.keep_successors else segment

    def _with_successors(self, s: int, segment: Segment) -> Segment:
        obs, states = self.obs[s, 1:].copy(), None if self.states is None else self.states[s, 1:].copy()
        for sampler, t, env, final, state in self._cut:
            if sampler == s:
                obs[t, env] = final
                if states is not None:
                    states[t, env] = state
        successors, _ = self._agent.split(obs[segment.followed])
        after = None if states is None else states[segment.followed]
        return replace(segment, successors=successors, successor_states=after)


def collect_together(
    samplers: Sequence[PPOSampler], requests: Sequence[SegmentRequest], snapshot: PolicySnapshot
) -> list[tuple[SegmentReport, Segment]]:
    """Collect one segment from each of several samplers of a run, which act together at a third of the cost.

    Each segment has the same bits as one collected alone. Raise EnvironmentFault if an environment failed: then all
    samplers must be rebuilt.
    """
    run = _Collection(samplers, requests, snapshot)
    run.go()
    return [sampler.finish(run, at) for at, sampler in enumerate(samplers)]
