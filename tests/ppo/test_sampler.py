"""PPOSampler on environments that reveal any off-by-one, and the state of its memory."""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from builders import assert_same_bytes, linear_snapshot, make_config, random_weights, sampler_of
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from numpy.testing import assert_allclose, assert_array_equal
from updates import experience_of, load_random
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
    envs = [Counting(**end) for end in ends]
    sampler, spec = sampler_of(envs, num_steps=num_steps)
    collected = []
    for index in range(segments):
        policy = linear_snapshot(spec, index)
        collected.append(sampler.collect(SegmentRequest(0, index), policy))
    return collected


def column(array: np.ndarray, env: int = 0) -> list[Any]:
    result: list[Any] = array[:, env].tolist()
    return result


ENDS: Ends = [{}, {"truncate_after": 2}, {"terminate_after": 3}, {"truncate_after": 5}]


def test_environments_of_one_sampler_keep_their_own_episodes() -> None:
    [(report, segment)] = collect_counting(num_steps=5, ends=ENDS)
    obs = segment.obs[..., 0]
    assert column(obs, 0) == [0, 1, 2, 3, 4]
    assert column(obs, 1) == [0, 1, 0, 1, 0]
    assert column(obs, 2) == [0, 1, 2, 0, 1]
    assert column(obs, 3) == [0, 1, 2, 3, 4]

    values = segment.values
    assert column(values, 1) == [100, 110, 100, 110, 100]

    next_values = segment.next_values
    # the last one is of the state after the segment
    assert column(next_values, 0) == [110, 120, 130, 140, 150]
    assert column(next_values, 1) == [110, 120, 110, 120, 110]
    # 150, not 100 as in the new episode
    assert column(next_values, 3) == [110, 120, 130, 140, 150]
    assert np.isfinite(next_values).all()  # unused where terminated, but never nan

    env_and_step = np.argwhere(segment.truncated.T)
    assert env_and_step.tolist() == [[1, 1], [1, 3], [3, 4]]
    env_and_step = np.argwhere(segment.terminated.T)
    assert env_and_step.tolist() == [[2, 2]]

    assert_array_equal(segment.rewards, segment.actions)
    assert_allclose(segment.logprobs, np.log(1 / 4))
    assert segment.valid.all()
    assert segment.successors is None  # only segments whose advantages are recomputed hold them

    finished = [(episode.env, episode.index) for episode in report.episodes]
    assert finished == [(1, 0), (2, 0), (1, 1), (3, 0)]
    assert report.sampler_id == 0
    assert report.index == 0
    assert report.policy_version == 0
    assert report.steps == 20

    carry = report.carry
    lengths = [5, 1, 2, 0]
    assert carry.episodes.tolist() == [0, 2, 1, 1]
    assert carry.episode_lengths.tolist() == lengths
    assert len(report.open_actions) == 4
    for env, actions in enumerate(report.open_actions):
        length = lengths[env]
        since_reset = segment.actions[5 - length :, env]
        assert_array_equal(actions, since_reset)


@pytest.mark.proves("PPOSampler._next_statistics")
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
            steps += 1
            samples.append(running)
            if steps in end.values():
                running = 0.0
                steps = 0

        assert report.carry.discounted_returns.tolist() == pytest.approx([running])
        moments = report.statistics.returns
        assert moments is not None
        assert moments.count == 4
        assert_allclose(moments.mean, np.mean(samples))
        assert_allclose(moments.m2, 4 * np.var(samples))


def test_nothing_is_reported_for_normalizers_that_are_off() -> None:
    sampler, spec = sampler_of([Counting()], num_steps=3, track=False)
    policy = linear_snapshot(spec)
    report, _ = sampler.collect(SegmentRequest(0, 0), policy)
    assert report.statistics == Statistics()


def test_a_segment_is_not_modified_later() -> None:
    sampler, spec = sampler_of([Counting(truncate_after=7)], num_steps=10)
    first_policy = snapshot_of(spec, 0)
    second_policy = snapshot_of(spec, 1)
    first = sampler.collect(SegmentRequest(0, 0), first_policy)
    first_before = copy.deepcopy(first)
    _, second_segment = sampler.collect(SegmentRequest(0, 1), second_policy)
    assert_same_bytes(first, first_before)

    _, first_segment = first
    for field in dataclasses.fields(Segment):
        array = getattr(first_segment, field.name)
        later = getattr(second_segment, field.name)
        assert not np.shares_memory(array, later), field.name


