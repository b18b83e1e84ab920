"""For every network: acting equals learning, gradients equal differences, samplers act together bit for bit."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

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
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from torch import from_numpy, nn
from updates import gradient_of, load_random
from worlds.models import Plain, Residual

from dppo.errors import ConfigError
from dppo.hosts.plans import sampler_plan
from dppo.hosts.sampler_builder import build_sampler
from dppo.ppo.acting.agent import PPOAgent
from dppo.ppo.exchange.inputs import each_leaf, reader_of
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.networks.choice import choose_network, learning_network
from dppo.ppo.networks.network import NetworkSpec, RecurrentInputs
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.spaces.actions import Actions, DiscreteActions, NestedActions
from dppo.spaces.spaces import Categories, Spaces, leaves

Make = Callable[[Actions, str], NetworkSpec]
TOLERANCE = {"float32": 3e-5, "float64": 1e-11}
VECTOR = np.dtype((np.float32, (2, 2)))
LONG = np.dtype((np.float32, (111,)))
IMAGE = np.dtype((np.uint8, (8, 8, 3)))
NEST = np.dtype([("camera", IMAGE), ("speed", "<f4", (2,))])
BITS = ("bits", np.int8, (2, 3, 4))
BYTES = ("bytes", np.uint8, (1, 2, 2, 3, 4))
NO_IMAGES = np.dtype([BITS, BYTES])
ACTIONS: dict[str, Actions] = {
    "discrete": DISCRETE,
    "box": BOX,
    "joint": NestedActions((DiscreteActions(3), BOX), None),
}


def chosen(obs: np.dtype[Any], **settings: Any) -> Make:
    def make(actions: Actions, dtype: str) -> NetworkSpec:
        config = make_config({"env_id": "Test-v0", "dtype": dtype, **settings})
        spaces = Spaces(obs, actions)
        return choose_network(config.network, spaces).spec

    return make


def memory(obs: np.dtype[Any], kind: str, size: int | None = None, **settings: Any) -> Make:
    """Return a network with a memory of this size, or of the size of the settings' default."""
    sizes = {} if size is None else {"memory_size": size}
    return chosen(obs, memory=kind, **sizes, **settings)


def encoder(kind: str) -> Make:
    def make(actions: Actions, dtype: str) -> NetworkSpec:
        config = config_of(kind, dtype=dtype)
        built = build_sampler(sampler_plan(config), 0)
        spaces = replace(built.spaces, actions=actions)
        network = plan_of(config, actions).network
        return choose_network(network, spaces).spec

    return make


ENCODED = [kind for kind in KINDS if kind not in ("own module", "normalized everything")]
MLPS = {
    "mlp": chosen(VECTOR, hidden_sizes=(64, 64)),
    "mlp without hidden layers": chosen(VECTOR, hidden_sizes=()),
    "mlp of one layer": chosen(VECTOR, hidden_sizes=(32,), activation="relu"),
    "mlp of three layers": chosen(VECTOR, hidden_sizes=(64, 64, 16)),
    "wide mlp": chosen(LONG, hidden_sizes=(512, 7)),
    "bytes that are no image": chosen(NO_IMAGES),
}
RELU = {"hidden_sizes": (16,), "activation": "relu"}
WITH_MEMORY = {
    "gru": memory(VECTOR, "gru", 6, hidden_sizes=(7, 5)),
    "gru alone": memory(VECTOR, "gru", 5, hidden_sizes=()),
    "gru with layer norm": memory(VECTOR, "gru", 5, layer_norm=True),
    "dict and gru": memory(NEST, "gru", 6, image_features=12),
    "lstm": memory(VECTOR, "lstm", 8, **RELU),
    "wide lstm": memory(LONG, "lstm"),
    "shared lstm": memory(VECTOR, "lstm", 6, trunk="shared"),
    "image and lstm": memory(IMAGE, "lstm", 6, image_features=12),
}
MODULES = {
    "module": chosen(VECTOR, model=Plain, model_kwargs={"units": 24}),
    "residual module": chosen(VECTOR, model=Residual, model_kwargs={"blocks": 2}),
    "module with memory": chosen(VECTOR, model=own.Running, sequence_length=4),
    "module with memory for a dict": chosen(NEST, model=own.Running, sequence_length=4),
}
ENCODERS = {kind: encoder(kind) for kind in ENCODED}
NETWORKS: dict[str, Make] = MLPS | WITH_MEMORY | MODULES | ENCODERS
networks = pytest.mark.parametrize("network", NETWORKS)
HEADS = [("discrete", "float32"), ("box", "float64")]
CASES = [(network, *head) for network in NETWORKS for head in HEADS]
CASES += [(network, "joint", "float32") for network in ("mlp", "module", "gru")]
cases = pytest.mark.parametrize(("network", "actions", "dtype"), CASES)


