"""For every network: acting equals learning, gradients equal differences, samplers act together bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import worlds.memory_models as own
from builders import (
    BOX,
    DISCRETE,
    agent_of,
    assert_same_bytes,
    make_config,
    plan_of,
    random_weights,
)
from encoder_kinds import KINDS, config_of
from torch import nn
from updates import gradient_of, load_random
from worlds.models import Plain, Residual

from dppo.errors import ConfigError
from dppo.hosts.builders import build_sampler
from dppo.hosts.plans import sampler_plan
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.inputs import each_leaf, reader_of
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.networks.choice import choose_network, learning_network
from dppo.ppo.networks.network import NetworkSpec, RecurrentInputs
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.spaces.actions import Actions, DiscreteActions, NestedActions
from dppo.spaces.spaces import Spaces, leaves

Make = Callable[[Actions, str], NetworkSpec]
TOLERANCE = {"float32": 3e-5, "float64": 1e-11}
VECTOR = np.dtype((np.float32, (2, 2)))
LONG = np.dtype((np.float32, (111,)))
IMAGE = np.dtype((np.uint8, (8, 8, 3)))
NEST = np.dtype([("camera", IMAGE), ("speed", "<f4", (2,))])
NO_IMAGES = np.dtype([("bits", np.int8, (2, 3, 4)), ("bytes", np.uint8, (1, 2, 2, 3, 4))])
ACTIONS: dict[str, Actions] = {
    "discrete": DISCRETE,
    "box": BOX,
    "joint": NestedActions((DiscreteActions(3), BOX), None),
}


def chosen(obs: np.dtype[Any], **settings: Any) -> Make:
    def make(actions: Actions, dtype: str) -> NetworkSpec:
        config = make_config({"env_id": "Test-v0", "dtype": dtype, **settings})
        return choose_network(config.network, Spaces(obs, actions)).spec

    return make


def encoder(kind: str) -> Make:
    def make(actions: Actions, dtype: str) -> NetworkSpec:
        config = config_of(kind, dtype=dtype)
        spaces = build_sampler(sampler_plan(config), 0).spaces
        return choose_network(
            plan_of(config, actions).network, replace(spaces, actions=actions)
        ).spec

    return make


ENCODED = [kind for kind in KINDS if kind not in ("own module", "normalized everything")]
NETWORKS: dict[str, Make] = {
    "mlp": chosen(VECTOR, hidden_sizes=(64, 64)),
    "mlp without hidden layers": chosen(VECTOR, hidden_sizes=()),
    "mlp of one layer": chosen(VECTOR, hidden_sizes=(32,), activation="relu"),
    "mlp of three layers": chosen(VECTOR, hidden_sizes=(64, 64, 16)),
    "wide mlp": chosen(LONG, hidden_sizes=(512, 7)),
    "module": chosen(VECTOR, model=Plain, model_kwargs={"units": 24}),
    "residual module": chosen(VECTOR, model=Residual, model_kwargs={"blocks": 2}),
    "bytes that are no image": chosen(NO_IMAGES),
    "gru": chosen(VECTOR, memory="gru", hidden_sizes=(7, 5), memory_size=6),
    "lstm": chosen(VECTOR, memory="lstm", hidden_sizes=(16,), activation="relu", memory_size=8),
    "wide lstm": chosen(LONG, memory="lstm"),
    "shared lstm": chosen(VECTOR, memory="lstm", trunk="shared", memory_size=6),
    "gru alone": chosen(VECTOR, memory="gru", hidden_sizes=(), memory_size=5),
    "gru with layer norm": chosen(VECTOR, memory="gru", layer_norm=True, memory_size=5),
    "image and lstm": chosen(IMAGE, memory="lstm", image_features=12, memory_size=6),
    "dict and gru": chosen(NEST, memory="gru", image_features=12, memory_size=6),
    "module with memory": chosen(VECTOR, model=own.Running, sequence_length=4),
    "module with memory for a dict": chosen(NEST, model=own.Running, sequence_length=4),
    **{kind: encoder(kind) for kind in ENCODED},
}
networks = pytest.mark.parametrize("network", NETWORKS)
HEADS = [("discrete", "float32"), ("box", "float64")]
CASES = [(network, *head) for network in NETWORKS for head in HEADS]
CASES += [(network, "joint", "float32") for network in ("mlp", "module", "gru")]
cases = pytest.mark.parametrize(("network", "actions", "dtype"), CASES)


def spec_of(network: str, actions: str, dtype: str) -> NetworkSpec:
    return NETWORKS[network](ACTIONS[actions], dtype)


def observations(spec: NetworkSpec, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(4)
    obs = np.zeros(shape, spec.spaces.obs)
    for name, leaf in leaves(obs).items():
        if name in spec.spaces.categories:
            categories = spec.spaces.categories[name]
            codes = rng.integers(categories.counts, size=(*shape, len(categories.counts)))
            leaf[...] = (codes + categories.starts).reshape(leaf.shape)
        elif leaf.dtype.kind == "f":
            leaf[...] = rng.normal(size=leaf.shape) * 3
        else:
            leaf[...] = rng.integers(0, 256 if leaf.dtype == np.uint8 else 2, leaf.shape)
    return obs


def states_of(spec: NetworkSpec, *shape: int) -> np.ndarray | None:
    if not spec.state_size:
        return None
    states = np.random.default_rng(3).normal(size=(*shape, spec.state_size))
    return states.astype(spec.dtype)


def sequences(by_step: np.ndarray) -> np.ndarray:
    """Return an array [T, E, ...] as a batch holds it: [E * T, ...], sequence by sequence."""
    by_env = by_step.swapaxes(0, 1)
    return np.ascontiguousarray(by_env.reshape(-1, *by_env.shape[2:]))


def inputs_of(
    spec: NetworkSpec, obs: np.ndarray, state: np.ndarray | None, starts: np.ndarray
) -> tuple[Any, RecurrentInputs | None]:
    """Return what a network learns from: observations [T, E] and, if it has memory, its state and `starts`."""
    read = reader_of(spec.spaces.obs, spec.dtype).read(obs)
    inputs = each_leaf(read, lambda leaf: torch.from_numpy(sequences(leaf)))
    if state is None:
        return inputs, None
    return inputs, RecurrentInputs(torch.from_numpy(state), torch.from_numpy(starts.T.copy()))


@cases
def test_acting_step_by_step_equals_learning_over_sequences(
    network: str, actions: str, dtype: str
) -> None:
    """Episodes start inside the sequences; actors set the state to zero there, and learners are told where."""
    spec = spec_of(network, actions, dtype)
    agent = agent_of(spec, spread=0.1)
    model = PPOModel(spec, seed=9)
    load_random(model.network, spec, scale=0.1)
    obs = observations(spec, 12, 3)
    starts = np.random.default_rng(2).random((12, 3)) < 0.2
    first = state = states_of(spec, 3)
    acted: list[tuple[np.ndarray, ...]] = []
    for step_obs, is_start in zip(obs, starts, strict=True):
        if state is not None:
            state = np.where(is_start[:, None], np.zeros_like(state), state)
        before = None if state is None else state.copy()
        noise = agent.distribution.noise(np.random.default_rng(len(acted)), 1, 3, dtype)[0]
        drawn, outputs = agent.act(step_obs, noise, state)
        best, _ = agent.decide(step_obs, state)
        np.testing.assert_array_equal(best, agent.distribution.mode(outputs.head))
        np.testing.assert_array_equal(agent.values(step_obs, state), outputs.values)
        assert_same_bytes(state, before)
        acted.append((drawn, outputs.head, outputs.values))
        state = outputs.state
        assert (state is None) == (first is None)
        if state is not None:
            assert state.dtype == dtype
            assert state.shape == (3, spec.state_size)
    drawn, heads, values = (sequences(np.stack(column)) for column in zip(*acted, strict=True))
    assert heads.dtype == values.dtype == dtype
    inputs, recurrent = inputs_of(spec, obs, first, starts)
    head, learned, _ = model.network.forward(inputs, recurrent)
    scored = model.forward(inputs, torch.from_numpy(drawn), recurrent=recurrent)
    logprobs = agent.distribution.log_prob(heads, drawn)
    assert logprobs.dtype == dtype
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(heads, head, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(values, learned, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        logprobs, scored.policy.logprobs, rtol=tolerance, atol=20 * tolerance
    )


@networks
def test_gradients_are_finite_differences(network: str) -> None:
    """Of the largest and of another element of each parameter, for a loss that depends on all outputs."""
    spec = spec_of(network, "joint", "float64")
    learning = learning_network(spec, 3)
    if spec.state_size:
        load_random(learning, spec)
    starts = np.zeros((5, 2), bool)
    starts[3, 1] = True
    inputs, recurrent = inputs_of(spec, observations(spec, 5, 2), states_of(spec, 2), starts)
    gradient = gradient_of(learning, inputs, recurrent=recurrent)
    weights = learning.parameters.weights.data

    def difference(index: int) -> float:
        kept = weights[index].item()
        losses = []
        for step in (1e-6, -1e-6):
            weights[index] = kept + step
            head, values, _ = learning.forward(inputs, recurrent)
            losses.append(float(head.square().sum() + values.exp().sum()))
        weights[index] = kept
        return (losses[0] - losses[1]) / 2e-6

    start = 0
    for name, shape in spec.shapes.items():
        size = math.prod(shape)
        part = gradient[start : start + size]
        if name == "frozen":
            assert not part.any()
        else:
            for index in (np.abs(part).argmax(), np.random.default_rng(start).integers(size)):
                expected = difference(start + int(index))
                assert part[index] == pytest.approx(expected, rel=1e-3, abs=2e-5), name
        start += size


@cases
def test_samplers_that_act_together_get_the_bits_of_each_alone(
    network: str, actions: str, dtype: str
) -> None:
    """A row of a larger product would differ in the last bits."""
    spec = spec_of(network, actions, dtype)
    agent = agent_of(spec, spread=0.1)

    def answers(obs: np.ndarray, noise: np.ndarray, state: np.ndarray | None) -> list[Any]:
        drawn, outputs = agent.act(obs, noise, state)
        best, _ = agent.decide(obs, state)
        return [drawn, *outputs, best, agent.values(obs, state)]

    for samplers, rows in ((1, 2), (2, 1), (3, 5), (8, 2), (2, 33)):
        obs = observations(spec, samplers, rows)
        noise = agent.distribution.noise(np.random.default_rng(1), samplers, rows, dtype)
        states = states_of(spec, samplers, rows)
        together = answers(obs, noise, states)
        for s in range(samplers):
            state = None if states is None else states[s]
            for stacked, alone in zip(together, answers(obs[s], noise[s], state), strict=True):
                assert_same_bytes(None if stacked is None else stacked[s], alone)


@networks
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_follow_from_description_and_seed(network: str, dtype: str) -> None:
    """Flat weights and named parameters are the same numbers; torch's global state and default dtype have no effect."""
    spec = spec_of(network, "joint", dtype)

    def weights_of(seed: int) -> np.ndarray:
        return learning_network(spec, seed).parameters.weights.numpy(force=True)

    state = torch.get_rng_state()
    weights = weights_of(3)
    assert torch.equal(torch.get_rng_state(), state)
    assert weights.shape == (spec.num_parameters,)
    assert weights.dtype == dtype
    named = spec.unflatten(weights)
    assert {name: array.shape for name, array in named.items()} == dict(spec.shapes)
    np.testing.assert_array_equal(spec.flatten(dict(reversed(named.items()))), weights)
    obs = observations(spec, 2)
    values = agent_of(spec).values(obs, states_of(spec, 2))
    torch.rand(10)
    torch.set_default_dtype(torch.float64)  # as an environment in the same process may do
    again = weights_of(3)
    other = weights_of(4)
    values_again = agent_of(spec).values(obs, states_of(spec, 2))
    torch.set_default_dtype(torch.float32)
    np.testing.assert_array_equal(again, weights)
    np.testing.assert_array_equal(values_again, values)
    assert not np.array_equal(other, weights)
    same = spec_of(network, "joint", dtype)
    assert (same, same.as_json()) == (spec, spec.as_json())
    assert spec_of(network, "joint", "float32" if dtype == "float64" else "float64") != spec


