"""Losses against slow twins that compute row by row, and at the corners of their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dppo.ppo.learning import losses


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


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


def test_value_loss_is_half_the_mean_squared_error() -> None:
    loss, gradient = losses.value_loss(tensor(1, 2, 3), tensor(2, 2, 0))
    assert loss.item() == pytest.approx(0.5 * (1 + 0 + 9) / 3)
    np.testing.assert_allclose(gradient, [-1 / 3, 0, 1])


@pytest.mark.proves("value_loss")
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


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_approximate_kl_is_never_negative(log_ratios: list[float]) -> None:
    log_ratio = tensor(*log_ratios)
    kl = losses.approximate_kl(log_ratio, log_ratio.exp()).item()
    assert kl >= -1e-12
    assert kl == pytest.approx(
        np.mean([math.exp(x) - 1 - x for x in log_ratios]), rel=1e-9, abs=1e-12
    )


@pytest.mark.proves("approximate_kl")
def test_approximate_kl_estimates_the_kl_of_two_normals() -> None:
    """KL(N(0, 1) | N(m, 1)) = m^2 / 2, from samples of the first, which is the old policy."""
    m = 0.3
    samples = normal(200_000, 9)
    log_ratio = -0.5 * (samples - m) ** 2 + 0.5 * samples**2
    assert losses.approximate_kl(log_ratio, log_ratio.exp()).item() == pytest.approx(
        m**2 / 2, rel=0.02
    )