@pytest.mark.parametrize("replay", [True, False])
def test_an_episode_that_cannot_be_replayed_is_abandoned_and_reported(replay: bool) -> None:
    """The first environment differs in a replay; without replays, the second one's episode is lost, too."""

    def sampler() -> tuple[PPOSampler, NetworkSpec]:
        envs = [DriftingSimulator(CartPoleEnv()), CartPoleEnv()]
        return sampler_of(envs, num_steps=5)

    first, spec = sampler()
    ledger = ReplayLedger(1, replay=replay)
    policy = PolicySnapshot(0, np.zeros(spec.num_parameters))
    report, _ = first.collect(SegmentRequest(0, 0), policy)
    assert report.carry.episodes.tolist() == [0, 0]

    ledger.record(report)
    rebuilt, _ = sampler()
    request = SegmentRequest(0, 1, ledger.rebuild(0, 1))
    after, segment = rebuilt.collect(request, policy)

    incidents = after.incidents
    kind = "replay_mismatch" if replay else "episode_abandoned"
    abandoned = [0] if replay else [0, 1]
    assert [incident.env for incident in incidents] == abandoned
    for incident in incidents:
        assert incident.kind == kind
        assert incident.lost_steps == 5
    message = incidents[0].message
    words = "sampler 0 (Test-v0), env 0: abandoned episode 0 after 5 steps"
    assert message.startswith(words)

    seed_of_next = streams.integer(1, Stream.EPISODES, 0, 0, 1)
    first_obs, _ = CartPoleEnv().reset(seed=seed_of_next)
    assert_array_equal(segment.obs[0, 0], first_obs)

    carry = after.carry
    episodes = [1, 0] if replay else [1, 1]
    lengths = [5, 10] if replay else [5, 5]
    assert carry.episodes.tolist() == episodes
    assert carry.episode_lengths.tolist() == lengths

    steps_later = np.arange(4, -1, -1)
    discounts = 0.9**steps_later
    expected = discounts @ segment.rewards[:, 0]
    assert carry.discounted_returns[0] == pytest.approx(expected)

    ledger.record(after)
    rebuild = ledger.rebuild(0, 2)
    assert rebuild is not None

    replayed = [len(actions) for actions in rebuild.actions]
    assert replayed == (lengths if replay else [])


STEPS = 24
LENGTH = 4
memories = pytest.mark.parametrize("memory", ["gru", "lstm"])


def memory_spec(memory: str) -> NetworkSpec:
    config = make_config(
        {
            "env_id": "Test-v0",
            "memory": memory,
            "memory_size": 5,
            "hidden_sizes": (6,),
            "dtype": "float64",
        }
    )
    spaces = describe_spaces(Recalls())
    return choose_network(config.network, spaces).spec


def memory_sampler(memory: str, *, sampler_id: int = 0, **options: Any) -> PPOSampler:
    sampler, _ = sampler_of(
        [Recalls(), Recalls()],
        num_steps=STEPS,
        sampler_id=sampler_id,
        agent=PPOAgent(memory_spec(memory)),
        sequence_length=LENGTH,
        track=False,
        **options,
    )
    return sampler


def snapshot_of(spec: NetworkSpec, version: int = 0) -> PolicySnapshot:
    weights = random_weights(spec, seed=version)
    return PolicySnapshot(version, weights)


def collected(memory: str, segments: int, **options: Any) -> Collected:
    sampler = memory_sampler(memory, **options)
    spec = memory_spec(memory)
    pairs = []
    for index in range(segments):
        request = SegmentRequest(0, index)
        pairs.append(sampler.collect(request, snapshot_of(spec, index)))
    return pairs


assert_near = partial(assert_allclose, rtol=1e-9)
assert_same_state = partial(assert_allclose, rtol=1e-9, atol=1e-14)


