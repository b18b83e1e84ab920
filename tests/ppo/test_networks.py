"""For every network: acting equals learning, gradients equal autograd's, samplers act together bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import network_checks as checks
import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, agent_of, mlp_of
from torch import nn
from worlds.models import Plain, Residual

from dppo.ppo.exchange.scales import ObsScale
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.networks.choice import learning_network
from dppo.ppo.networks.modules import Autograd, TorchActing
from dppo.ppo.networks.network import NetworkSpec
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.spaces.actions import Actions, DiscreteActions, NestedActions
from dppo.spaces.spaces import Spaces

Sizes = tuple[int, ...]
OBS = (2, 2)
TOLERANCE = {"float32": 2e-5, "float64": 1e-12}
SCALE = ObsScale(np.array([[0.5, -1.0], [100.0, 0.0]]), np.array([[1.0, 2.0], [30.0, 1e-4]]))
ACTIONS: dict[str, Actions] = {
    "discrete": DISCRETE,
    "box": BOX,
    "joint": NestedActions((DiscreteActions(3), BOX), None),
}


def mlp(hidden_sizes: Sizes, activation: str) -> Callable[[Actions, str], NetworkSpec]:
    return lambda actions, dtype: mlp_of(spaces_of(actions), hidden_sizes, activation, dtype)


def module(model: type[nn.Module], **kwargs: int) -> Callable[[Actions, str], NetworkSpec]:
    return lambda actions, dtype: ModuleSpec(spaces_of(actions), model, kwargs, dtype)


def spaces_of(actions: Actions) -> Spaces:
    return Spaces(np.dtype((np.float32, OBS)), actions)


NETWORKS = {
    "mlp": mlp((64, 64), "tanh"),
    "mlp without hidden layers": mlp((), "tanh"),
    "mlp of one layer": mlp((32,), "relu"),
    "mlp of three layers": mlp((64, 64, 16), "tanh"),
    "module": module(Plain, units=24),
    "residual module": module(Residual, blocks=2),
}
networks = pytest.mark.parametrize("network", NETWORKS)
distributions = pytest.mark.parametrize("distribution", ACTIONS)
FLOAT32 = [(distribution, "float32") for distribution in ACTIONS]
heads = pytest.mark.parametrize(("distribution", "dtype"), [*FLOAT32, ("joint", "float64")])
dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


def observations(rows: int, *leading: int) -> np.ndarray:
    return (np.random.default_rng(4).normal(size=(*leading, rows, *OBS)) * 3).astype(np.float32)


@networks
@heads
@pytest.mark.parametrize("norm_obs", [False, True], ids=["raw", "norm_obs"])
def test_acting_equals_learning(
    network: str, distribution: str, dtype: str, norm_obs: bool
) -> None:
    spec = NETWORKS[network](ACTIONS[distribution], dtype)
    scale = SCALE if norm_obs else None
    agent = agent_of(spec, scale)
    model = PPOModel(spec, seed=9)
    obs = observations(9)
    checks.load_random(model.network, spec)
    noise = agent.distribution.noise(np.random.default_rng(1), 1, 9, dtype)[0]
    drawn, (head, values, _) = agent.act(obs, noise)

    x = obs.astype(dtype)
    if scale is not None:
        x = np.clip((x - scale.mean.astype(dtype)) / scale.std.astype(dtype), -10, 10)
    scored = model.forward(torch.from_numpy(x), torch.from_numpy(drawn))
    model_head, model_values, _ = model.network.forward(torch.from_numpy(x))
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(head, model_head, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(values, model_values, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(agent.values(obs), model_values, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(
        agent.distribution.log_prob(head, drawn),
        scored.policy.logprobs,
        rtol=tolerance,
        atol=20 * tolerance,
    )
    assert {
        str(array.dtype) for array in (head, values, agent.distribution.log_prob(head, drawn))
    } == {dtype}
    np.testing.assert_array_equal(agent.decide(obs)[0], agent.distribution.mode(head))
    assert (head.shape, values.shape) == ((9, spec.distribution.head_size), (9,))


@networks
@distributions
def test_gradients_are_finite_differences(network: str, distribution: str) -> None:
    spec = NETWORKS[network](ACTIONS[distribution], "float64")
    learning = learning_network(spec, 3)
    obs = torch.from_numpy(observations(5).astype(np.float64))
    frozen = {name: np.full(shape, name == "frozen") for name, shape in spec.shapes.items()}
    is_frozen = spec.flatten(frozen).astype(bool)
    gradient = checks.gradient_of(learning, obs)
    assert not gradient[is_frozen].any()
    drawn = np.random.default_rng(0).integers(0, spec.num_parameters, 12)
    checks.gradient_by_differences(gradient, learning, obs, drawn[~is_frozen[drawn]], rel=1e-4)


@networks
@heads
def test_samplers_that_act_together_get_the_bits_of_each_alone(
    network: str, distribution: str, dtype: str
) -> None:
    """Compare everything that the agent returns."""
    agent = agent_of(NETWORKS[network](ACTIONS[distribution], dtype), SCALE)
    for samplers, rows in ((1, 2), (2, 1), (3, 5), (8, 2), (8, 16)):
        checks.acting_together(agent, observations(rows, samplers))


@networks
@heads
def test_parameters_follow_from_description_and_seed(
    network: str, distribution: str, dtype: str
) -> None:
    make = partial(NETWORKS[network], ACTIONS[distribution])
    checks.parameters_of(make, dtype)
    expected = agent_of(make(dtype)).values(observations(2))
    with checks.float64_by_default():
        np.testing.assert_array_equal(agent_of(make(dtype)).values(observations(2)), expected)


class _Subclass(nn.Linear):
    """It has torch's forward pass."""


def _hooked(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    layer.register_forward_hook(lambda _, __, output: 2 * output)
    return layer


def _with_a_forward_of_its_own(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    layer.forward = lambda inputs: 3 * nn.Linear.forward(layer, inputs)  # type: ignore[method-assign, assignment]
    return layer


def _transposed(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    layer.weight = nn.Parameter(torch.randn(inputs, outputs).t() / 8)
    return layer


@pytest.mark.parametrize(
    "make", [nn.Linear, _Subclass, _hooked, _with_a_forward_of_its_own, _transposed]
)
@pytest.mark.parametrize("behind", [nn.Tanh, nn.SiLU])
@pytest.mark.parametrize("rows", [1, 8])
def test_actors_and_learners_compute_the_same_bits(
    make: Any, behind: type[nn.Module], rows: int
) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = make(65, 65)
            self.first = nn.Sequential(make(33, 65), behind(), shared, behind())
            self.second = nn.Sequential(shared, behind(), make(65, 4))

        def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = self.second(self.first(obs))
            return outputs[:, :3], outputs[:, 3]

    acting = Own()
    learning = Own()
    learning.load_state_dict(acting.state_dict())
    obs = torch.randn(rows, 33)
    expected = acting(obs)
    outputs = TorchActing(
        acting, acting.parameters(), Spaces(np.dtype((np.float32, (33,))), DiscreteActions(3))
    ).step(obs.numpy())
    head, values, _ = Autograd(learning, learning.parameters()).forward(obs)
    np.testing.assert_array_equal(outputs.head, head.numpy())
    np.testing.assert_array_equal(outputs.values, values.numpy())
    torch.testing.assert_close((head, values), expected)