@pytest.mark.parametrize("kind", ENCODED)
def test_encoders_and_heads_begin_with_the_gains_of_the_method(kind: str) -> None:
    spec = spec_of(kind, "box", "float32")
    named = spec.unflatten(learning_network(spec, 3).parameters.weights.numpy(force=True))
    policy = named["policy.weight"]
    np.testing.assert_allclose(policy @ policy.T, 1e-4 * np.eye(len(policy)), atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(named["value.weight"]), 1, rtol=1e-4)
    for name, array in named.items():
        if name.endswith("hidden.0.weight") or name.endswith("last.0.weight"):
            gram = array @ array.T if len(array) <= array.shape[1] else array.T @ array
            np.testing.assert_allclose(gram, 2 * np.eye(len(gram)), atol=1e-4)
        if name in ("policy.bias", "value.bias"):
            assert not array.any()


def test_a_state_that_a_module_returns_is_not_a_view_of_its_own() -> None:
    spec = spec_of("module with memory", "discrete", "float32")
    agent = agent_of(spec)
    obs = observations(spec, 2, 1)
    first = agent.decide(obs[0], agent.start(1))[1].state
    assert first is not None
    kept = first.copy()
    agent.decide(obs[1], first)
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (own.Backward, "its head of a sequence differ from those of its steps one after the other"),
        (
            own.NoState,
            "returned a tuple of Tensor, Tensor. Return three tensors, head, values and state",
        ),
        (
            own.WideState,
            "returned state of shape (3, 16), not (3, 8): [rows, state_size], after the last step",
        ),
        (own.MeanState, "depend on the other rows of the batch"),
        (own.OddSize, "its state_size is (8,). It must be the number of elements"),
        (
            own.OneStep,
            "forward(obs, state, starts), with obs of shape (4, 3, 2, 2) and torch.float32, state of",
        ),
    ],
)
def test_a_module_that_breaks_the_contract_is_refused(model: type[nn.Module], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _ = ModuleSpec(Spaces(VECTOR, DISCRETE), model, {}, "float32").shapes
    assert str(caught.value).startswith(f"model=worlds.memory_models:{model.__name__}: ")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_snapshot_is_copied_and_one_without_statistics_turns_normalization_off() -> None:
    spec = spec_of("mlp", "box", "float64")
    agent = PPOAgent(spec)
    weights = random_weights(spec)
    mean = np.array([[0.5, -1.0], [100.0, 0.0]])
    agent.load(PolicySnapshot(0, weights, ObsScale(mean, np.full((2, 2), 3.0))))
    obs = observations(spec, 5)
    before = agent.values(obs)
    np.testing.assert_array_equal(weights, random_weights(spec))
    np.testing.assert_array_equal(obs, observations(spec, 5))
    weights.flags.writeable = mean.flags.writeable = True
    weights[:] = 7  # as an update in the same process would
    mean[:] = 7
    np.testing.assert_array_equal(agent.values(obs), before)
    agent.load(PolicySnapshot(1, random_weights(spec)))
    np.testing.assert_array_equal(agent.values(obs), agent_of(spec).values(obs))


def test_weights_of_another_network_are_refused() -> None:
    spec = spec_of("mlp", "discrete", "float64")
    with pytest.raises(ValueError, match=r"got 1,00\d weights, this network has"):
        spec.unflatten(np.zeros(1003))
    named = spec.unflatten(random_weights(spec))
    with pytest.raises(ValueError, match=r"value\.4\.bias has shape None, this network has \(1,\)"):
        spec.flatten({name: array for name, array in named.items() if name != "value.4.bias"})
    with pytest.raises(ValueError, match=r"log_std has shape \(2,\), this network has None"):
        spec.flatten(named | {"log_std": np.zeros(2)})
    with pytest.raises(ValueError, match=r"policy\.0\.weight has shape \(4, 64\)"):
        spec.flatten(named | {"policy.0.weight": named["policy.0.weight"].T})
