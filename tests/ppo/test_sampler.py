"""PPOSampler on environments that reveal any off-by-one, and the state of its memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import assert_same_bytes, make_config, random_weights, sampler_of, telling_snapshot
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from numpy.testing import assert_allclose, assert_array_equal
from updates import experience_of
from worlds.faulty import DriftingSimulator
from worlds.memory import Recalls
from worlds.simple import Counting

from dppo import streams
from dppo.config import PPO
from dppo.engine.ledger import ReplayLedger
from dppo.envs.spaces import describe_spaces
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.acting.sampler import PPOSampler
from dppo.ppo.exchange.records import (
    PolicySnapshot,
    Rebuild,
    Segment,
    SegmentReport,
    SegmentRequest,
)
from dppo.ppo.exchange.scales import Statistics
from dppo.ppo.learning.batch import make_batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.stages import CurrentNetwork, estimate_again
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec
from dppo.streams import Stream

Ends = Sequence[dict[str, int]]
Collected = list[tuple[SegmentReport, Segment]]


def collect_counting(*, num_steps: int, segments: int = 1, ends: Ends = ({},)) -> Collected:
    """Return segments of Counting under a uniform policy with values 100 + 10 * obs."""
    sampler, spec = sampler_of([Counting(**end) for end in ends], num_steps=num_steps)
    return [
        sampler.collect(SegmentRequest(0, k), telling_snapshot(spec, k)) for k in range(segments)
    ]


def column(array: np.ndarray, env: int = 0) -> list[Any]:
    result: list[Any] = array[:, env].tolist()
    return result


def test_environments_of_one_sampler_keep_their_own_episodes() -> None:
    ends = [{}, {"truncate_after": 2}, {"terminate_after": 3}, {"truncate_after": 5}]
    report, segment = collect_counting(num_steps=5, ends=ends)[0]
    counts = [[0, 1, 2, 3, 4], [0, 1, 0, 1, 0], [0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert [column(segment.obs[..., 0], env) for env in range(4)] == counts
    assert column(segment.values, 1) == [100, 110, 100, 110, 100]
    # the last one is of the state after the segment
    assert column(segment.next_values, 0) == [110, 120, 130, 140, 150]
    assert column(segment.next_values, 1) == [110, 120, 110, 120, 110]
    # 150, not 100 as in the new episode
    assert column(segment.next_values, 3) == [110, 120, 130, 140, 150]
    assert np.argwhere(segment.truncated.T).tolist() == [[1, 1], [1, 3], [3, 4]]
    assert np.argwhere(segment.terminated.T).tolist() == [[2, 2]]
    assert np.isfinite(segment.next_values).all()  # unused where terminated, but never nan
    assert_array_equal(segment.rewards, segment.actions)
    assert_allclose(segment.logprobs, np.log(1 / 4))
    assert segment.valid.all()
    assert segment.successors is None  # only segments whose advantages are recomputed hold them
    assert (report.sampler_id, report.index, report.policy_version, report.steps) == (0, 0, 0, 20)
    assert report.carry.episodes.tolist() == [0, 2, 1, 1]
    assert report.carry.episode_lengths.tolist() == [5, 1, 2, 0]
    assert [len(actions) for actions in report.open_actions] == [5, 1, 2, 0]
    for env, actions in enumerate(report.open_actions):
        assert_array_equal(actions, segment.actions[5 - len(actions) :, env])
    assert [(episode.env, episode.index) for episode in report.episodes] == [
        (1, 0),
        (2, 0),
        (1, 1),
        (3, 0),
    ]


@pytest.mark.proves("PPOSampler._statistics")
@pytest.mark.parametrize("end", [{"truncate_after": 6}, {"terminate_after": 3}, {}], ids=str)
def test_discounted_returns_run_through_segments_and_start_again_with_each_episode(
    end: dict[str, int],
) -> None:
    running = 0.0
    steps = 0
    for report, segment in collect_counting(num_steps=4, segments=3, ends=[end]):
        samples = []
        for reward in column(segment.rewards):
            running = 0.9 * running + reward
            steps = steps + 1
            samples.append(running)
            if steps in end.values():
                running = 0.0
                steps = 0
        assert report.carry.discounted_returns.tolist() == pytest.approx([running])
        result = report.statistics.returns
        assert result is not None
        assert result.count == 4
        assert_allclose(result.mean, np.mean(samples))
        assert_allclose(result.m2, 4 * np.var(samples))


def test_nothing_is_reported_for_normalizers_that_are_off() -> None:
    sampler, spec = sampler_of([Counting()], num_steps=3, track=False)
    report, _ = sampler.collect(SegmentRequest(0, 0), telling_snapshot(spec))
    assert report.statistics == Statistics()


def test_a_segment_is_not_modified_later() -> None:
    sampler, spec = sampler_of([Counting(truncate_after=7)], num_steps=10)
    policies = [PolicySnapshot(k, random_weights(spec, seed=k)) for k in range(2)]
    first = sampler.collect(SegmentRequest(0, 0), policies[0])
    kept = copy.deepcopy(first)
    _, second = sampler.collect(SegmentRequest(0, 1), policies[1])
    assert_same_bytes(first, kept)
    for field in dataclasses.fields(Segment):
        arrays = (getattr(first[1], field.name), getattr(second, field.name))
        assert not np.shares_memory(*arrays), field.name


@pytest.mark.parametrize("replay", [True, False])
def test_an_episode_that_cannot_be_replayed_is_abandoned_and_reported(replay: bool) -> None:
    def sampler() -> tuple[PPOSampler, NetworkSpec]:
        return sampler_of([DriftingSimulator(CartPoleEnv()), CartPoleEnv()], num_steps=5)

    first, spec = sampler()
    ledger = ReplayLedger(1, replay=replay)
    policy = PolicySnapshot(0, np.zeros(spec.num_parameters))
    report, _ = first.collect(SegmentRequest(0, 0), policy)
    assert report.carry.episodes.tolist() == [0, 0]
    ledger.record(report)
    request = SegmentRequest(0, 1, ledger.rebuild(0, 1))
    after, segment = sampler()[0].collect(request, policy)
    kind = "replay_mismatch" if replay else "episode_abandoned"
    lost = [0] if replay else [0, 1]
    incidents = [(element.kind, element.env, element.lost_steps) for element in after.incidents]
    assert incidents == [(kind, env, 5) for env in lost]
    words = "sampler 0 (Test-v0), env 0: abandoned episode 0 after 5 steps"
    assert after.incidents[0].message.startswith(words)
    obs, _ = CartPoleEnv().reset(seed=streams.integer(1, Stream.EPISODES, 0, 0, 1))
    assert_array_equal(segment.obs[0, 0], obs)
    assert after.carry.episodes.tolist() == ([1, 0] if replay else [1, 1])
    assert after.carry.episode_lengths.tolist() == ([5, 10] if replay else [5, 5])
    returns = sum(0.9 ** (4 - t) * segment.rewards[t, 0] for t in range(5))
    assert after.carry.discounted_returns[0] == pytest.approx(returns)
    ledger.record(after)
    rebuild = ledger.rebuild(0, 2)
    assert rebuild is not None
    assert [len(actions) for actions in rebuild.actions] == ([5, 10] if replay else [])


STEPS = 24
LENGTH = 4
memories = pytest.mark.parametrize("memory", ["gru", "lstm"])


def memory_spec(memory: str) -> NetworkSpec:
    small = {"memory": memory, "memory_size": 5, "hidden_sizes": (6,), "dtype": "float64"}
    return choose_network(
        make_config({"env_id": "Test-v0", **small}).network, describe_spaces(Recalls())
    ).spec


def memory_sampler(memory: str, *, sampler_id: int = 0, **options: Any) -> PPOSampler:
    agent = PPOAgent(memory_spec(memory))
    sizes: dict[str, Any] = {"num_steps": STEPS, "sequence_length": LENGTH, "track": False}
    return sampler_of(
        [Recalls(), Recalls()], sampler_id=sampler_id, agent=agent, **sizes, **options
    )[0]


def snapshot_of(spec: NetworkSpec, version: int = 0) -> PolicySnapshot:
    return PolicySnapshot(version, random_weights(spec, seed=version))


def collected(memory: str, segments: int, **options: Any) -> list[tuple[SegmentReport, Segment]]:
    sampler = memory_sampler(memory, **options)
    spec = memory_spec(memory)
    return [sampler.collect(SegmentRequest(0, k), snapshot_of(spec, k)) for k in range(segments)]


@memories
def test_values_and_states_are_those_of_each_environment_step_by_step(memory: str) -> None:
    """Compare two segments with a loop over steps and environments that knows nothing of segments."""
    spec = memory_spec(memory)
    agent = PPOAgent(spec)
    states = np.zeros((2, spec.state_size))
    ends = {"terminated": 0, "truncated": 0, "at the start of a sequence": 0}
    for k, (report, segment) in enumerate(collected(memory, 2)):
        agent.load(snapshot_of(spec, k))
        assert segment.states is not None
        for env in range(2):
            state = states[env]
            for t in range(STEPS):
                if t % LENGTH == 0:
                    assert_allclose(segment.states[t // LENGTH, env], state, rtol=1e-9, atol=1e-14)
                    assert bool(segment.states[t // LENGTH, env].any()) == bool(state.any())
                    ends["at the start of a sequence"] += not state.any()
                _, decided = agent.decide(segment.obs[t, env][None], state[None])
                assert_allclose(segment.values[t, env], decided.values[0], rtol=1e-9)
                assert decided.state is not None
                after = decided.state[0]
                if segment.terminated[t, env]:
                    ends["terminated"] += 1
                    state = np.zeros_like(after)
                    continue
                follows = segment.obs[t + 1, env] if t + 1 < STEPS else None
                if segment.truncated[t, env]:
                    ends["truncated"] += 1
                    follows = final_obs(segment.obs[t, env])
                if follows is not None:
                    value = agent.values(follows[None].astype(np.float32), after[None])[0]
                    assert_allclose(segment.next_values[t, env], value, rtol=1e-9)
                state = np.zeros_like(after) if segment.truncated[t, env] else after
            assert report.carry.memory is not None
            assert_allclose(report.carry.memory[env], state, rtol=1e-9, atol=1e-14)
            states[env] = state
    assert min(ends.values()) >= 2, ends


def final_obs(before: np.ndarray) -> np.ndarray:
    """Return the observation that follows `before` where the episode ends."""
    return np.array([0.0, before[1] + 1 / 8])


@memories
def test_the_last_rows_are_valued_with_the_state_of_their_moment(memory: str) -> None:
    """The value after a segment is that of the first row of the next one, under the same weights."""
    sampler = memory_sampler(memory)
    policy = snapshot_of(memory_spec(memory))
    (_, earlier), (_, later) = (sampler.collect(SegmentRequest(0, k), policy) for k in range(2))
    goes_on = ~(earlier.terminated | earlier.truncated)[-1]
    assert goes_on.any()
    assert_array_equal(earlier.next_values[-1][goes_on], later.values[0][goes_on])


def test_an_abandoned_episode_starts_from_zero() -> None:
    ((report, _),) = collected("gru", 1)
    assert report.carry.memory is not None
    carry = replace(report.carry, memory=np.full_like(report.carry.memory, 9.0))
    request = SegmentRequest(0, 1, Rebuild(carry, ()))
    after, segment = memory_sampler("gru").collect(request, snapshot_of(memory_spec("gru")))
    assert len(after.incidents) == 2
    assert segment.states is not None
    assert not segment.states[0].any()


@memories
def test_advantages_are_the_same_when_recomputed_with_the_same_weights(memory: str) -> None:
    """Successors are valued from the states that the segment holds for them."""
    spec = memory_spec(memory)
    ((_, segment),) = collected(memory, 1, recompute_advantages=True)
    model = PPOModel(spec, 1)
    with torch.no_grad():
        model.parameters.weights.copy_(torch.from_numpy(random_weights(spec)))
    ppo = PPO(gamma=0.9, gae_lambda=0.8)
    batch = make_batch([segment], None, None, ppo, LENGTH)
    for rows in (LENGTH, 10, 1000):
        again = estimate_again(
            batch, CurrentNetwork(model, rows, None), experience_of([segment]), ppo
        )
        assert_allclose(again.advantages, batch.advantages, rtol=1e-10, atol=1e-12)
        assert_allclose(again.returns, batch.returns, rtol=1e-10, atol=1e-12)