def spec_of(network: str, actions: str, dtype: str) -> NetworkSpec:
    return NETWORKS[network](ACTIONS[actions], dtype)


def random_numbers(
    leaf: np.ndarray, categories: Categories | None, rng: np.random.Generator
) -> np.ndarray:
    """Return numbers of the kind and shape of a leaf."""
    if categories is not None:
        width = len(categories.counts)
        codes = rng.integers(categories.counts, size=(leaf.size // width, width))
        return (codes + categories.starts).reshape(leaf.shape)
    if leaf.dtype.kind == "f":
        return 3 * rng.normal(size=leaf.shape)
    if leaf.dtype == np.uint8:
        return rng.integers(0, 256, leaf.shape)
    return rng.integers(0, 2, leaf.shape)


def observations(spec: NetworkSpec, *shape: int) -> np.ndarray:
    rng = default_rng(4)
    obs = np.zeros(shape, spec.spaces.obs)
    for name, leaf in leaves(obs).items():
        categories = spec.spaces.categories.get(name)
        leaf[...] = random_numbers(leaf, categories, rng)
    return obs


def states_of(spec: NetworkSpec, *shape: int) -> np.ndarray | None:
    if not spec.state_size:
        return None
    states = default_rng(3).normal(size=(*shape, spec.state_size))
    return states.astype(spec.dtype)


def noise_of(agent: PPOAgent, seed: int, samplers: int, rows: int) -> np.ndarray:
    return agent.distribution.noise(default_rng(seed), samplers, rows, agent.spec.dtype)


def sequences(by_step: np.ndarray) -> np.ndarray:
    """Return an array [T, E, ...] as a batch holds it: [E * T, ...], sequence by sequence."""
    by_env = by_step.swapaxes(0, 1)
    return np.ascontiguousarray(by_env.reshape(-1, *by_env.shape[2:]))


def inputs_of(
    spec: NetworkSpec, obs: np.ndarray, state: np.ndarray | None, starts: np.ndarray
) -> tuple[Any, RecurrentInputs | None]:
    """Return what a network learns from: observations [T, E] and, if it has memory, its state and `starts`."""
    reader = reader_of(spec.spaces.obs, spec.dtype)
    inputs = each_leaf(reader.read(obs), lambda leaf: from_numpy(sequences(leaf)))
    if state is None:
        return inputs, None
    by_env = starts.T.copy()
    return inputs, RecurrentInputs(from_numpy(state), from_numpy(by_env))


class Acted(NamedTuple):
    """The actions of a step, and the outputs of the network."""

    actions: np.ndarray
    head: np.ndarray
    values: np.ndarray


def act(agent: PPOAgent, obs: np.ndarray, starts: np.ndarray, first: np.ndarray | None) -> Acted:
    """Act for T steps of E environments, and return the columns as a batch holds them."""
    state = first
    steps = []
    for number, step_obs in enumerate(obs):
        if state is not None:
            state = np.where(starts[number, :, None], np.zeros_like(state), state)
        before = copy.copy(state)
        noise = noise_of(agent, number, 1, len(step_obs))
        actions, outputs = agent.act(step_obs, noise[0], state)
        best, _ = agent.decide(step_obs, state)
        assert_array_equal(best, agent.distribution.mode(outputs.head))
        values = agent.outputs(step_obs, state).values
        assert_array_equal(values, outputs.values)
        assert_same_bytes(state, before)

        steps.append(Acted(actions, outputs.head, outputs.values))
        state = outputs.state
        assert (state is None) == (first is None)
        if state is not None:
            assert state.dtype == agent.spec.dtype
            assert state.shape == (len(step_obs), agent.spec.state_size)

    columns = [sequences(np.stack(column)) for column in zip(*steps, strict=True)]
    return Acted(*columns)


@cases
def test_acting_step_by_step_equals_learning_over_sequences(
    network: str, actions: str, dtype: str
) -> None:
    """Episodes start inside the sequences; actors set the state to zero there, learners get their positions."""
    spec = spec_of(network, actions, dtype)
    agent = agent_of(spec, spread=0.1)
    model = PPOModel(spec, seed=9)
    load_random(model.network, spec, scale=0.1)
    obs = observations(spec, 12, 3)
    starts = default_rng(2).random((12, 3)) < 0.2
    first = states_of(spec, 3)

    acted = act(agent, obs, starts, first)
    logprobs = agent.distribution.log_prob(acted.head, acted.actions)
    assert acted.head.dtype == dtype
    assert acted.values.dtype == dtype
    assert logprobs.dtype == dtype

    inputs, recurrent = inputs_of(spec, obs, first, starts)
    head, values, _ = model.network.forward(inputs, recurrent)
    tolerance = TOLERANCE[dtype]
    assert_allclose(acted.head, head, rtol=tolerance, atol=tolerance)
    assert_allclose(acted.values, values, rtol=tolerance, atol=tolerance)

    scored = model.forward(inputs, from_numpy(acted.actions), recurrent=recurrent)
    learned = scored.policy.logprobs
    assert_allclose(logprobs, learned, rtol=tolerance, atol=20 * tolerance)


@networks
def test_gradients_are_finite_differences(network: str) -> None:
    """Of the largest and of another element of each parameter, for a loss that depends on all outputs."""
    spec = spec_of(network, "joint", "float64")
    learning = learning_network(spec, 3)
    if spec.state_size:
        load_random(learning, spec)
    starts = np.zeros((5, 2), bool)
    starts[3, 1] = True
    obs = observations(spec, 5, 2)
    inputs, recurrent = inputs_of(spec, obs, states_of(spec, 2), starts)
    weights = learning.parameters.weights.data

    def loss() -> float:
        head, values, _ = learning.forward(inputs, recurrent)
        total = head.square().sum() + values.exp().sum()
        return float(total)

    def difference(index: int) -> float:
        weight = weights[index].item()
        weights[index] = weight + 1e-6
        higher = loss()
        weights[index] = weight - 1e-6
        lower = loss()
        weights[index] = weight
        return (higher - lower) / 2e-6

    gradient = gradient_of(learning, inputs, recurrent=recurrent)
    start = 0
    for name, shape in spec.shapes.items():
        size = math.prod(shape)
        part = gradient[start : start + size]
        if name == "frozen":
            assert not part.any()
        else:
            largest = int(np.abs(part).argmax())
            another = int(default_rng(start).integers(size))
            for index in (largest, another):
                expected = difference(start + index)
                assert part[index] == pytest.approx(expected, rel=1e-3, abs=2e-5), name
        start += size


SAMPLERS_AND_ROWS = [(1, 2), (2, 1), (3, 5), (8, 2), (2, 33)]


def sampler_rows(array: np.ndarray | None, sampler: int) -> np.ndarray | None:
    """Return the rows of a sampler, of outputs that the network has."""
    if array is None:
        return None
    return array[sampler]


@cases
def test_samplers_that_act_together_get_the_bits_of_each_alone(
    network: str, actions: str, dtype: str
) -> None:
    """A row of a larger product would differ in the last bits."""
    spec = spec_of(network, actions, dtype)
    agent = agent_of(spec, spread=0.1)

    def answers(obs: Any, noise: Any, state: Any) -> list[Any]:
        drawn, outputs = agent.act(obs, noise, state)
        best, _ = agent.decide(obs, state)
        values = agent.outputs(obs, state).values
        return [drawn, *outputs, best, values]

    for samplers, rows in SAMPLERS_AND_ROWS:
        obs = observations(spec, samplers, rows)
        noise = noise_of(agent, 1, samplers, rows)
        states = states_of(spec, samplers, rows)
        together = answers(obs, noise, states)
        for sampler in range(samplers):
            state = sampler_rows(states, sampler)
            alone = answers(obs[sampler], noise[sampler], state)
            for stacked, expected in zip(together, alone, strict=True):
                rows_of_sampler = sampler_rows(stacked, sampler)
                assert_same_bytes(rows_of_sampler, expected)


@pytest.mark.parametrize(
    ("network", "dtype"), [*((network, "float32") for network in NETWORKS), ("mlp", "float64")]
)
def test_parameters_follow_from_description_and_seed(network: str, dtype: str) -> None:
    """Flat weights and named parameters are the same numbers; torch's global state and default dtype have no effect."""
    spec = spec_of(network, "joint", dtype)
    obs = observations(spec, 2)

    def weights_of(seed: int) -> np.ndarray:
        return learning_network(spec, seed).parameters.weights.numpy(force=True)

    def values_of_agent() -> np.ndarray:
        return agent_of(spec).outputs(obs, states_of(spec, 2)).values

    global_state = torch.get_rng_state()
    weights = weights_of(3)
    assert torch.equal(torch.get_rng_state(), global_state)
    assert weights.shape == (spec.num_parameters,)
    assert weights.dtype == dtype

    named = spec.unflatten(weights)
    shapes = {name: array.shape for name, array in named.items()}
    assert shapes == dict(spec.shapes)

    in_other_order = dict(reversed(named.items()))
    assert_array_equal(spec.flatten(in_other_order), weights)

    values = values_of_agent()
    torch.rand(10)
    torch.set_default_dtype(torch.float64)  # as an environment in the same process may do
    again = weights_of(3)
    other = weights_of(4)
    values_again = values_of_agent()
    torch.set_default_dtype(torch.float32)
    assert_array_equal(again, weights)
    assert_array_equal(values_again, values)
    assert not np.array_equal(other, weights)

    same = spec_of(network, "joint", dtype)
    assert same == spec
    assert same.as_json() == spec.as_json()

    other_dtype = "float32" if dtype == "float64" else "float64"
    assert spec_of(network, "joint", other_dtype) != spec


def assert_orthogonal(weights: np.ndarray, gain: float, atol: float) -> None:
    """Check the products of all rows or, if these are fewer, of all columns."""
    outputs, inputs = weights.shape
    rows = weights
    if outputs > inputs:
        rows = weights.T
    expected = gain**2 * np.eye(len(rows))
    assert_allclose(rows @ rows.T, expected, atol=atol)


@pytest.mark.parametrize("kind", ENCODED)
def test_encoders_and_heads_begin_with_the_gains_of_the_method(kind: str) -> None:
    spec = spec_of(kind, "box", "float32")
    network = learning_network(spec, 3)
    weights = network.parameters.weights.numpy(force=True)
    named = spec.unflatten(weights)
    assert_orthogonal(named["policy.weight"], 0.01, atol=1e-6)
    value = named["value.weight"]
    assert_allclose(np.linalg.norm(value), 1, rtol=1e-4)
    assert not named["policy.bias"].any()
    assert not named["value.bias"].any()
    for name, array in named.items():
        if name.endswith(("hidden.0.weight", "last.0.weight")):
            assert_orthogonal(array, math.sqrt(2), atol=1e-4)


def test_a_state_that_a_module_returns_is_not_a_view_of_its_own() -> None:
    spec = spec_of("module with memory", "discrete", "float32")
    agent = agent_of(spec)
    first_obs, second_obs = observations(spec, 2, 1)
    _, outputs = agent.decide(first_obs, agent.start(1))
    state = outputs.state
    assert state is not None

    state_before = state.copy()
    agent.decide(second_obs, state)
    assert_array_equal(state, state_before)


REFUSED: list[tuple[type[nn.Module], str]] = [
    (own.Backward, "its head of a sequence differ from those of its steps one after the other"),
    (own.NoState, "returned a tuple of Tensor, Tensor. Return three tensors, head, values and state"),
    (own.WideState, "returned state of shape (3, 16), not (3, 8): [rows, state_size], after the last step"),
    (own.MeanState, "depend on the other rows of the batch"),
    (own.OddSize, "its state_size is (8,). It must be the number of elements"),
    (own.OneStep, "forward(obs, state, starts), with obs of shape (4, 3, 2, 2) and torch.float32, state of"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "words"), REFUSED)
def test_a_module_that_breaks_the_contract_is_refused(model: type[nn.Module], words: str) -> None:
    spec = ModuleSpec(Spaces(VECTOR, DISCRETE), model, {}, "float32")
    with pytest.raises(ConfigError) as caught:
        _ = spec.shapes
    message = str(caught.value)
    assert message.startswith(f"model=worlds.memory_models:{model.__name__}: ")
    assert words in message
    assert len(message.splitlines()) == 1


def test_a_snapshot_is_copied_and_one_without_statistics_turns_normalization_off() -> None:
    spec = spec_of("mlp", "box", "float64")
    agent = PPOAgent(spec)
    weights = random_weights(spec)
    mean = np.array([[0.5, -1.0], [100.0, 0.0]])
    std = np.full((2, 2), 3.0)
    agent.load(PolicySnapshot(0, weights, ObsScale(mean, std)))
    obs = observations(spec, 5)
    before = agent.outputs(obs).values
    assert_array_equal(weights, random_weights(spec))
    assert_array_equal(obs, observations(spec, 5))

    for array in (weights, mean):
        array.flags.writeable = True
        array[:] = 7  # as an update in the same process would
    assert_array_equal(agent.outputs(obs).values, before)

    agent.load(PolicySnapshot(1, random_weights(spec)))
    without_scale = agent_of(spec)
    assert_array_equal(agent.outputs(obs).values, without_scale.outputs(obs).values)


def test_weights_of_another_network_are_refused() -> None:
    spec = spec_of("mlp", "discrete", "float64")
    with pytest.raises(ValueError, match=r"got 1,00\d weights, this network has"):
        spec.unflatten(np.zeros(1003))

    named = spec.unflatten(random_weights(spec))
    missing = dict(named)
    del missing["value.4.bias"]
    with pytest.raises(ValueError, match=r"value\.4\.bias has shape None, this network has \(1,\)"):
        spec.flatten(missing)

    unexpected = named | {"log_std": np.zeros(2)}
    with pytest.raises(ValueError, match=r"log_std has shape \(2,\), this network has None"):
        spec.flatten(unexpected)

    transposed = named["policy.0.weight"].T
    with pytest.raises(ValueError, match=r"policy\.0\.weight has shape \(4, 64\)"):
        spec.flatten(named | {"policy.0.weight": transposed})
