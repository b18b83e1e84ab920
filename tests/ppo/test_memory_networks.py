"""Networks with memory: acting step by step equals learning over sequences, and the contract of a user's own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import network_checks as checks
import numpy as np
import pytest
import torch
import worlds.memory_models as own
from builders import BOX, DISCRETE, agent_of, make_config
from torch import Tensor, nn

from dppo.errors import ConfigError
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.networks.choice import choose_network, learning_network
from dppo.ppo.networks.network import NetworkSpec, RecurrentInputs
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.spaces.actions import Actions
from dppo.spaces.spaces import Spaces

STEPS = 12
ENVS = 3
TOLERANCE = {"float32": 3e-5, "float64": 1e-11}
VECTOR = np.dtype((np.float32, (2, 2)))
IMAGE = np.dtype((np.uint8, (8, 8, 3)))
NEST = np.dtype([("camera", IMAGE), ("speed", "<f4", (2,))])
ACTIONS: dict[str, Actions] = {"discrete": DISCRETE, "box": BOX}


def chosen(obs: np.dtype[Any], **settings: Any) -> Callable[[Actions, str], NetworkSpec]:
    def spec(actions: Actions, dtype: str) -> NetworkSpec:
        config = make_config({"env_id": "Test-v0", "dtype": dtype, **settings})
        return choose_network(config.network, Spaces(obs, actions)).spec

    return spec


NETWORKS = {
    "gru": chosen(VECTOR, memory="gru", hidden_sizes=(7, 5), memory_size=6),
    "lstm": chosen(VECTOR, memory="lstm", hidden_sizes=(16,), activation="relu", memory_size=8),
    "shared lstm": chosen(VECTOR, memory="lstm", trunk="shared", memory_size=6),
    "gru alone": chosen(VECTOR, memory="gru", hidden_sizes=(), memory_size=5),
    "gru with layer norm": chosen(VECTOR, memory="gru", layer_norm=True, memory_size=5),
    "image and lstm": chosen(IMAGE, memory="lstm", image_features=12, memory_size=6),
    "dict and gru": chosen(NEST, memory="gru", image_features=12, memory_size=6),
    "own module": chosen(VECTOR, model=own.Running, sequence_length=4),
    "own module for a dict": chosen(NEST, model=own.Running, sequence_length=4),
}
networks = pytest.mark.parametrize("network", NETWORKS)
spaces_and_dtypes = pytest.mark.parametrize(
    ("actions", "dtype"), [("discrete", "float32"), ("box", "float64")]
)


def observations(obs: np.dtype[Any], *shape: int) -> np.ndarray:
    rng = np.random.default_rng(4)
    made = np.zeros(shape, obs)
    for name in obs.names or [None]:
        leaf = made if name is None else made[name]
        leaf[...] = (
            rng.integers(0, 256, leaf.shape)
            if leaf.dtype == np.uint8
            else rng.normal(size=leaf.shape) * 3
        )
    return made


def obs_of(network: str) -> np.dtype[Any]:
    return NEST if "dict" in network else IMAGE if "image" in network else VECTOR


def as_rows(obs: np.ndarray, dtype: str) -> Any:
    """Return observations [T, E] as a batch holds them: [E * T, *O], sequence by sequence."""
    swapped = obs.swapaxes(0, 1)

    def tensor(leaf: np.ndarray) -> Tensor:
        flat = leaf.reshape(-1, *leaf.shape[2:])
        return torch.from_numpy(
            np.ascontiguousarray(flat if leaf.dtype == np.uint8 else flat.astype(dtype))
        )

    return (
        {name: tensor(swapped[name]) for name in obs.dtype.names}
        if obs.dtype.names
        else tensor(swapped)
    )


@networks
@spaces_and_dtypes
def test_acting_step_by_step_equals_learning_over_sequences(
    network: str, actions: str, dtype: str
) -> None:
    """Episodes start inside the sequences; actors set the state to zero there, and learners are told where."""
    spec = NETWORKS[network](ACTIONS[actions], dtype)
    agent = agent_of(spec)
    model = PPOModel(spec, seed=9)
    checks.load_random(model.network, spec)
    obs = observations(obs_of(network), STEPS, ENVS)
    starts = np.random.default_rng(2).random((STEPS, ENVS)) < 0.2
    first = state = np.random.default_rng(3).normal(size=(ENVS, spec.state_size)).astype(dtype)
    heads = []
    values = []
    drawn = []
    for t in range(STEPS):
        state = np.where(starts[t, :, None], spec.state_size * 0, state).astype(dtype)
        noise = agent.distribution.noise(np.random.default_rng(t), 1, ENVS, dtype)[0]
        sampled, decided = agent.act(obs[t], noise, state)
        np.testing.assert_array_equal(agent.values(obs[t], state), decided.values)
        heads.append(decided.head)
        values.append(decided.values)
        drawn.append(sampled)
        assert decided.state is not None
        assert decided.state.shape == (ENVS, spec.state_size)
        state = decided.state
        assert {str(array.dtype) for array in (decided.head, decided.values, state)} == {dtype}

    recurrent = RecurrentInputs(torch.from_numpy(first), torch.from_numpy(starts.T.copy()))
    rows = as_rows(obs, dtype)
    chosen = torch.from_numpy(np.stack(drawn, axis=1).reshape(ENVS * STEPS, *drawn[0].shape[1:]))
    scored = model.forward(rows, chosen, recurrent=recurrent)
    head, learned, _ = model.network.forward(rows, recurrent)
    tolerance = TOLERANCE[dtype]
    for acted, expected in ((heads, head), (values, learned)):
        joined = np.stack(acted, axis=1).reshape(ENVS * STEPS, *acted[0].shape[1:])
        np.testing.assert_allclose(joined, expected, rtol=tolerance, atol=tolerance)
    logprobs = agent.distribution.log_prob(
        np.stack(heads, axis=1), np.stack(drawn, axis=1)
    ).reshape(-1)
    np.testing.assert_allclose(
        logprobs, scored.policy.logprobs, rtol=tolerance, atol=20 * tolerance
    )


@networks
def test_gradients_are_finite_differences(network: str) -> None:
    spec = NETWORKS[network](DISCRETE, "float64")
    learning = learning_network(spec, 3)
    checks.load_random(learning, spec)
    obs = as_rows(observations(obs_of(network), 5, 2), "float64")
    states = torch.randn(
        (2, spec.state_size), generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    starts = torch.zeros((2, 5), dtype=torch.bool)
    starts[1, 3] = True
    recurrent = RecurrentInputs(states, starts)
    sizes = [int(np.prod(shape)) for shape in spec.shapes.values()]
    # start and size of each parameter
    of_each = zip(np.cumsum([0, *sizes[:-1]]), sizes, strict=True)
    drawn = [int(start + np.random.default_rng(start).integers(size)) for start, size in of_each]
    gradient = checks.gradient_of(learning, obs, recurrent=recurrent)
    checks.gradient_by_differences(gradient, learning, obs, drawn, recurrent=recurrent, atol=2e-5)


@networks
@spaces_and_dtypes
def test_samplers_that_act_together_get_the_bits_of_each_alone(
    network: str, actions: str, dtype: str
) -> None:
    agent = agent_of(NETWORKS[network](ACTIONS[actions], dtype))
    for samplers, rows in ((1, 2), (2, 1), (3, 5), (8, 2)):
        obs = observations(obs_of(network), samplers, rows)
        state = (
            np.random.default_rng(1).normal(size=(samplers, rows, agent.state_size)).astype(dtype)
        )
        checks.acting_together(agent, obs, state)


@networks
@spaces_and_dtypes
def test_parameters_follow_from_description_and_seed(
    network: str, actions: str, dtype: str
) -> None:
    checks.parameters_of(partial(NETWORKS[network], ACTIONS[actions]), dtype)


def test_a_state_that_a_module_returns_is_not_a_view_of_its_own() -> None:
    spec = NETWORKS["own module"](DISCRETE, "float32")
    agent = agent_of(spec)
    obs = observations(VECTOR, 2, 1)
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
