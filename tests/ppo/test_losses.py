"""Losses and Adam against slow twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import BOX, spec_of
from numpy.random import default_rng
from numpy.testing import assert_allclose
from torch import Tensor, from_numpy

from dppo.ppo.learning import losses
from dppo.ppo.learning.adam import FlatAdam
from dppo.ppo.learning.model import free_deviations
from dppo.ppo.networks.parameters import FlatParameters


def normal(rows: int, seed: int, scale: float = 1.0) -> Tensor:
    rng = default_rng(seed)
    numbers = rng.normal(size=rows)
    return from_numpy(numbers * scale)


def slow_policy_loss(advantages: Tensor, ratio: Tensor, clipped: Tensor) -> Tensor:
    loss = -advantages * ratio
    clipped_loss = -advantages * clipped
    larger = torch.max(loss, clipped_loss)
    return larger.mean()


def assert_some_are_clipped(gradient: Tensor) -> None:
    """A row that is clipped has the gradient zero."""
    is_clipped = gradient == 0
    assert is_clipped.any()
    assert not is_clipped.all()


@pytest.mark.proves("policy_loss")
@pytest.mark.parametrize("clip_coef", [0.01, 0.2, 0.9])
def test_policy_gradient_is_that_of_autograd(clip_coef: float) -> None:
    log_ratio = normal(500, 1, 0.3).requires_grad_()
    advantages = normal(500, 2)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    expected = slow_policy_loss(advantages, ratio, clipped)
    expected.backward()

    loss, gradient = losses.policy_loss(ratio.detach(), advantages, clip_coef)
    assert_allclose(loss, expected.detach(), rtol=1e-12)
    assert log_ratio.grad is not None
    assert_allclose(gradient, log_ratio.grad, rtol=1e-12)
    assert_some_are_clipped(gradient)


@pytest.mark.proves("policy_loss")
def test_a_loss_of_rows_of_older_policies_is_clipped_around_the_ratio_of_the_newest() -> None:
    """GePPO's objective (arXiv:2111.00072, eq. 9) is PPO's with advantages and clips of their own for the rows."""
    width = 0.1
    new = normal(500, 0, 0.3).requires_grad_()
    now = normal(500, 1, 0.3)
    old = normal(500, 2, 0.3)
    advantages = normal(500, 3)
    ratio = (new - old).exp()
    center = (now - old).exp()
    clipped = ratio.clamp(center - width, center + width)
    expected = slow_policy_loss(advantages, ratio, clipped)
    expected.backward()

    log_ratio = (new - now).detach()
    ratio_to_newest = log_ratio.exp()
    weighted = advantages * center
    clips = width / center
    loss, gradient = losses.policy_loss(ratio_to_newest, weighted, clips)
    assert_allclose(loss, expected.detach(), rtol=1e-12)
    assert new.grad is not None
    assert_allclose(gradient, new.grad, rtol=1e-9, atol=1e-12)
    assert_some_are_clipped(gradient)


@pytest.mark.proves("value_loss")
def test_value_loss_is_half_the_mean_squared_error() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    returns = torch.tensor([2.0, 2.0, 0.0])
    loss, gradient = losses.value_loss(values, returns)

    squared_errors = 1 + 0 + 9
    expected = squared_errors / 3 / 2
    assert loss.item() == pytest.approx(expected)
    assert_allclose(gradient, [-1 / 3, 0, 1])


@pytest.mark.parametrize("moved", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipped_value_gradient_is_that_of_autograd(moved: float, dtype: torch.dtype) -> None:
    """Also where nothing is clipped, although old + (new - old) differs from new in the last bits."""
    clip_coef = 0.2
    values = normal(2000, 6).to(dtype)
    returns = normal(2000, 7).to(dtype)
    step = normal(2000, 5, moved).to(dtype)
    old = values - step
    values.requires_grad_()

    change = values - old
    clipped = old + change.clamp(-clip_coef, clip_coef)
    is_rounded = (clipped != values) & (change.abs() <= clip_coef)
    assert is_rounded.any()

    errors = (values - returns).square()
    clipped_errors = (clipped - returns).square()
    larger = torch.max(errors, clipped_errors)
    expected = 0.5 * larger.mean()
    expected.backward()

    new = values.detach()
    loss, gradient = losses.clipped_value_loss(new, old, returns, clip_coef)
    assert_allclose(loss, expected.detach(), rtol=1e-5)
    assert values.grad is not None
    assert_allclose(gradient, values.grad, rtol=1e-3, atol=1e-8)
    if moved == 0.01:
        assert (gradient != 0).all()


@pytest.mark.proves("approximate_kl")
def test_approximate_kl_estimates_the_kl_of_two_normals() -> None:
    """KL(N(0, 1) | N(m, 1)) = m^2 / 2, from samples of the first, which is the old policy."""
    m = 0.3
    samples = normal(200_000, 9)
    old_logprobs = -0.5 * samples**2
    logprobs = -0.5 * (samples - m) ** 2
    log_ratio = logprobs - old_logprobs
    ratio = log_ratio.exp()
    kl = losses.approximate_kl(log_ratio, ratio)
    expected = m**2 / 2
    assert kl.item() == pytest.approx(expected, rel=0.02)


@pytest.mark.proves("FlatAdam")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_steps_are_those_of_torch(dtype: str, tolerance: float) -> None:
    spec = spec_of(BOX, dtype=dtype)
    model = spec.mlp(1)
    twin = spec.mlp(1)
    parameters = FlatParameters(model.parameters())
    ours = FlatAdam(parameters)
    theirs = torch.optim.Adam(twin.parameters(), eps=1e-5)
    pairs = list(zip(model.parameters(), twin.parameters(), strict=True))
    rng = default_rng(0)

    def set_gradients() -> None:
        """Each parameter has a size of its gradient of its own."""
        for weights, expected in pairs:
            shape = tuple(weights.shape)
            direction = rng.normal(size=shape)
            size = 10.0 ** rng.integers(-6, 3)
            gradient = from_numpy(direction * size)
            expected.grad = gradient.to(expected.dtype)
            assert weights.grad is not None
            weights.grad.copy_(expected.grad)

    for step in range(60):
        learning_rate = 0.01 / (1 + step)
        theirs.param_groups[0]["lr"] = learning_rate
        set_gradients()
        ours.step(learning_rate)
        theirs.step()

    for weights, expected in pairs:
        moved = weights.detach()
        assert_allclose(moved, expected.detach(), rtol=tolerance, atol=tolerance)


def test_slowed_weights_take_a_share_of_each_step_with_a_longer_memory() -> None:
    """`memory` is 1 / (1 - beta2)."""
    spec = spec_of(BOX, dtype="float64")
    count = spec.num_parameters
    slowed = free_deviations(spec)
    start = torch.arange(count, dtype=torch.float64)
    weights = torch.nn.Parameter(start.clone())
    flat = FlatParameters([weights])
    adam = FlatAdam(flat, memory=4000, slowed=slowed, share=0.25)

    expected = torch.nn.Parameter(start.clone())
    beta2 = 1 - 1 / 4000
    twin = torch.optim.Adam([expected], lr=0.01, betas=(0.9, beta2), eps=1e-5)
    for seed in range(30):
        gradient = normal(count, seed)
        flat.gradient.copy_(gradient)
        expected.grad = gradient
        adam.step(0.01)
        twin.step()

    moved = flat.weights.detach() - start
    moved[slowed] *= 4
    expected_move = expected.detach() - start
    assert_allclose(moved, expected_move, rtol=1e-9, atol=1e-12)


def test_free_deviations_are_the_place_of_log_std() -> None:
    spec = spec_of(BOX)
    places = free_deviations(spec)
    zeros = np.zeros(spec.num_parameters)
    named = spec.unflatten(zeros)
    size = places.stop - places.start
    assert size == named["log_std"].size
    assert size > 0

    discrete = spec_of()
    assert free_deviations(discrete) == slice(0, 0)
