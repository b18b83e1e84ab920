"""Wide exploration: which segments have it, how noise is held, and that stored heads are those of the actions."""

from __future__ import annotations

import numpy as np
import pytest
from builders import agent_of

from dppo.config.parts import Network
from dppo.ppo.acting import wide
from dppo.ppo.acting.wide import EVERY, STRETCH_STEPS, WideAgent, hold, is_wide
from dppo.ppo.networks.choice import choose_network
from dppo.spaces.actions import BoxActions
from dppo.spaces.spaces import Spaces

OBS = np.dtype((np.float32, (3,)))
ACTIONS = BoxActions(np.full(2, -1.0), np.full(2, 2.0), bounds="squash")
STRETCH = STRETCH_STEPS // 64  # segments of 64 steps


def test_at_any_time_one_sampler_of_four_explores_widely() -> None:
    for index in (0, STRETCH - 1, STRETCH, 9 * STRETCH):
        flags = []
        for sampler in range(8):
            flags.append(is_wide(sampler, index, 64))
        assert sum(flags) == 8 // EVERY


@pytest.mark.parametrize("num_steps", [64, 100, 3000])
def test_a_sampler_explores_widely_for_a_quarter_of_the_time(num_steps: int) -> None:
    segments = EVERY * -(-STRETCH_STEPS // num_steps)
    flags = []
    for index in range(3 * segments):
        flags.append(is_wide(2, index, num_steps))
    assert sum(flags) == 3 * segments // EVERY
    assert flags[:segments] == flags[segments : 2 * segments]


def test_noise_is_held_for_powers_of_two() -> None:
    white = np.arange(4000.0).reshape(2000, 2, 1)
    noise = hold(white, np.random.default_rng(1))
    for env in range(2):
        of_env = noise[:, env, 0]
        values, lengths = np.unique(of_env, return_counts=True)
        assert np.isin(values, white[:, env]).all()
        assert set(lengths[:-1]) == {1, 2, 4, 8, 16, 32}
    # nothing is held from before the segment
    assert np.array_equal(noise[0], white[0])


@pytest.mark.parametrize("samplers", [[True], [False, True, False]])
def test_only_the_deviation_of_wide_samplers_is_raised(
    samplers: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network(hidden_sizes=(8,), state_dependent_std=True)
    spec = choose_network(network, Spaces(OBS, ACTIONS)).spec
    agent = agent_of(spec)
    is_alone = len(samplers) == 1
    # a single sampler has no axis
    shape = (2,) if is_alone else (len(samplers), 2)
    random = np.random.default_rng(5)
    obs = random.standard_normal((*shape, 3))
    obs = obs.astype(np.float32)
    noise = np.ones((*shape, 2), np.float32)
    _, usual = agent.act(obs, noise)
    expected = usual.head.copy()
    # the random weights have deviations on both sides of this limit
    monkeypatch.setattr(wide, "LEAST_LOG_STD", 0.8)
    log_std = expected[..., 2:] if is_alone else expected[1, ..., 2:]
    assert 0 < (log_std < 0.8).mean() < 1
    np.maximum(log_std, 0.8, out=log_std)
    explorer = WideAgent(agent, np.array(samplers))
    actions, outputs = explorer.act(obs, noise)
    assert np.array_equal(outputs.head, expected)
    drawn = agent.distribution.sample(expected, noise)
    assert np.array_equal(actions, drawn)
