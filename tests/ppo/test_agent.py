"""PPOAgent: actions, normalization, and independence of the loaded snapshot."""

from __future__ import annotations

import numpy as np
from builders import BOX, DISCRETE, agent_of, mlp_of, random_weights, spec_of
from updates import ACTIONS

from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import ObsScale
from dppo.spaces.actions import Actions, DiscreteActions
from dppo.spaces.spaces import Spaces

MEAN = np.array([0.5, -1.0, 100.0, 0.0])
STD = np.array([1.0, 2.0, 30.0, 1e-4])
SCALE = ObsScale(MEAN, STD)


def observations(rows: int) -> np.ndarray:
    return (np.random.default_rng(4).normal(size=(rows, 4)) * 3).astype(np.float32)


@ACTIONS
def test_actions_follow_from_head_and_noise(actions: Actions) -> None:
    agent = agent_of(spec_of(actions))
    obs = observations(5)
    noise = agent.distribution.noise(np.random.default_rng(1), 1, 5, "float64")[0]
    drawn, (head, *_) = agent.act(obs, noise)
    if isinstance(actions, DiscreteActions):
        np.testing.assert_array_equal(drawn, (head + noise).argmax(axis=1))
        assert drawn.dtype == np.int64
    else:
        log_std = agent.spec.unflatten(random_weights(agent.spec))["log_std"]
        std = np.exp(log_std)
        np.testing.assert_array_equal(head[:, 2:], np.broadcast_to(log_std, (5, 2)))
        np.testing.assert_array_equal(drawn, head[:, :2] + std * noise)
        assert np.abs(drawn).max() > 1  # not clipped to the box


def test_observations_of_any_shape_and_dtype_are_flattened() -> None:
    spec = mlp_of(Spaces(np.dtype(("uint8", (2, 2))), DISCRETE), (8,), "tanh", "float64")
    agent = agent_of(spec)
    flat = agent_of(spec_of(hidden_sizes=(8,)))
    obs = np.random.default_rng(3).integers(0, 255, (5, 2, 2)).astype(np.uint8)
    expected = flat.values(obs.reshape(5, 4).astype(np.float64))
    np.testing.assert_array_equal(agent.values(obs), expected)
    agent.load(
        PolicySnapshot(0, random_weights(spec), ObsScale(MEAN.reshape(2, 2), STD.reshape(2, 2)))
    )
    flat.load(PolicySnapshot(0, random_weights(spec), SCALE))
    np.testing.assert_array_equal(
        agent.values(obs), flat.values(obs.reshape(5, 4).astype(np.float64))
    )


def test_a_snapshot_is_copied_and_not_modified() -> None:
    spec = spec_of(BOX)
    agent = PPOAgent(spec)
    weights = random_weights(spec)
    mean = MEAN.copy()
    agent.load(PolicySnapshot(0, weights, ObsScale(mean, STD)))
    obs = observations(5)
    noise = np.ones((5, 2))
    before, outputs = agent.act(obs, noise)
    np.testing.assert_array_equal(weights, random_weights(spec))
    np.testing.assert_array_equal(obs, observations(5))
    weights.flags.writeable = mean.flags.writeable = True
    weights[:] = 7  # as an update in the same process would
    mean[:] = 7
    after, again = agent.act(obs, noise)
    for a, b in zip((before, *outputs), (after, *again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_loading_without_statistics_turns_normalization_off() -> None:
    spec = spec_of()
    agent = agent_of(spec, SCALE)
    plain = agent_of(spec)
    agent.load(PolicySnapshot(1, random_weights(spec)))
    np.testing.assert_array_equal(agent.values(observations(4)), plain.values(observations(4)))
