"""The state of the memory in samplers: where it starts from zero, where it is stored, and what it values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import builders
import numpy as np
import pytest
import torch
from builders import make_config, random_weights
from updates import experience_of
from worlds.memory import Recalls

from dppo.config import PPO
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
from dppo.ppo.learning.batch import make_batch
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.stages import CurrentNetwork, estimate_again
from dppo.ppo.networks.choice import choose_network
from dppo.ppo.networks.network import NetworkSpec

STEPS = 24
LENGTH = 4
kinds = pytest.mark.parametrize("memory", ["gru", "lstm"])


def spec_of(memory: str) -> NetworkSpec:
    small = {"memory": memory, "memory_size": 5, "hidden_sizes": (6,), "dtype": "float64"}
    return choose_network(
        make_config({"env_id": "Test-v0", **small}).network, describe_spaces(Recalls())
    ).spec


def sampler_of(memory: str, *, sampler_id: int = 0, **options: Any) -> PPOSampler:
    agent = PPOAgent(spec_of(memory))
    sizes: dict[str, Any] = {"num_steps": STEPS, "sequence_length": LENGTH, "track": False}
    return builders.sampler_of(
        [Recalls(), Recalls()], sampler_id=sampler_id, agent=agent, **sizes, **options
    )[0]


def snapshot_of(spec: NetworkSpec, version: int = 0) -> PolicySnapshot:
    return PolicySnapshot(version, random_weights(spec, seed=version))


def collected(memory: str, segments: int, **options: Any) -> list[tuple[SegmentReport, Segment]]:
    sampler = sampler_of(memory, **options)
    spec = spec_of(memory)
    return [sampler.collect(SegmentRequest(0, k), snapshot_of(spec, k)) for k in range(segments)]


@kinds
def test_values_and_states_are_those_of_each_environment_step_by_step(memory: str) -> None:
    """Compare two segments with a loop over steps and environments that knows nothing of segments."""
    spec = spec_of(memory)
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
                    np.testing.assert_allclose(
                        segment.states[t // LENGTH, env], state, rtol=1e-9, atol=1e-14
                    )
                    assert bool(segment.states[t // LENGTH, env].any()) == bool(state.any())
                    ends["at the start of a sequence"] += not state.any()
                _, decided = agent.decide(segment.obs[t, env][None], state[None])
                np.testing.assert_allclose(segment.values[t, env], decided.values[0], rtol=1e-9)
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
                    np.testing.assert_allclose(segment.next_values[t, env], value, rtol=1e-9)
                state = np.zeros_like(after) if segment.truncated[t, env] else after
            assert report.carry.memory is not None
            np.testing.assert_allclose(report.carry.memory[env], state, rtol=1e-9, atol=1e-14)
            states[env] = state
    assert min(ends.values()) >= 2, ends


def final_obs(before: np.ndarray) -> np.ndarray:
    """Return the observation that follows `before` where the episode ends."""
    return np.array([0.0, before[1] + 1 / 8])


@kinds
def test_the_last_rows_are_valued_with_the_state_of_their_moment(memory: str) -> None:
    """The value after a segment is that of the first row of the next one, under the same weights."""
    sampler = sampler_of(memory)
    policy = snapshot_of(spec_of(memory))
    (_, earlier), (_, later) = (sampler.collect(SegmentRequest(0, k), policy) for k in range(2))
    goes_on = ~(earlier.terminated | earlier.truncated)[-1]
    assert goes_on.any()
    np.testing.assert_array_equal(earlier.next_values[-1][goes_on], later.values[0][goes_on])


def test_an_abandoned_episode_starts_from_zero() -> None:
    ((report, _),) = collected("gru", 1)
    assert report.carry.memory is not None
    carry = replace(report.carry, memory=np.full_like(report.carry.memory, 9.0))
    request = SegmentRequest(0, 1, Rebuild(carry, ()))
    after, segment = sampler_of("gru").collect(request, snapshot_of(spec_of("gru")))
    assert len(after.incidents) == 2
    assert segment.states is not None
    assert not segment.states[0].any()


@kinds
def test_advantages_are_the_same_when_recomputed_with_the_same_weights(memory: str) -> None:
    """Successors are valued from the states that the segment holds for them."""
    spec = spec_of(memory)
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
        np.testing.assert_allclose(again.advantages, batch.advantages, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(again.returns, batch.returns, rtol=1e-10, atol=1e-12)
