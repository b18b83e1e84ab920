"""Losses and Adam against slow twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import BOX, spec_of
from torch import Tensor

from dppo.ppo.learning import losses
from dppo.ppo.learning.adam import FlatAdam
from dppo.ppo.learning.model import free_deviations
from dppo.ppo.networks.parameters import FlatParameters


def normal(rows: int, seed: int, scale: float = 1.0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=rows) * scale)


@pytest.mark.proves("policy_loss")
@pytest.mark.parametrize("clip_coef", [0.01, 0.2, 0.9])
def test_policy_gradient_is_that_of_autograd(clip_coef: float) -> None:
    log_ratio = normal(500, 1, 0.3).requires_grad_()
    advantages = normal(500, 2)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_coef, 1 + clip_coef)
    expected = torch.max(-advantages * ratio, -advantages * clipped).mean()
    expected.backward()
    loss, gradient = losses.policy_loss(ratio.detach(), advantages, clip_coef)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert log_ratio.grad is not None
    np.testing.assert_allclose(gradient, log_ratio.grad, rtol=1e-12)
    share_clipped = float((gradient == 0).double().mean())
    assert 0 < share_clipped < 1


@pytest.mark.proves("policy_loss")
def test_a_loss_of_rows_of_older_policies_is_clipped_around_the_ratio_of_the_newest() -> None:
    """GePPO's objective (arXiv:2111.00072, eq. 9) is PPO's with advantages and clips of their own for the rows."""
    new, now, old = (normal(500, seed, 0.3) for seed in range(3))
    new.requires_grad_()
    advantages = normal(500, 3)
    width = 0.1
    ratio = (new - old).exp()
    center = (now - old).exp()
    clipped = torch.minimum(torch.maximum(ratio, center - width), center + width)
    expected = torch.max(-advantages * ratio, -advantages * clipped).mean()
    expected.backward()
    loss, gradient = losses.policy_loss(
        (new - now).exp().detach(), advantages * center, width / center
    )
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert new.grad is not None
    np.testing.assert_allclose(gradient, new.grad, rtol=1e-9, atol=1e-12)
    assert 0 < float((gradient == 0).double().mean()) < 1


@pytest.mark.proves("value_loss")
def test_value_loss_is_half_the_mean_squared_error() -> None:
    loss, gradient = losses.value_loss(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 2.0, 0.0]))
    assert loss.item() == pytest.approx((1 + 0 + 9) / 3 / 2)
    np.testing.assert_allclose(gradient, [-1 / 3, 0, 1])


@pytest.mark.parametrize("moved", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clipped_value_gradient_is_that_of_autograd(moved: float, dtype: torch.dtype) -> None:
    """Also where nothing is clipped, although old + (new - old) differs from new in the last bits."""
    old = normal(2000, 6).to(dtype)
    returns = normal(2000, 7).to(dtype)
    c = 0.2
    values = (old + (moved * normal(2000, 5)).to(dtype)).requires_grad_()
    clipped = old + (values - old).clamp(-c, c)
    expected = 0.5 * torch.max((values - returns).square(), (clipped - returns).square()).mean()
    expected.backward()
    loss, gradient = losses.clipped_value_loss(values.detach(), old, returns, c)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert values.grad is not None
    np.testing.assert_allclose(gradient, values.grad, rtol=1e-3, atol=1e-8)
    if moved == 0.01:
        assert (gradient != 0).all()


@pytest.mark.proves("approximate_kl")
def test_approximate_kl_estimates_the_kl_of_two_normals() -> None:
    """KL(N(0, 1) | N(m, 1)) = m^2 / 2, from samples of the first, which is the old policy."""
    m = 0.3
    samples = normal(200_000, 9)
    log_ratio = -0.5 * (samples - m) ** 2 + 0.5 * samples**2
    assert losses.approximate_kl(log_ratio, log_ratio.exp()).item() == pytest.approx(
        m**2 / 2, rel=0.02
    )


@pytest.mark.proves("FlatAdam")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_steps_are_those_of_torch(dtype: str, tolerance: float) -> None:
    model = spec_of(BOX, dtype=dtype).mlp(1)
    twin = spec_of(BOX, dtype=dtype).mlp(1)
    ours = FlatAdam(FlatParameters(model.parameters()))
    theirs = torch.optim.Adam(twin.parameters(), eps=1e-5)
    rng = np.random.default_rng(0)
    for step in range(60):
        learning_rate = 0.01 / (1 + step)
        theirs.param_groups[0]["lr"] = learning_rate
        for weights, expected in zip(model.parameters(), twin.parameters(), strict=True):
            gradient = rng.normal(size=tuple(weights.shape)) * 10.0 ** rng.integers(-6, 3)
            expected.grad = torch.from_numpy(gradient).to(expected.dtype)
            assert weights.grad is not None
            weights.grad.copy_(expected.grad)
        ours.step(learning_rate)
        theirs.step()
    for weights, expected in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(
            weights.detach(), expected.detach(), rtol=tolerance, atol=tolerance
        )


def test_slowed_weights_take_a_share_of_each_step_with_a_longer_memory() -> None:
    """`memory` is 1 / (1 - beta2)."""
    spec = spec_of(BOX, dtype="float64")
    slowed = free_deviations(spec)
    start = torch.arange(spec.num_parameters, dtype=torch.float64)
    flat = FlatParameters([torch.nn.Parameter(start.clone())])
    adam = FlatAdam(flat, memory=4000, slowed=slowed, share=0.25)
    expected = torch.nn.Parameter(start.clone())
    twin = torch.optim.Adam([expected], lr=0.01, betas=(0.9, 0.99975), eps=1e-5)
    rng = np.random.default_rng(0)
    for _ in range(30):
        gradient = torch.from_numpy(rng.normal(size=spec.num_parameters))
        flat.gradient.copy_(gradient)
        expected.grad = gradient
        adam.step(0.01)
        twin.step()
    moved = flat.weights.detach() - start
    moved[slowed] *= 4
    np.testing.assert_allclose(moved, expected.detach() - start, rtol=1e-9, atol=1e-12)


def test_free_deviations_are_the_place_of_log_std() -> None:
    spec = spec_of(BOX)
    places = free_deviations(spec)
    assert (
        places.stop - places.start
        == spec.unflatten(np.zeros(spec.num_parameters))["log_std"].size
        > 0
    )
    assert free_deviations(spec_of()) == slice(0, 0)
