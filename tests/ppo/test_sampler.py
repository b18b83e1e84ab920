"""PPOSampler on environments that reveal any off-by-one: observations count steps, rewards are actions."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from builders import assert_same_bytes, random_weights, sampler_of, telling_snapshot
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from worlds.faulty import DriftingSimulator
from worlds.simple import Counting

from dppo import streams
from dppo.engine.ledger import ReplayLedger
from dppo.ppo.acting.sampler import PPOSampler
from dppo.ppo.exchange.records import PolicySnapshot, Segment, SegmentReport, SegmentRequest
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
    np.testing.assert_array_equal(segment.rewards, segment.actions)
    np.testing.assert_allclose(segment.logprobs, np.log(1 / 4))
    assert segment.valid.all()
    assert segment.successors is None  # only segments whose advantages are recomputed hold them
    assert (report.sampler_id, report.index, report.policy_version, report.steps) == (0, 0, 0, 20)
    assert report.carry.episodes.tolist() == [0, 2, 1, 1]
    assert report.carry.episode_lengths.tolist() == [5, 1, 2, 0]
    assert [len(actions) for actions in report.open_actions] == [5, 1, 2, 0]
    for env, actions in enumerate(report.open_actions):
        np.testing.assert_array_equal(actions, segment.actions[5 - len(actions) :, env])
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
        np.testing.assert_allclose(result.mean, np.mean(samples))
        np.testing.assert_allclose(result.m2, 4 * np.var(samples))


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
    np.testing.assert_array_equal(segment.obs[0, 0], obs)
    assert after.carry.episodes.tolist() == ([1, 0] if replay else [1, 1])
    assert after.carry.episode_lengths.tolist() == ([5, 10] if replay else [5, 5])
    returns = sum(0.9 ** (4 - t) * segment.rewards[t, 0] for t in range(5))
    assert after.carry.discounted_returns[0] == pytest.approx(returns)
    ledger.record(after)
    rebuild = ledger.rebuild(0, 2)
    assert rebuild is not None
    assert [len(actions) for actions in rebuild.actions] == ([5, 10] if replay else [])
