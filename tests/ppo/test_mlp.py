"""The default network in torch: its initial weights, their order, and their flat vector."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from builders import BOX, DISCRETE, random_weights, spec_of
from mlp_twin import MLP, initial_mlp
from torch import nn

from dppo.ppo.networks.default.mlp import MLPSpec
from dppo.ppo.networks.parameters import FlatParameters
from dppo.spaces.actions import BoxActions, DiscreteActions

ACTIONS = pytest.mark.parametrize("actions", [DISCRETE, BOX], ids=["discrete", "box"])
HIDDEN = pytest.mark.parametrize("hidden_sizes", [(), (32,), (64, 64, 16)], ids=str)


def arrays(model: MLP) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


@ACTIONS
@HIDDEN
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_shapes_are_those_of_the_module(
    actions: DiscreteActions | BoxActions, hidden_sizes: tuple[int, ...], dtype: str
) -> None:
    spec = spec_of(actions, hidden_sizes=hidden_sizes, dtype=dtype)
    found = arrays(initial_mlp(spec, seed=1))
    assert {name: array.shape for name, array in found.items()} == spec.shapes()
    assert {str(array.dtype) for array in found.values()} == {dtype}
    assert spec.num_parameters == sum(array.size for array in found.values())


@ACTIONS
@HIDDEN
def test_the_flat_vector_has_the_order_of_the_spec(
    actions: DiscreteActions | BoxActions, hidden_sizes: tuple[int, ...]
) -> None:
    """Agents, checkpoints and the optimizer read this vector; another order would scramble every policy."""
    spec = spec_of(actions, hidden_sizes=hidden_sizes)
    model, weights = initial_mlp(spec, seed=1), random_weights(spec)
    model.load_state_dict({name: torch.from_numpy(array) for name, array in spec.unflatten(weights).items()})
    np.testing.assert_array_equal(FlatParameters(model.ordered_parameters()).weights.detach(), weights)


@ACTIONS
def test_flatten_undoes_unflatten(actions: DiscreteActions | BoxActions) -> None:
    spec = spec_of(actions)
    weights = random_weights(spec)
    named = spec.unflatten(weights)
    np.testing.assert_array_equal(spec.flatten(named), weights)
    backwards = dict(reversed(named.items()))  # a file may list them in any order
    np.testing.assert_array_equal(spec.flatten(backwards), weights)
    assert spec.flatten(named) is not weights


def test_weights_of_another_network_are_refused() -> None:
    spec = spec_of()
    with pytest.raises(ValueError, match=r"got 1,00\d weights, this network has"):
        spec.unflatten(np.zeros(1003))
    named = spec.unflatten(random_weights(spec))
    with pytest.raises(ValueError, match=r"value\.4\.bias has shape None, this network has \(1,\)"):
        spec.flatten({name: array for name, array in named.items() if name != "value.4.bias"})
    with pytest.raises(ValueError, match=r"log_std has shape \(2,\), this network has None"):
        spec.flatten(named | {"log_std": np.zeros(2)})
    with pytest.raises(ValueError, match=r"policy\.0\.weight has shape \(4, 16\)"):
        spec.flatten(named | {"policy.0.weight": named["policy.0.weight"].T})


@ACTIONS
@pytest.mark.parametrize("hidden_sizes", [(32,), (8, 64, 16)], ids=str)
def test_initial_weights_are_orthogonal_with_the_gains_of_the_paper_code(
    actions: DiscreteActions | BoxActions, hidden_sizes: tuple[int, ...]
) -> None:
    found = arrays(initial_mlp(spec_of(actions, hidden_sizes=hidden_sizes), seed=5))
    last = 2 * len(hidden_sizes)
    gains = {f"policy.{last}.weight": 0.01, f"value.{last}.weight": 1.0}
    for name, array in found.items():
        if array.ndim == 1:
            np.testing.assert_array_equal(array, 0, err_msg=name)
            continue
        wide = array if array.shape[0] <= array.shape[1] else array.T
        gain = gains.get(name, math.sqrt(2))
        np.testing.assert_allclose(wide @ wide.T, gain**2 * np.eye(len(wide)), atol=1e-5 * gain**2, err_msg=name)
    assert ("log_std" in found) == isinstance(actions, BoxActions)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_initial_weights_are_drawn_from_the_seed_in_a_fixed_order(dtype: str) -> None:
    """One generator; the policy trunk from the first layer to the head, then the value trunk; in float32."""
    found = arrays(initial_mlp(spec_of(hidden_sizes=(16, 8), dtype=dtype), seed=42))
    generator = torch.Generator().manual_seed(42)
    for trunk, outputs, head_gain in (("policy", 3, 0.01), ("value", 1, 1.0)):
        sizes = (4, 16, 8, outputs)
        for layer, (inputs, units) in enumerate(pairwise(sizes)):
            gain = head_gain if layer == 2 else math.sqrt(2)
            drawn = nn.init.orthogonal_(torch.empty(units, inputs), gain, generator=generator)
            np.testing.assert_array_equal(found[f"{trunk}.{2 * layer}.weight"], drawn.numpy().astype(dtype))


def test_global_generator_is_neither_used_nor_changed() -> None:
    before = torch.get_rng_state()
    one = arrays(initial_mlp(spec_of(BOX), seed=3))
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(10)
    two, other = arrays(initial_mlp(spec_of(BOX), seed=3)), arrays(initial_mlp(spec_of(BOX), seed=4))
    for name in one:
        np.testing.assert_array_equal(one[name], two[name])
    assert not np.array_equal(one["policy.0.weight"], other["policy.0.weight"])


def loss_of(model: MLP, obs: torch.Tensor) -> torch.Tensor:
    """Return a number that depends on all parameters."""
    head, values = model(obs)
    loss: torch.Tensor = head.square().sum() + head.exp().sum() + values.sum()
    return loss


def flat_model(spec: MLPSpec) -> tuple[MLP, FlatParameters]:
    model = initial_mlp(spec, seed=1)
    return model, FlatParameters(model.ordered_parameters())


@ACTIONS
def test_parameters_stay_views_of_the_flat_vector_while_they_are_trained(actions: DiscreteActions | BoxActions) -> None:
    spec = spec_of(actions)
    model, flat = flat_model(spec)
    optimizer = torch.optim.Adam([flat.weights], lr=0.1, fused=True)
    for _ in range(3):
        before = flat.weights.detach().clone()
        flat.gradient.zero_()
        loss_of(model, torch.ones(6, 4, dtype=torch.float64)).backward()
        optimizer.step()
        assert not torch.equal(before, flat.weights)
        named = spec.unflatten(flat.weights.detach().numpy())
        gradients = spec.unflatten(flat.gradient.numpy())
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            np.testing.assert_array_equal(parameter.detach(), named[name], err_msg=name)
            np.testing.assert_array_equal(parameter.grad, gradients[name], err_msg=name)
            assert parameter.data_ptr() == torch.from_numpy(named[name]).data_ptr(), name
    assert flat.weights.grad is flat.gradient
    assert float(flat.gradient.norm()) > 0


@ACTIONS
def test_flat_gradient_is_that_of_autograd(actions: DiscreteActions | BoxActions) -> None:
    spec = spec_of(actions)
    model, flat = flat_model(spec)
    plain = initial_mlp(spec, seed=1)
    obs = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 4)))
    for one in (model, plain):
        loss_of(one, obs).backward()
    expected = spec.flatten({name: p.grad.numpy() for name, p in plain.named_parameters() if p.grad is not None})
    np.testing.assert_allclose(flat.gradient, expected, rtol=1e-12, atol=1e-15)
