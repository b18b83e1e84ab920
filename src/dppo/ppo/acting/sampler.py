"""PPOSampler: collects segments from environments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass, replace
from typing import NamedTuple

import numpy as np

from dppo.config.parts import PPO
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.environments import Environments
from dppo.ppo.acting.guided import GuidedAgent, guided_agent
from dppo.ppo.acting.noise import PinkNoise
from dppo.ppo.exchange.inputs import normalized_part
from dppo.ppo.exchange.moments import Moments
from dppo.ppo.exchange.phase import ControllerPhase
from dppo.ppo.exchange.records import (
    EnvLog,
    Incident,
    PolicySnapshot,
    Rebuild,
    SamplerCarry,
    Segment,
    SegmentReport,
    SegmentRequest,
    StepRows,
)
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.exchange.stacks import frames_of
from dppo.ppo.exchange.statistics import Statistics
from dppo.ppo.learning.advantages import shaped_rewards


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
    phase: ControllerPhase | None = None
    """The first segments, in which a controller acts; None without any."""
    is_noise_pink: bool = False
    """Noise has the correlations of `PinkNoise` from step to step."""

    def __post_init__(self) -> None:
        num_envs = self.envs.num_envs
        self.obs: np.ndarray | None = None
        """[E, *O], from which the next segment starts; None: the environments must start."""
        self.memory = self.agent.start(num_envs) if self.agent.state_size else None
        """[E, S], the state of the policy's memory there."""
        learns_from_old_rows = self.ppo.algo == "sac" or self.ppo.reuse > 1
        self.keep_successors = self.ppo.recompute_advantages or learns_from_old_rows
        self._discounted_returns = np.zeros(num_envs)
        self._pink_noise: PinkNoise | None = None
        if self.is_noise_pink:
            shape = (self.num_steps, num_envs)
            spec = self.agent.spec
            self._pink_noise = PinkNoise(self.noise, spec.distribution, shape, spec.dtype)

    def draw_noise(self, index: int) -> np.ndarray:
        """Return the exploration noise of a segment, [T, E, n]."""
        if self._pink_noise is not None:
            return self._pink_noise.of_segment(index)
        generator = self.noise(index)
        dtype = self.agent.spec.dtype
        return self.agent.distribution.noise(generator, self.num_steps, self.envs.num_envs, dtype)

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

    def finish(self, rollout: _Rollout, number: int) -> tuple[SegmentReport, Segment]:
        """Return report and segment of this sampler, the `number`-th of `rollout`; store the state for the next one."""
        segment = rollout.segment(number, self)
        request = rollout.requests[number]
        log = rollout.logs[number]
        self.obs = rollout.obs[number, -1].copy()
        if rollout.states is not None:
            self.memory = rollout.states[number, -1].copy()
        statistics = self._statistics(segment, rollout.snapshot.obs_scale)
        self.envs.check(rollout.obs[number], log, first=request.index == 0)
        open_episodes = self.envs.open_episodes(log)
        carry = SamplerCarry(
            discounted_returns=self._discounted_returns.copy(),
            memory=copy(self.memory),
            **open_episodes,
        )
        open_actions = [
            _last_actions(segment, env, self.num_steps, length)
            for env, length in enumerate(carry.episode_lengths)
        ]
        ended_actions = [
            _last_actions(segment, episode.env, episode.end, episode.length)
            for episode in log.episodes
        ]
        report = SegmentReport(
            sampler_id=self.sampler_id,
            index=request.index,
            policy_version=rollout.snapshot.version,
            steps=int(segment.valid.sum()),
            carry=carry,
            open_actions=tuple(open_actions),
            episodes=tuple(log.episodes),
            ended_actions=tuple(ended_actions),
            statistics=statistics,
            incidents=(*rollout.incidents[number], *log.incidents),
            env_s=log.seconds,
            info=log.info,
        )
        return report, segment

    def _statistics(self, segment: Segment, scale: ObsScale | None) -> Statistics:
        """Return moments for the normalizers; of returns R <- gamma R + r, which run on from segment to segment.

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


class _TimeLimit(NamedTuple):
    """The end of an episode that was truncated and did not terminate."""

    sampler: int
    step: int
    env: int
    obs: np.ndarray
    """The final observation."""
    state: np.ndarray | None
    """The state of the memory after the last step."""


class _Rollout:
    """Segments of S samplers while they are collected: arrays [S, T, E, ...], and the loop over T."""

    def __init__(
        self,
        samplers: Sequence[PPOSampler],
        requests: Sequence[SegmentRequest],
        snapshot: PolicySnapshot,
    ) -> None:
        first = samplers[0]
        distribution = first.agent.distribution
        dtype = first.agent.spec.dtype
        num_steps = first.num_steps
        num_envs = first.envs.num_envs
        shape = (len(samplers), num_steps, num_envs)
        self.requests = requests
        self.snapshot = snapshot
        self._samplers = samplers
        self._agent = first.agent
        self._guided = _guided(samplers, snapshot)
        self._heads = np.empty((*shape, distribution.head_size), dtype)
        self._columns = {
            "actions": np.empty(
                (*shape, *distribution.action_shape),
                distribution.action_dtype(dtype),
            ),
            "values": np.empty(shape, dtype),
            "next_values": np.zeros(shape, dtype),
            "rewards": np.empty(shape),
            "terminated": np.empty(shape, bool),
            "truncated": np.empty(shape, bool),
            "valid": np.ones(shape, bool),
        }
        self.logs: list[EnvLog] = []
        self.incidents: list[list[Incident]] = []
        for sampler, request, actions in zip(
            samplers, requests, self._columns["actions"], strict=True
        ):
            log = EnvLog(request.index, actions, snapshot.env_options)
            incidents: list[Incident] = []
            if request.rebuild is not None or sampler.obs is None:
                incidents = sampler.begin(request.rebuild, log)
            self.logs.append(log)
            self.incidents.append(incidents)
        self._agent.load(snapshot)
        self._noise = self._drawn_noise()
        self.obs = np.empty((len(samplers), num_steps + 1, num_envs), first.envs.obs)
        self.states: np.ndarray | None = None
        """States of the memory before each step, and after the last: [S, T + 1, E, n]; zero where an episode starts."""
        if first.memory is not None:
            self.states = np.empty(
                (len(samplers), num_steps + 1, *first.memory.shape),
                first.memory.dtype,
            )
        for number, sampler in enumerate(samplers):
            self.obs[number, 0] = sampler.obs
            if self.states is not None:
                self.states[number, 0] = sampler.memory
        self._time_limits: list[_TimeLimit] = []

    def _drawn_noise(self) -> np.ndarray:
        """Return the exploration noise of all steps, [S, T, E, n]."""
        return np.stack(
            [
                sampler.draw_noise(request.index)
                for sampler, request in zip(self._samplers, self.requests, strict=True)
            ]
        )

    def run(self) -> None:
        """Take T steps of all environments: all samplers act at once, then each steps its environments."""
        columns = self._columns
        is_alone = len(self._samplers) == 1

        def by_step(array: np.ndarray) -> np.ndarray:
            """Return [S, T, ...] as [T, S, ...]; as [T, ...] for a single sampler, because that is faster."""
            return array[0] if is_alone else array.swapaxes(0, 1)

        obs = by_step(self.obs)
        noise = by_step(self._noise)
        heads = by_step(self._heads)
        actions = by_step(columns["actions"])
        values = by_step(columns["values"])
        terminated = by_step(columns["terminated"])
        truncated = by_step(columns["truncated"])
        states = None if self.states is None else by_step(self.states)
        sampler_columns = []
        for s, sampler in enumerate(self._samplers):
            chosen = iter(columns["actions"][s])
            sampler_columns.append((sampler.envs, chosen, self._rows(s), self.logs[s]))
        acting = self._agent if self._guided is None else self._guided
        for t in range(len(values)):
            state = None if states is None else states[t]
            actions[t], outputs = acting.act(obs[t], noise[t], state)
            heads[t] = outputs.head
            values[t] = outputs.values
            new_state = outputs.state
            for s, (envs, chosen, rows, log) in enumerate(sampler_columns):
                final_obs = envs.step(next(chosen), next(rows), log)
                for env, final in final_obs.items():
                    row = env if is_alone else (s, env)
                    final_state = None if new_state is None else new_state[row]
                    self._time_limits.append(_TimeLimit(s, t, env, final, final_state))
                while log.dropped:
                    columns["valid"][s, t, log.dropped.pop()] = False
            if states is not None:
                states[t + 1] = new_state
                states[t + 1, terminated[t] | truncated[t]] = 0.0
        if self._agent.estimates_values:
            self._estimate_next_values()

    def _rows(self, s: int) -> Iterator[StepRows]:
        """Yield what the environments of sampler number `s` write in each step."""
        columns = self._columns
        return zip(
            self.obs[s, 1:],
            columns["rewards"][s],
            columns["terminated"][s],
            columns["truncated"][s],
            strict=True,
        )

    def _estimate_next_values(self) -> None:
        """Estimate the values of the true successors of all steps."""
        next_values = self._columns["next_values"]
        next_values[:, :-1] = self._columns["values"][:, 1:]
        last_states = None if self.states is None else self.states[:, -1]
        next_values[:, -1] = self._agent.values(self.obs[:, -1], last_states)
        for s in range(len(self._samplers)):
            limits = [limit for limit in self._time_limits if limit.sampler == s]
            if not limits:
                continue
            final_obs = np.stack([limit.obs for limit in limits])
            final_states = None
            if self.states is not None:
                final_states = np.stack(
                    [limit.state for limit in limits if limit.state is not None]
                )
            steps = [limit.step for limit in limits]
            envs = [limit.env for limit in limits]
            next_values[s, steps, envs] = self._agent.values(final_obs, final_states)

    def segment(self, number: int, sampler: PPOSampler) -> Segment:
        obs, masks = self._agent.split(self.obs[number, :-1])
        if sampler.stack > 1:
            obs = frames_of(obs)
        states = None
        if self.states is not None:
            states = self.states[number, : -1 : sampler.sequence_length].copy()
        columns = {name: column[number] for name, column in self._columns.items()}
        heads = self._heads[number]
        distribution = self._agent.distribution
        intended = None
        if self._guided is not None:
            intended = distribution.mode(heads).copy()
        segment = Segment(
            obs=obs,
            logprobs=distribution.log_prob(heads, columns["actions"]),
            masks=masks,
            states=states,
            intended=intended,
            **columns,
        )
        if sampler.keep_successors or self._guided is not None:
            return self._with_successors(number, segment)
        return segment

    def _with_successors(self, number: int, segment: Segment) -> Segment:
        next_obs = self.obs[number, 1:].copy()
        next_states = None if self.states is None else self.states[number, 1:].copy()
        for limit in self._time_limits:
            if limit.sampler != number:
                continue
            next_obs[limit.step, limit.env] = limit.obs
            if next_states is not None:
                next_states[limit.step, limit.env] = limit.state
        successors, _ = self._agent.split(next_obs[segment.followed])
        successor_states = None if next_states is None else next_states[segment.followed]
        return replace(segment, successors=successors, successor_states=successor_states)


def _guided(samplers: Sequence[PPOSampler], snapshot: PolicySnapshot) -> GuidedAgent | None:
    """Return what acts in place of the policy; None if the policy acts."""
    phase = samplers[0].phase
    if phase is None:
        return None
    envs = [sampler.envs for sampler in samplers]
    return guided_agent(phase, samplers[0].agent, envs, snapshot)


def collect_together(
    samplers: Sequence[PPOSampler],
    requests: Sequence[SegmentRequest],
    snapshot: PolicySnapshot,
) -> list[tuple[SegmentReport, Segment]]:
    """Collect one segment from each of several samplers of a run, which act together at a third of the cost.

    Each segment has the same bits as one collected alone. Raise EnvironmentFault if an environment failed: then all
    samplers must be rebuilt.
    """
    rollout = _Rollout(samplers, requests, snapshot)
    rollout.run()
    return [sampler.finish(rollout, number) for number, sampler in enumerate(samplers)]
