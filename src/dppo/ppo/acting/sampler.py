"""PPOSampler: collects segments from environments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import cast

import numpy as np

from dppo.config.parts import PPO
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.environments import Environments
from dppo.ppo.exchange.inputs import normalized_part
from dppo.ppo.exchange.records import (
    EnvLog,
    Episode,
    Incident,
    PolicySnapshot,
    Rebuild,
    SamplerCarry,
    Segment,
    SegmentReport,
    SegmentRequest,
    StepRows,
    TimeLimit,
)
from dppo.ppo.exchange.scales import Moments, ObsScale, Statistics
from dppo.ppo.exchange.stacks import frames_of
from dppo.ppo.learning.advantages import shaped_rewards
from dppo.ppo.networks.network import NetworkOutputs


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
    noise: Callable[[int, int], np.ndarray]
    """Returns the exploration noise [T, E, n] of a segment, given its index and T."""
    sequence_length: int = 1
    """L, the steps of a sequence in training, for a network with memory; divides T."""
    stack: int = 1
    """K, the frames of an observation that segments hold once each; 1 for whole observations."""
    explorations: Sequence[Exploration] = ()
    """Decide on some segments that the policy does not act as it is; equal for all samplers of a run."""

    def __post_init__(self) -> None:
        num_envs = self.envs.num_envs
        self.obs: np.ndarray | None = None
        """[E, *O], from which the next segment starts; None: the environments must start."""
        self.memory = self.agent.start(num_envs) if self.agent.state_size else None
        """[E, S], the state of the policy's memory there."""
        self._discounted_returns = np.zeros(num_envs)
        spec = self.agent.spec
        distribution = spec.distribution
        action = (distribution.action_dtype(spec.dtype), distribution.action_shape)
        self.head_dtype = np.dtype((spec.dtype, (distribution.head_size,)))
        self.dtypes = {
            "actions": np.dtype(action),
            "values": np.dtype(spec.dtype),
            "next_values": np.dtype(spec.dtype),
            "rewards": np.dtype(float),
            "terminated": np.dtype(bool),
            "truncated": np.dtype(bool),
            "valid": np.dtype(bool),
        }
        """Dtypes of one row of the columns of a segment."""
        self.additions = self._additions()

    def _additions(self) -> list[Addition]:
        """Choose what adds the parts of segments that only some runs need."""
        additions: list[Addition] = []
        if self.stack > 1:
            additions.append(_with_frames)
        if self.memory is not None:
            additions.append(partial(_with_states, self.sequence_length))
        additions += [exploration.added for exploration in self.explorations]
        learns_from_old_rows = self.ppo.algo == "sac" or self.ppo.reuse > 1
        if self.ppo.recompute_advantages or learns_from_old_rows:
            additions.append(with_successors)
        return additions

    def collect(
        self, request: SegmentRequest, snapshot: PolicySnapshot
    ) -> tuple[SegmentReport, Segment]:
        """Collect one segment, as `collect_together` does."""
        return collect_together([self], [request], snapshot)[0]

    def begin(self, rebuild: Rebuild | None, log: EnvLog) -> list[Incident]:
        """Start the episodes, or restore those of `rebuild`; set `obs` to their current observations.

        Return the environments that could not be restored as incidents.
        """
        self.obs = np.empty(self.envs.num_envs, self.envs.obs)
        if rebuild is None:
            self.envs.start(self.obs, log)
            return []
        incidents = self.envs.restore(rebuild.carry, rebuild.actions, self.obs, log)
        self._discounted_returns = rebuild.carry.discounted_returns.copy()
        self.memory = copy(rebuild.carry.memory)
        # environments that could not be restored: they start new episodes
        abandoned = [incident.env for incident in incidents if incident.env is not None]
        self._discounted_returns[abandoned] = 0.0
        if self.memory is not None:
            self.memory[abandoned] = 0.0
        return incidents

    def finish(self, rollout: Rollout, s: int) -> tuple[SegmentReport, Segment]:
        """Return report and segment of this sampler, at place `s` of `rollout`; store the state for the next one."""
        segment = rollout.segment(s)
        request = rollout.requests[s]
        log = rollout.logs[s]
        self.obs = rollout.obs[s, -1].copy()
        if rollout.memory is not None:
            self.memory = rollout.memory.states_before[s, -1].copy()
        statistics = self._next_statistics(segment, rollout.snapshot.obs_scale)
        self.envs.check(rollout.obs[s], log, first=request.index == 0)
        open_episodes = self.envs.open_episodes(log)
        carry = SamplerCarry(
            discounted_returns=self._discounted_returns.copy(),
            memory=copy(self.memory),
            **open_episodes,
        )
        episodes = log.episodes
        for exploration in self.explorations:
            episodes = self._marked(exploration, episodes, request.index)
        open_actions = [
            _last_actions(segment, env, self.num_steps, length)
            for env, length in enumerate(carry.episode_lengths)
        ]
        ended_actions = [
            _last_actions(segment, episode.env, episode.end, episode.length) for episode in episodes
        ]
        report = SegmentReport(
            sampler_id=self.sampler_id,
            index=request.index,
            policy_version=rollout.snapshot.version,
            steps=int(segment.valid.sum()),
            carry=carry,
            open_actions=tuple(open_actions),
            episodes=tuple(episodes),
            ended_actions=tuple(ended_actions),
            statistics=statistics,
            incidents=tuple(log.incidents),
            env_s=log.seconds,
            info=log.info,
        )
        return report, segment

    def _marked(
        self, exploration: Exploration, episodes: Sequence[Episode], index: int
    ) -> list[Episode]:
        """Return the episodes that ended in segment `index`; `explored` is set where an exploration covers them."""
        marked = []
        for episode in episodes:
            segments = episode.segments(index, self.num_steps)
            explored = exploration.covers_episode(self.sampler_id, episode, segments)
            marked.append(replace(episode, explored=True) if explored else episode)
        return marked

    def _next_statistics(self, segment: Segment, scale: ObsScale | None) -> Statistics:
        """Return moments for the normalizers; move the returns R <- gamma R + r on to the end of the segment.

        Rows that are not transitions are not counted, and reset R. Source: detail 30; OpenAI baselines' VecNormalize.
        """
        valid = segment.valid
        obs = None
        if scale is not None:
            obs = Moments.of(normalized_part(segment.obs[valid], scale.names))
        if not self.ppo.norm_reward:
            return Statistics(obs)
        rewards = np.where(valid, shaped_rewards(segment.rewards, self.ppo), 0.0)
        continues = ~(segment.terminated | segment.truncated) & valid
        returns = np.empty(rewards.shape)
        for t in range(len(returns)):
            returns[t] = self.ppo.gamma * self._discounted_returns + rewards[t]
            self._discounted_returns = returns[t] * continues[t]
        return Statistics(obs, Moments.of(returns[valid]))


