"""PPOSampler: collects segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np

from dppo.config.parts import PPO
from dppo.ppo.acting.agent import PPOAgent, RecurrentStates
from dppo.ppo.acting.environments import Environments
from dppo.ppo.exchange.normalizer import Moments, ObsScale, Statistics, normalized_part
from dppo.ppo.exchange.records import (
    EnvLog,
    Incident,
    PolicySnapshot,
    Rebuild,
    SamplerCarry,
    Segment,
    SegmentReport,
    SegmentRequest,
    frames_of,
)
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
        self.memory = _copy(rebuild.carry.memory)
        for incident in incidents:
            assert incident.env is not None
            self._discounted_returns[incident.env] = 0.0  # its episode was abandoned, and a new one starts at zero
            if self.memory is not None:
                self.memory[incident.env] = 0.0
        return incidents

    def finish(self, run: _Collection, at: int) -> tuple[SegmentReport, Segment]:
        """Return report and segment of this sampler, number `at` of `run`, and keep the state for the next one."""
        segment, request, snapshot, log = run.segment(at), run.requests[at], run.snapshot, run.logs[at]
        self.obs = run.obs[at, -1].copy()
        self.memory = None if run.states is None else run.states.before[at].copy()
        measures = self.ppo.norm_reward or snapshot.obs_scale is not None
        seen = self._moments(segment, snapshot.obs_scale) if measures else Statistics()
        self.envs.check(run.obs[at], log, first=request.index == 0)
        open_episodes = self.envs.open_episodes(log)
        lengths, actions = enumerate(open_episodes["episode_lengths"]), segment.actions
        report = SegmentReport(
            sampler_id=self.sampler_id,
            index=request.index,
            policy_version=snapshot.version,
            steps=int(segment.valid.sum()),
            carry=SamplerCarry(
                discounted_returns=self._discounted_returns.copy(), memory=_copy(self.memory), **open_episodes
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
        self.requests, self.snapshot = requests, snapshot
        first = samplers[0]
        steps, envs, distribution = first.num_steps, first.envs, first.agent.distribution
        rows, dtype = (len(samplers), steps, envs.num_envs), first.agent.spec.dtype
        self._actions = np.empty((*rows, *distribution.action_shape), distribution.action_dtype(dtype))
        options = snapshot.env_options
        self.logs = [EnvLog(one.index, own, options) for one, own in zip(requests, self._actions, strict=True)]
        self.incidents = [
            sampler.begin(request.rebuild, log) if request.rebuild is not None or sampler.obs is None else []
            for sampler, request, log in zip(samplers, requests, self.logs, strict=True)
        ]
        self._keep_successors, self._stack = first.keep_successors, first.stack
        self._agent, self._envs = first.agent, [sampler.envs for sampler in samplers]
        self._agent.load(snapshot)
        streams = [sampler.noise(request.index) for sampler, request in zip(samplers, requests, strict=True)]
        self._noise = np.stack([distribution.noise(one, steps, envs.num_envs, dtype) for one in streams])
        self.obs = np.empty((len(samplers), steps + 1, envs.num_envs), envs.obs)
        for own, sampler in zip(self.obs, samplers, strict=True):
            own[0] = sampler.obs
        self._heads = np.empty((*rows, distribution.head_size), dtype)
        self._values, self._next_values = np.empty(rows, dtype), np.empty(rows, dtype)
        self._rewards = np.empty(rows)
        self._terminated, self._truncated = np.empty(rows, bool), np.empty(rows, bool)
        self._valid = np.ones(rows, bool)
        self._successors = np.empty(0, envs.obs)  # [samplers, T, E, *O] where segments hold them
        self.states = None
        if first.memory is not None:
            memories = np.stack([sampler.memory for sampler in samplers if sampler.memory is not None])
            self.states = RecurrentStates(memories, steps, first.sequence_length, keep_all=self._keep_successors)

    def go(self) -> None:
        """Take T steps of all environments: all samplers act at once, then each steps its environments."""
        agent, values, states = self._agent, self._values, self.states
        one = len(self._envs) == 1  # a single sampler needs no leading axis: faster
        arrays = self.obs, self._noise, self._actions, self._heads, values
        obs, noise, actions, heads, valued = (own[0] if one else own.swapaxes(0, 1) for own in arrays)
        rows = (self._actions, self.obs, self._rewards, self._terminated, self._truncated)
        worlds = list(zip(self._envs, *rows, self.logs, strict=True))
        cut: list[tuple[int, int, int, np.ndarray, Any]] = []
        for t in range(values.shape[1]):
            now = obs[t]
            before = None if states is None else states.enter(t)
            actions[t], (heads[t], valued[t], after) = agent.act(now, noise[t], before)
            if states is not None:
                states.act(t, after)
            for s, (envs, chosen, seen, rewards, terminated, truncated, log) in enumerate(worlds):
                final_obs = envs.step(chosen[t], seen[t + 1], rewards[t], terminated[t], truncated[t], log)
                for env, final in final_obs.items():
                    cut.append((s, t, env, final, None if states is None else states.after[s, env]))
                while log.dropped:
                    self._valid[s, t, log.dropped.pop()] = False
            if states is not None:
                states.leave(self._terminated[:, t] | self._truncated[:, t])
        self._look_ahead(cut)

    def _look_ahead(self, cut: list[tuple[int, int, int, np.ndarray, Any]]) -> None:
        """Estimate the values of the true successors of all steps, and keep these where segments hold them.

        Args:
            cut: sampler, step and environment of each time limit; the final observation; the recurrent state after it.
        """
        agent, states = self._agent, self.states
        if self._keep_successors:
            self._successors = self.obs[:, 1:].copy()
            for s, t, env, final, _ in cut:
                self._successors[s, t, env] = final
        self._next_values[:, :-1] = self._values[:, 1:]
        self._next_values[:, -1] = agent.values(self.obs[:, -1], None if states is None else states.before)
        for s in sorted({one[0] for one in cut}):
            times, which, finals, ends = zip(*(one[1:] for one in cut if one[0] == s), strict=True)
            state = None if states is None else np.stack(ends)
            self._next_values[s, times, which] = agent.values(np.stack(finals), state)

    def segment(self, s: int) -> Segment:
        """Return the segment of sampler number `s`."""
        actions, agent, states = self._actions[s], self._agent, self.states
        seen, masks = agent.split(self.obs[s, :-1])
        segment = Segment(
            obs=seen if self._stack == 1 else frames_of(seen),
            actions=actions,
            logprobs=agent.distribution.log_prob(self._heads[s], actions),
            values=self._values[s],
            next_values=self._next_values[s],
            rewards=self._rewards[s],
            terminated=self._terminated[s],
            truncated=self._truncated[s],
            valid=self._valid[s],
            masks=masks,
            states=None if states is None else states.of_sequences[s],
        )
        return self._with_successors(s, segment) if self._keep_successors else segment

    def _with_successors(self, s: int, segment: Segment) -> Segment:
        followed, states = segment.followed, self.states
        successors, _ = self._agent.split(self._successors[s][followed])
        after = None if states is None else states.after_steps[s][followed]
        return replace(segment, successors=successors, successor_states=after)


def collect_together(
    samplers: Sequence[PPOSampler], requests: Sequence[SegmentRequest], snapshot: PolicySnapshot
) -> list[tuple[SegmentReport, Segment]]:
    """Collect one segment from each of several samplers of a run, which act together at a third of the cost.

    Each segment has the same bits as one collected alone. Only the state of the environments is carried over.

    Raise EnvironmentFault if an environment failed. All samplers must be rebuilt.
    """
    run = _Collection(samplers, requests, snapshot)
    run.go()
    return [sampler.finish(run, at) for at, sampler in enumerate(samplers)]


def _copy(array: np.ndarray | None) -> np.ndarray | None:
    return None if array is None else array.copy()
