"""PPOAgent, which acts in NumPy, is the same function as PPOModel, which learns in torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, random_weights, spec_of

from dppo.ppo.agent import PPOAgent
from dppo.ppo.architecture import ModelSpec
from dppo.ppo.model import PPOModel
from dppo.ppo.segment import PolicySnapshot
from dppo.spaces import BoxActions, DiscreteActions, Spaces

TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
MEAN, STD = np.array([0.5, -1.0, 100.0, 0.0]), np.array([1.0, 2.0, 30.0, 1e-4])


def twins(spec: ModelSpec, mean: np.ndarray | None = None, std: np.ndarray | None = None) -> tuple[PPOAgent, PPOModel]:
    """An agent and a model with the same weights, given to the model name by name."""
    weights = random_weights(spec)
    agent, model = PPOAgent(spec), PPOModel(spec, seed=9)
    agent.load(PolicySnapshot(3, weights, mean, std))
    model.load_state_dict({name: torch.from_numpy(array) for name, array in spec.unflatten(weights).items()})
    return agent, model


def observations(rows: int) -> np.ndarray:
    return (np.random.default_rng(4).normal(size=(rows, 4)) * 3).astype(np.float32)


@pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])
@pytest.mark.parametrize("hidden_sizes", [(), (32,), (64, 64, 16)], ids=str)
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("norm_obs", [False, True], ids=["raw", "norm_obs"])
def test_agent_equals_model(
    actions: DiscreteActions | BoxActions,
    hidden_sizes: tuple[int, ...],
    activation: str,
    dtype: str,
    norm_obs: bool,
) -> None:
    spec = spec_of(actions, hidden_sizes=hidden_sizes, activation=activation, dtype=dtype)
    agent, model = twins(spec, *(MEAN, STD) if norm_obs else ())
    obs = observations(9)
    noise = agent.distribution.noise(np.random.default_rng(1), 1, 9, dtype)[0]
    drawn, head, values = agent.act(obs, noise)

    x = obs.astype(dtype)
    if norm_obs:
        x = np.clip((x - MEAN.astype(dtype)) / STD.astype(dtype), -10, 10)
    with torch.no_grad():
        model_head, model_values = model(torch.from_numpy(x))
        logprobs = spec.distribution.evaluate(model_head, model.log_std, torch.from_numpy(drawn)).logprobs
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(head, model_head, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(values, model_values, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(agent.values(obs), model_values, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(agent.log_prob(head, drawn), logprobs, rtol=tolerance, atol=10 * tolerance)
    assert {str(array.dtype) for array in (head, values, agent.log_prob(head, drawn))} == {dtype}
    np.testing.assert_array_equal(agent.best_action(obs), agent.distribution.mode(head))
    assert values.shape == (9,)


@pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])
def test_actions_follow_from_head_and_noise(actions: DiscreteActions | BoxActions) -> None:
    agent, _ = twins(spec_of(actions))
    obs = observations(5)
    noise = agent.distribution.noise(np.random.default_rng(1), 1, 5, "float64")[0]
    drawn, head, _ = agent.act(obs, noise)
    if isinstance(actions, DiscreteActions):
        np.testing.assert_array_equal(drawn, (head + noise).argmax(axis=1))
        assert drawn.dtype == np.int64
    else:
        std = np.exp(agent.spec.unflatten(random_weights(agent.spec))["log_std"])
        np.testing.assert_array_equal(drawn, head + std * noise)
        assert np.abs(drawn).max() > 1  # not clipped to the box


def test_each_row_follows_from_its_own_observation() -> None:
    agent, _ = twins(spec_of())
    obs = observations(6)
    alone = [agent.values(obs[[row]])[0] for row in range(6)]
    np.testing.assert_allclose(agent.values(obs), alone, rtol=1e-12)


def test_observations_of_any_shape_and_dtype_are_flattened() -> None:
    spec = ModelSpec.of(Spaces((2, 2), "uint8", DISCRETE), (8,), "tanh", "float64")
    agent, _ = twins(spec)
    flat, _ = twins(spec_of(hidden_sizes=(8,)))
    obs = np.random.default_rng(3).integers(0, 255, (5, 2, 2)).astype(np.uint8)
    expected = flat.values(obs.reshape(5, 4).astype(np.float64))
    np.testing.assert_array_equal(agent.values(obs), expected)
    agent.load(PolicySnapshot(0, random_weights(spec), MEAN.reshape(2, 2), STD.reshape(2, 2)))
    flat.load(PolicySnapshot(0, random_weights(spec), MEAN, STD))
    np.testing.assert_array_equal(agent.values(obs), flat.values(obs.reshape(5, 4).astype(np.float64)))


def test_normalised_observations_are_limited() -> None:
    spec = spec_of(hidden_sizes=())
    agent, _ = twins(spec, np.zeros(4), np.ones(4))
    np.testing.assert_array_equal(agent.values(np.full((1, 4), 10.0)), agent.values(np.full((1, 4), 1e6)))
    raw, _ = twins(spec)
    assert raw.values(np.full((1, 4), 1e6)) != agent.values(np.full((1, 4), 1e6))


def test_snapshot_is_copied_and_not_written() -> None:
    spec = spec_of(BOX)
    agent, weights, mean = PPOAgent(spec), random_weights(spec), MEAN.copy()
    agent.load(PolicySnapshot(0, weights, mean, STD))
    obs, noise = observations(5), np.ones((5, 2))
    before = agent.act(obs, noise)
    np.testing.assert_array_equal(weights, random_weights(spec))
    np.testing.assert_array_equal(obs, observations(5))
    weights[:], mean[:] = 7, 7  # as an update in the same process would
    after = agent.act(obs, noise)
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)


def test_read_only_snapshots_will_do() -> None:
    """Arrays that come from Ray cannot be written."""
    spec = spec_of(BOX)
    weights, obs = random_weights(spec), observations(3)
    weights.flags.writeable = obs.flags.writeable = False
    agent = PPOAgent(spec)
    agent.load(PolicySnapshot(0, weights))
    agent.act(obs, np.ones((3, 2)))


def test_loading_without_statistics_turns_normalisation_off() -> None:
    spec = spec_of()
    agent, _ = twins(spec, MEAN, STD)
    plain, _ = twins(spec)
    agent.load(PolicySnapshot(1, random_weights(spec)))
    np.testing.assert_array_equal(agent.values(observations(4)), plain.values(observations(4)))