def _last_actions(segment: Segment, env: int, end: int, length: int) -> np.ndarray:
    """Return the actions in this segment of an episode that has `length` steps up to `end`."""
    start = max(0, end - length)
    return segment.actions[start:end, env].copy()


class _Memory:
    """States of the policy's memory while S samplers collect."""

    def __init__(self, samplers: Sequence[PPOSampler]) -> None:
        """Begin with the states that the samplers have."""
        start = np.stack([cast("np.ndarray", sampler.memory) for sampler in samplers])
        num_steps = samplers[0].num_steps
        shape = (len(samplers), num_steps + 1, *start.shape[1:])
        self.states_before = np.empty(shape, start.dtype)
        """[S, T + 1, E, n] before each step, and after the last; zero where an episode starts."""
        self.states_before[:, 0] = start
        self.states_after = np.empty_like(self.states_before[:, :-1])
        """[S, T, E, n] after each step, also where it ended the episode."""

    def keep(self, t: int, states: np.ndarray, done: np.ndarray) -> None:
        """Keep the `states` after step `t`; reset those whose episode is `done`."""
        states_after = self.states_after[:, t]
        states_after[...] = states
        following = self.states_before[:, t + 1]
        following[...] = states_after
        following[done] = 0.0


class Rollout:
    """Segments of S samplers while they are collected: arrays [S, T, E, ...], and the loop over T."""

    def __init__(
        self,
        samplers: Sequence[PPOSampler],
        requests: Sequence[SegmentRequest],
        snapshot: PolicySnapshot,
    ) -> None:
        first = samplers[0]
        shape = (len(samplers), first.num_steps, first.envs.num_envs)
        self.requests = requests
        self.snapshot = snapshot
        self.agent = first.agent
        self.samplers = samplers
        self.heads = np.empty(shape, first.head_dtype)
        self._columns = {name: np.empty(shape, dtype) for name, dtype in first.dtypes.items()}
        self._columns["next_values"].fill(0.0)
        self._columns["valid"].fill(True)
        self.logs: list[EnvLog] = []
        self.obs = np.empty((shape[0], first.num_steps + 1, shape[2]), first.envs.obs)
        noise = []
        for s, (sampler, request) in enumerate(zip(samplers, requests, strict=True)):
            log = EnvLog(request.index, self._columns["actions"][s], snapshot.env_options)
            if request.fatal:
                sampler.envs.avoid(request.fatal)
            if request.rebuild is not None or sampler.obs is None:
                incidents = sampler.begin(request.rebuild, log)
                # before the faults that `begin` has added to the log
                log.incidents[:0] = incidents
            self.logs.append(log)
            self.obs[s, 0] = sampler.obs
            noise.append(sampler.noise(request.index, first.num_steps))
        self._noise = np.stack(noise)
        self.agent.load(snapshot)
        self._act: Act = self.agent.act
        for exploration in first.explorations:
            self._act = exploration.act_in(self) or self._act
        self.memory = None if first.memory is None else _Memory(samplers)

    def run(self) -> None:
        """Take T steps of all environments: all samplers act at once, then each steps its environments."""
        columns = self._columns
        is_alone = len(self.samplers) == 1

        def by_step(array: np.ndarray) -> np.ndarray:
            """Return [S, T, ...] as [T, S, ...]; as [T, ...] for a single sampler, because that is faster."""
            if is_alone:
                return array[0]
            return array.swapaxes(0, 1)

        obs = by_step(self.obs)
        noise = by_step(self._noise)
        heads = by_step(self.heads)
        actions = by_step(columns["actions"])
        values = by_step(columns["values"])
        memory = self.memory
        states = None if memory is None else by_step(memory.states_before)
        stepping = [
            (sampler.envs.step, self._rows(s), self.logs[s])
            for s, sampler in enumerate(self.samplers)
        ]
        act = self._act
        for t in range(len(values)):
            state = None if states is None else states[t]
            actions[t], outputs = act(obs[t], noise[t], state)
            heads[t] = outputs.head
            values[t] = outputs.values
            for step, rows, log in stepping:
                step(next(rows), log)
            if memory is not None:
                done = columns["terminated"][:, t] | columns["truncated"][:, t]
                memory.keep(t, cast("np.ndarray", outputs.state), done)
        if self.agent.estimates_values:
            self._estimate_next_values()

    def _rows(self, s: int) -> Iterator[StepRows]:
        """Yield the rows of each step of the sampler at place `s`."""
        columns = self._columns
        return zip(
            columns["actions"][s],
            self.obs[s, 1:],
            columns["rewards"][s],
            columns["terminated"][s],
            columns["truncated"][s],
            columns["valid"][s],
            strict=True,
        )

    def _estimate_next_values(self) -> None:
        """Estimate the values of the true successors of all steps."""
        next_values = self._columns["next_values"]
        next_values[:, :-1] = self._columns["values"][:, 1:]
        last_states = None if self.memory is None else self.memory.states_before[:, -1]
        next_values[:, -1] = self.agent.outputs(self.obs[:, -1], last_states).values
        for s, log in enumerate(self.logs):
            if log.time_limits:
                self._bootstrap(s, log.time_limits)

    def _bootstrap(self, s: int, limits: list[TimeLimit]) -> None:
        """Estimate the values of the final observations of the sampler at place `s`, at time limits."""
        final_obs = np.stack([limit.obs for limit in limits])
        steps = [limit.step for limit in limits]
        envs = [limit.env for limit in limits]
        final_states = None if self.memory is None else self.memory.states_after[s, steps, envs]
        outputs = self.agent.outputs(final_obs, final_states)
        self._columns["next_values"][s, steps, envs] = outputs.values

    def segment(self, s: int) -> Segment:
        obs, masks = self.agent.split(self.obs[s, :-1])
        columns = {name: column[s] for name, column in self._columns.items()}
        logprobs = self.agent.distribution.log_prob(self.heads[s], columns["actions"])
        segment = Segment(obs=obs, logprobs=logprobs, masks=masks, **columns)
        for add in self.samplers[s].additions:
            segment = add(self, s, segment)
        return segment