class Walk:
    """An environment of a segment, step by step: the loop knows nothing of segments but their arrays."""

    def __init__(self, agent: PPOAgent, segment: Segment, env: int) -> None:
        self.agent = agent
        self.segment = segment
        self.env = env
        self.ends: Counter[str] = Counter()

    def at(self, name: str, t: int) -> Any:
        return getattr(self.segment, name)[t, self.env]

    def check_start(self, t: int, state: np.ndarray) -> None:
        """Compare the state that the segment holds for a sequence."""
        stored = self.at("states", t // LENGTH)
        assert_same_state(stored, state)
        assert stored.any() == state.any()
        self.ends["at the start of a sequence"] += not state.any()

    def follows(self, t: int) -> np.ndarray | None:
        """Return the observation that the step led to, or None if it is in the next segment."""
        if self.at("truncated", t):
            return final_obs(self.at("obs", t))
        if t + 1 < STEPS:
            return self.at("obs", t + 1)
        return None

    def step(self, t: int, state: np.ndarray) -> np.ndarray:
        """Compare the values of a step, and return the state after it."""
        obs = self.at("obs", t)
        _, decided = self.agent.decide(obs[None], state[None])
        assert_near(self.at("values", t), decided.values[0])
        assert decided.state is not None

        after = decided.state[0]
        if self.at("terminated", t):
            self.ends["terminated"] += 1
            return np.zeros_like(after)

        following = self.follows(t)
        if following is not None:
            row = following[None].astype(np.float32)
            (value,) = self.agent.outputs(row, after[None]).values
            assert_near(self.at("next_values", t), value)
        if self.at("truncated", t):
            self.ends["truncated"] += 1
            return np.zeros_like(after)
        return after


@memories
def test_values_and_states_are_those_of_each_environment_step_by_step(memory: str) -> None:
    """Compare two segments with a loop over steps and environments."""
    spec = memory_spec(memory)
    agent = PPOAgent(spec)
    states = np.zeros((2, spec.state_size))
    ends: Counter[str] = Counter()

    for index, (report, segment) in enumerate(collected(memory, 2)):
        agent.load(snapshot_of(spec, index))
        assert report.carry.memory is not None
        for env in range(2):
            walk = Walk(agent, segment, env)
            state = states[env]
            for t in range(STEPS):
                if t % LENGTH == 0:
                    walk.check_start(t, state)
                state = walk.step(t, state)
            assert_same_state(report.carry.memory[env], state)
            states[env] = state
            ends += walk.ends

    assert ends["terminated"] >= 2
    assert ends["truncated"] >= 2
    assert ends["at the start of a sequence"] >= 2


def final_obs(before: np.ndarray) -> np.ndarray:
    """Return the observation that follows `before` where the episode ends."""
    return np.array([0.0, before[1] + 1 / 8])


@memories
def test_the_last_rows_are_valued_with_the_state_of_their_moment(memory: str) -> None:
    """The value after a segment is that of the first row of the next one, under the same weights."""
    sampler = memory_sampler(memory)
    policy = snapshot_of(memory_spec(memory))
    _, earlier = sampler.collect(SegmentRequest(0, 0), policy)
    _, later = sampler.collect(SegmentRequest(0, 1), policy)
    ends = earlier.terminated | earlier.truncated
    goes_on = ~ends[-1]
    assert goes_on.any()

    after = earlier.next_values[-1]
    first = later.values[0]
    assert_array_equal(after[goes_on], first[goes_on])


def test_an_abandoned_episode_starts_from_zero() -> None:
    ((report, _),) = collected("gru", 1)
    memory = report.carry.memory
    assert memory is not None

    loud = np.full_like(memory, 9.0)
    carry = replace(report.carry, memory=loud)
    request = SegmentRequest(0, 1, Rebuild(carry, ()))
    policy = snapshot_of(memory_spec("gru"))
    after, segment = memory_sampler("gru").collect(request, policy)
    assert len(after.incidents) == 2
    assert segment.states is not None
    assert not segment.states[0].any()


@memories
def test_advantages_are_the_same_when_recomputed_with_the_same_weights(memory: str) -> None:
    """Successors are valued from the states that the segment holds for them."""
    spec = memory_spec(memory)
    ((_, segment),) = collected(memory, 1, recompute_advantages=True)
    model = PPOModel(spec, 1)
    load_random(model.network, spec)
    ppo = PPO(gamma=0.9, gae_lambda=0.8)
    batch = make_batch([segment], None, None, ppo, LENGTH)
    experience = experience_of([segment])

    for rows in (LENGTH, 10, 1000):
        network = CurrentNetwork(model, rows, None)
        again = estimate_again(batch, network, experience, ppo)
        assert_allclose(again.advantages, batch.advantages, rtol=1e-10, atol=1e-12)
        assert_allclose(again.returns, batch.returns, rtol=1e-10, atol=1e-12)
