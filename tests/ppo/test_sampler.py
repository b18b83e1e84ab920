"""PPOSampler on environments that reveal any off-by-one: observations count steps, rewards are actions."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from builders import assert_same_bytes, random_weights, sampler_of, telling_snapshot
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.wrappers import TimeLimit
from worlds.faulty import DriftingSimulator
from worlds.simple import Counting, PointMass

from dppo import streams
from dppo.engine.ledger import ReplayLedger
from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.records import (
    Episode,
    PolicySnapshot,
    Segment,
    SegmentReport,
    SegmentRequest,
)
from dppo.ppo.exchange.scales import Moments, ObsScale
from dppo.streams import Stream

Ends = Sequence[dict[str, int]]
Collected = list[tuple[SegmentReport, Segment]]
MakeEnvs = Callable[[], Sequence[gym.Env[Any, Any]]]


def collect_counting(*, num_steps: int, segments: int = 1, ends: Ends = ({},)) -> Collected:
    """Return segments of Counting under a uniform policy with values 100 + 10 * obs."""
    sampler, spec = sampler_of([Counting(**end) for end in ends], num_steps=num_steps)
    return [
        sampler.collect(SegmentRequest(0, k), telling_snapshot(spec, k)) for k in range(segments)
    ]


def column(array: np.ndarray, env: int = 0) -> list[Any]:
    result: list[Any] = array[:, env].tolist()
    return result


def test_rows_are_aligned_within_an_episode() -> None:
    report, segment = collect_counting(num_steps=5)[0]
    assert column(segment.obs[..., 0]) == [0, 1, 2, 3, 4]
    assert column(segment.values) == [100, 110, 120, 130, 140]
    # the last one is of the state after the segment
    assert column(segment.next_values) == [110, 120, 130, 140, 150]
    assert column(segment.rewards) == column(segment.actions)
    assert not segment.terminated.any()
    assert not segment.truncated.any()
    assert segment.valid.all()
    assert segment.successors is None  # only segments whose advantages are recomputed hold them
    np.testing.assert_allclose(segment.logprobs, np.log(1 / 4))
    assert (report.sampler_id, report.index, report.policy_version, report.steps) == (0, 0, 0, 5)


def test_actions_are_drawn_from_the_stream_of_their_segment() -> None:
    for index, (_, segment) in enumerate(
        collect_counting(num_steps=40, segments=2, ends=({}, {}, {}))
    ):
        noise = streams.generator(1, Stream.ACTIONS, 0, index).gumbel(size=(40, 3, 4))
        np.testing.assert_array_equal(segment.actions, noise.argmax(axis=-1))
        assert len(np.unique(segment.actions)) == 4


def test_both_flags_in_one_step_are_kept() -> None:
    report, segment = collect_counting(
        num_steps=4, ends=[{"terminate_after": 2, "truncate_after": 2}]
    )[0]
    assert column(segment.terminated) == column(segment.truncated) == [False, True, False, True]
    assert [episode.length for episode in report.episodes] == [2, 2]


@pytest.mark.parametrize("end", ["terminate_after", "truncate_after"])
def test_an_episode_that_ends_on_the_last_row(end: str) -> None:
    (report, first), (after, second) = collect_counting(num_steps=3, segments=2, ends=[{end: 3}])
    flags = first.terminated if end == "terminate_after" else first.truncated
    assert column(flags) == [False, False, True]
    if end == "truncate_after":
        assert column(first.next_values) == [110, 120, 130]
    assert [len(actions) for actions in report.open_actions] == [0]
    assert report.open_actions[0].dtype == np.int64
    assert report.carry.episodes.tolist() == [1]
    assert report.carry.episode_lengths.tolist() == [0]
    assert report.carry.discounted_returns.tolist() == [0]
    assert [episode.index for episode in report.episodes] == [0]
    assert column(second.obs[..., 0]) == [0, 1, 2]
    assert [episode.index for episode in after.episodes] == [1]


def test_environments_of_one_sampler_keep_their_own_episodes() -> None:
    ends = [{}, {"truncate_after": 2}, {"terminate_after": 3}, {"truncate_after": 5}]
    report, segment = collect_counting(num_steps=5, ends=ends)[0]
    counts = [[0, 1, 2, 3, 4], [0, 1, 0, 1, 0], [0, 1, 2, 0, 1], [0, 1, 2, 3, 4]]
    assert [column(segment.obs[..., 0], env) for env in range(4)] == counts
    assert column(segment.next_values, 1) == [110, 120, 110, 120, 110]
    # 150, not 100 as in the new episode
    assert column(segment.next_values, 3) == [110, 120, 130, 140, 150]
    assert np.argwhere(segment.truncated.T).tolist() == [[1, 1], [1, 3], [3, 4]]
    assert np.argwhere(segment.terminated.T).tolist() == [[2, 2]]
    assert np.isfinite(segment.next_values).all()  # unused where terminated, but never nan
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


def test_episodes_that_span_segments_are_reported_once_with_all_their_rewards() -> None:
    collected = collect_counting(num_steps=4, segments=3, ends=[{"truncate_after": 6}])
    rewards = [reward for _, segment in collected for reward in column(segment.rewards)]
    reported = [episode for report, _ in collected for episode in report.episodes]
    assert reported == [
        Episode(0, 0, sum(rewards[:6]), 6, None),
        Episode(0, 1, sum(rewards[6:]), 6, None),
    ]
    assert [len(report.episodes) for report, _ in collected] == [0, 1, 1]
    assert collected[0][0].carry.episode_returns.tolist() == [sum(rewards[:4])]


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


def test_discounted_returns_of_all_environments_are_samples() -> None:
    no_ends: list[list[dict[str, int]]] = [[{}], [{}, {}, {}]]
    alone = [collect_counting(num_steps=5, ends=ends)[0][0].statistics.returns for ends in no_ends]
    assert [element.count for element in alone if element is not None] == [5, 15]


def test_observations_are_reported_as_moments_of_the_raw_rows() -> None:
    sampler, spec = sampler_of([Counting(truncate_after=4), Counting()], num_steps=6)
    snapshot = PolicySnapshot(
        0, telling_snapshot(spec).weights, ObsScale(*Moments.empty((1,)).mean_and_std())
    )
    report, segment = sampler.collect(SegmentRequest(0, 0), snapshot)
    assert_same_bytes(report.statistics.obs, Moments.of(segment.obs.reshape(-1, 1)))


def test_nothing_is_reported_for_normalizers_that_are_off() -> None:
    sampler, spec = sampler_of([Counting()], num_steps=3, track=False)
    report, _ = sampler.collect(SegmentRequest(0, 0), telling_snapshot(spec))
    assert report.statistics.obs is None
    assert report.statistics.returns is None


def limited(make: Callable[[], gym.Env[Any, Any]], steps: int, envs: int = 2) -> MakeEnvs:
    return lambda: [TimeLimit(make(), steps) for _ in range(envs)]


def snapshots(sampler_spec: Any) -> list[PolicySnapshot]:
    return [PolicySnapshot(k, random_weights(sampler_spec, seed=k)) for k in range(4)]


def test_a_segment_is_not_modified_later() -> None:
    sampler, spec = sampler_of(limited(PointMass, 7)(), num_steps=10)
    first = sampler.collect(SegmentRequest(0, 0), snapshots(spec)[0])
    kept = copy.deepcopy(first)
    _, second = sampler.collect(SegmentRequest(0, 1), snapshots(spec)[1])
    assert_same_bytes(first, kept)
    for field in dataclasses.fields(Segment):
        assert not np.shares_memory(getattr(first[1], field.name), getattr(second, field.name)), (
            field.name
        )


ENVS: dict[str, MakeEnvs] = {
    "discrete": limited(CartPoleEnv, 500),
    "box": limited(PointMass, 13),
    "ends on the last row": limited(PointMass, 20),
    "counting": lambda: [Counting(truncate_after=9), Counting(terminate_after=4)],
}


@pytest.mark.parametrize("envs", ENVS)
@pytest.mark.parametrize(
    "where", ["in a new sampler", "in the same sampler, which has gone further"]
)
def test_a_rebuilt_sampler_answers_the_same_request_with_the_same_bytes(
    envs: str, where: str
) -> None:
    sampler, spec = sampler_of(ENVS[envs](), num_steps=20)
    ledger = ReplayLedger(1, replay=True)
    policies = snapshots(spec)
    for index in range(2):
        ledger.record(sampler.collect(SegmentRequest(0, index), policies[index])[0])
    expected = sampler.collect(SegmentRequest(0, 2), policies[2])
    going_on = sampler.collect(SegmentRequest(0, 3), policies[3])
    rebuilt: PPOSampler = sampler
    if where == "in a new sampler":
        rebuilt, _ = sampler_of(ENVS[envs](), num_steps=20)
    result = rebuilt.collect(SegmentRequest(0, 2, ledger.rebuild(0, 2)), policies[2])
    assert_same_bytes(result, expected, but=["env_s"])
    assert_same_bytes(rebuilt.collect(SegmentRequest(0, 3), policies[3]), going_on, but=["env_s"])
    assert result[0].incidents == ()


def test_samplers_are_reproducible_and_differ_by_id() -> None:
    made = []
    for sampler_id in (0, 0, 1):
        sampler, spec = sampler_of(limited(PointMass, 9)(), num_steps=12, sampler_id=sampler_id)
        made.append(sampler.collect(SegmentRequest(sampler_id, 0), snapshots(spec)[0]))
    assert_same_bytes(made[0], made[1], but=["env_s"])
    assert not np.array_equal(made[0][1].obs[0], made[2][1].obs[0])
    assert not np.array_equal(made[0][1].actions, made[2][1].actions)
    # two envs of one sampler differ, too
    assert not np.array_equal(made[0][1].obs[0, 0], made[0][1].obs[0, 1])


@pytest.mark.parametrize("replay", [True, False])
def test_an_episode_that_cannot_be_replayed_is_abandoned_and_reported(replay: bool) -> None:
    def envs() -> list[gym.Env[Any, Any]]:
        return [DriftingSimulator(CartPoleEnv()), CartPoleEnv()]

    sampler, spec = sampler_of(envs(), num_steps=5)
    ledger = ReplayLedger(1, replay=replay)
    policy = PolicySnapshot(0, np.zeros(spec.num_parameters))
    report, _ = sampler.collect(SegmentRequest(0, 0), policy)
    assert report.carry.episodes.tolist() == [0, 0]
    ledger.record(report)
    rebuilt, _ = sampler_of(envs(), num_steps=5)
    after, segment = rebuilt.collect(SegmentRequest(0, 1, ledger.rebuild(0, 1)), policy)
    kind = "replay_mismatch" if replay else "episode_abandoned"
    lost = [0] if replay else [0, 1]
    assert [(element.kind, element.env, element.lost_steps) for element in after.incidents] == [
        (kind, env, 5) for env in lost
    ]
    assert after.incidents[0].message.startswith(
        "sampler 0 (Test-v0), env 0: abandoned episode 0 after 5 steps"
    )
    first, _ = CartPoleEnv().reset(seed=streams.integer(1, Stream.EPISODES, 0, 0, 1))
    np.testing.assert_array_equal(segment.obs[0, 0], first)
    assert after.carry.episodes.tolist() == ([1, 0] if replay else [1, 1])
    assert after.carry.episode_lengths.tolist() == ([5, 10] if replay else [5, 5])
    fresh = sum(0.9 ** (4 - t) * segment.rewards[t, 0] for t in range(5))
    assert after.carry.discounted_returns[0] == pytest.approx(fresh)
    ledger.record(after)
    rebuild = ledger.rebuild(0, 2)
    assert rebuild is not None
    assert [len(actions) for actions in rebuild.actions] == ([] if not replay else [5, 10])


def a_lot(envs: str, samplers: int) -> tuple[list[PPOSampler], Any]:
    made = [
        sampler_of(ENVS[envs](), num_steps=20, sampler_id=s, hidden_sizes=(16, 8))
        for s in range(samplers)
    ]
    return [sampler for sampler, _ in made], made[0][1]


@pytest.mark.parametrize("envs", ENVS)
@pytest.mark.parametrize("samplers", [2, 5])
def test_samplers_that_collect_together_make_the_same_bytes_as_alone(
    envs: str, samplers: int
) -> None:
    together, spec = a_lot(envs, samplers)
    alone, _ = a_lot(envs, samplers)
    scale = ObsScale(
        *Moments.of(
            np.random.default_rng(1).normal(size=(9, *spec.spaces.obs.shape))
        ).mean_and_std()
    )
    for snapshot in snapshots(spec):
        policy = dataclasses.replace(snapshot, obs_scale=scale if snapshot.version % 2 else None)
        requests = [SegmentRequest(s, policy.version) for s in range(samplers)]
        result = collect_together(together, requests, policy)
        for sampler, request, element in zip(alone, requests, result, strict=True):
            assert_same_bytes(element, sampler.collect(request, policy), but=["env_s"])
            assert element[1].obs.flags.c_contiguous


def test_some_samplers_may_be_rebuilt_while_others_continue() -> None:
    (first, second), spec = a_lot("box", 2)
    (lost, going_on), _ = a_lot("box", 2)
    ledger = ReplayLedger(2, replay=True)
    policies = snapshots(spec)
    requests = [SegmentRequest(s, 0) for s in range(2)]
    for report, _ in collect_together([first, second], requests, policies[0]):
        ledger.record(report)
    collect_together([lost, going_on], requests, policies[0])
    expected = [
        first.collect(SegmentRequest(0, 1), policies[1]),
        second.collect(SegmentRequest(1, 1), policies[1]),
    ]
    (again, _), _ = a_lot("box", 2)
    requests = [SegmentRequest(0, 1, ledger.rebuild(0, 1)), SegmentRequest(1, 1)]
    result = collect_together([again, going_on], requests, policies[1])
    assert_same_bytes(result[0], expected[0], but=["env_s"])
    assert_same_bytes(result[1], expected[1], but=["env_s"])