Addition = Callable[[Rollout, int, Segment], Segment]
"""Returns a segment with another part, given its rollout, and the place `s` of its sampler in that."""
Act = Callable[[np.ndarray, np.ndarray, np.ndarray | None], tuple[np.ndarray, NetworkOutputs]]
"""Samples actions: see `PPOAgent.act`. The head that it returns is that of the actions."""


class Exploration(ABC):
    """Segments in which the policy does not act as it is. They follow from the sampler and their index alone."""

    @abstractmethod
    def act_in(self, rollout: Rollout) -> Act | None:
        """Return what acts in the segments of `rollout`; None if the policy does."""

    @abstractmethod
    def covers_episode(self, sampler_id: int, episode: Episode, segments: range) -> bool:
        """Return whether the return of an episode in these segments is not the policy's."""

    def added(self, rollout: Rollout, s: int, segment: Segment) -> Segment:
        """Return the segment of the sampler at place `s`, with what else is learned from it."""
        return segment


def _with_frames(rollout: Rollout, s: int, segment: Segment) -> Segment:
    """Hold each frame of stacked observations once."""
    return replace(segment, obs=frames_of(segment.obs))


def _with_states(sequence_length: int, rollout: Rollout, s: int, segment: Segment) -> Segment:
    """Add the states of the memory at the start of each sequence."""
    assert rollout.memory is not None
    return replace(segment, states=rollout.memory.states_before[s, :-1:sequence_length].copy())


def with_successors(rollout: Rollout, s: int, segment: Segment) -> Segment:
    """Add the observations that followed the rows `segment.followed`, also at time limits, and their states."""
    next_obs = rollout.obs[s, 1:].copy()
    for limit in rollout.logs[s].time_limits:
        next_obs[limit.step, limit.env] = limit.obs
    successors, _ = rollout.agent.split(next_obs[segment.followed])
    states = None
    if rollout.memory is not None:
        states = rollout.memory.states_after[s][segment.followed]
    return replace(segment, successors=successors, successor_states=states)


def collect_together(
    samplers: Sequence[PPOSampler], requests: Sequence[SegmentRequest], snapshot: PolicySnapshot
) -> list[tuple[SegmentReport, Segment]]:
    """Collect one segment from each of several samplers of a run, which act together at a third of the cost.

    Each segment has the same bits as one collected alone. Raise EnvironmentFault if an environment failed: then all
    samplers must be rebuilt.
    """
    rollout = Rollout(samplers, requests, snapshot)
    rollout.run()
    return [sampler.finish(rollout, s) for s, sampler in enumerate(samplers)]
