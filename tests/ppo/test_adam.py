"""FlatAdam on one vector against torch's Adam on many tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import BOX, spec_of
from mlp_twin import MLP, initial_mlp

from dppo.ppo.learning.optimizer import FlatAdam
from dppo.ppo.networks.parameters import FlatParameters


def flat(dtype: str) -> tuple[MLP, FlatParameters]:
    model = initial_mlp(spec_of(BOX, dtype=dtype), seed=1)
    return model, FlatParameters(model.ordered_parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_steps_are_those_of_torch(dtype: str, tolerance: float) -> None:
    model, parameters = flat(dtype)
    twin = initial_mlp(model.spec, seed=1)
    ours, theirs = FlatAdam(parameters), torch.optim.Adam(twin.parameters(), eps=1e-5)
    rng = np.random.default_rng(0)
    for step in range(60):
        learning_rate = 0.01 / (1 + step)
        theirs.param_groups[0]["lr"] = learning_rate
        for one, other in zip(model.ordered_parameters(), twin.ordered_parameters(), strict=True):
            gradient = torch.from_numpy(rng.normal(size=tuple(one.shape)) * 10.0 ** rng.integers(-6, 3)).to(one.dtype)
            assert one.grad is not None
            one.grad.copy_(gradient)
            other.grad = gradient.clone()
        ours.step(learning_rate)
        theirs.step()
    for one, other in zip(model.ordered_parameters(), twin.ordered_parameters(), strict=True):
        np.testing.assert_allclose(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def test_first_step_is_the_learning_rate_against_the_gradient() -> None:
    _, parameters = flat("float64")
    before = parameters.weights.detach().clone()
    parameters.gradient.copy_(torch.where(torch.arange(len(before)) % 2 == 0, 3.0, -0.2))
    FlatAdam(parameters).step(0.01)
    moved = parameters.weights.detach() - before
    np.testing.assert_allclose(moved, -0.01 * parameters.gradient.sign(), rtol=1e-4)


def test_a_gradient_of_zero_changes_nothing() -> None:
    _, parameters = flat("float64")
    before = parameters.weights.detach().clone()
    FlatAdam(parameters).step(0.01)
    assert torch.equal(parameters.weights.detach(), before)


def test_an_optimizer_continues_from_a_loaded_state() -> None:
    (_, one), (_, two) = flat("float32"), flat("float32")
    first, second = FlatAdam(one), FlatAdam(two)
    for step in range(3):
        one.gradient.fill_(step - 0.5)
        first.step(0.01)
    state = first.state()
    two.weights.data.copy_(one.weights.data)
    second.load(state)
    for parameters, adam in ((one, first), (two, second)):
        parameters.gradient.fill_(0.3)
        adam.step(0.02)
    assert torch.equal(one.weights, two.weights)
    for name in state:
        np.testing.assert_array_equal(first.state()[name], second.state()[name])
    assert int(first.state()["step"]) == 4
