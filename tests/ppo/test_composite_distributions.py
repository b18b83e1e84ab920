"""Squashed normal variables and masks, against torch.distributions and numerical integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from builders import spec_of
from test_distributions import drawn, heads

from dppo.ppo.distributions.simple import Categorical, MultiCategorical, SquashedGaussian
from dppo.ppo.learning.model import PPOModel


@pytest.mark.proves("SquashedGaussian")
def test_a_squashed_normal_variable_is_scored_as_torch_does() -> None:
    head, squashed = heads(20, 4) / 3, SquashedGaussian(2)
    u = torch.from_numpy(drawn(squashed, head))
    normal = torch.distributions.Normal(torch.from_numpy(head[:, :2]), torch.from_numpy(head[:, 2:]).exp())
    slopes = torch.distributions.TanhTransform().log_abs_det_jacobian(u, u.tanh())
    expected = (normal.log_prob(u) - slopes).sum(dim=1)
    np.testing.assert_allclose(squashed.log_prob(head, u.numpy()), expected, rtol=1e-8)
    np.testing.assert_allclose(squashed.scores_with_gradient(torch.from_numpy(head), u).logprobs, expected, rtol=1e-8)


@pytest.mark.proves("SquashedGaussian")
@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
@pytest.mark.parametrize("std", [0.05, 0.5, 1.0, 3.0])
def test_density_and_entropy_of_a_squashed_variable_are_those_of_an_integral(mean: float, std: float) -> None:
    squashed, head = SquashedGaussian(1), np.array([[mean, math.log(std)]])
    u = np.linspace(max(mean - 9 * std, -18.0), min(mean + 9 * std, 18.0), 200_001)
    log_density = squashed.log_prob(np.repeat(head, len(u), axis=0), u[:, None])
    mass = np.exp(log_density) * (1 - np.square(np.tanh(u)))  # da/du of a = tanh(u): the integrals are over u
    sums = np.array([mass, -mass * log_density]).sum(axis=1) * (u[1] - u[0])
    assert sums[0] == pytest.approx(1.0, abs=1e-6)
    found = squashed.scores_with_gradient(
        torch.from_numpy(head), torch.zeros(1, 1, dtype=torch.float64)
    ).entropies.item()
    assert found == pytest.approx(sums[1], abs=5e-3)


def test_the_gradient_of_a_squashed_entropy_is_that_of_differences() -> None:
    squashed, step = SquashedGaussian(2), 1e-5
    head, u = torch.from_numpy(heads(1, 4) / 3), torch.zeros(1, 2, dtype=torch.float64)
    zeros, ones = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    found = squashed.scores_with_gradient(head, u).gradient(zeros, ones)
    for at in range(4):
        moved = torch.zeros_like(head)
        moved[0, at] = step
        higher, lower = (squashed.scores_with_gradient(head + sign * moved, u).entropies.item() for sign in (1, -1))
        assert found[0, at].item() == pytest.approx((higher - lower) / (2 * step), rel=1e-5)


def test_a_squashed_variable_far_outside_scores_finitely() -> None:
    squashed, far = SquashedGaussian(1), np.array([[400.0], [-400.0]])
    head = np.array([[300.0, 5.0], [-300.0, 5.0]])
    found = squashed.scores_with_gradient(torch.from_numpy(head), torch.from_numpy(far))
    assert np.isfinite(squashed.log_prob(head, far)).all()
    assert torch.isfinite(found.logprobs).all()
    assert torch.isfinite(found.gradient(found.logprobs, found.entropies)).all()


@pytest.mark.parametrize("counts", [(6,), (2, 4)], ids=["one", "several"])
def test_a_mask_renormalizes_over_the_allowed_choices(counts: tuple[int, ...]) -> None:
    """Log-probabilities and entropies are those of torch with logits of minus infinity; these have no gradient."""
    distribution = Categorical(6) if counts == (6,) else MultiCategorical(counts)
    head = torch.from_numpy(heads(40, 6).astype(np.float32))
    masks = torch.from_numpy(np.random.default_rng(2).random((40, 6)) < 0.5)
    masks[:, [0, 2]] = True  # each element keeps a choice
    shown = torch.where(masks, head, -1e9)
    np.testing.assert_array_equal(distribution.limited(head.numpy(), masks.numpy()), shown)
    actions = torch.from_numpy(drawn(distribution, shown.numpy()))
    found = distribution.scores_with_gradient(shown, actions)
    assert (found.gradient(torch.ones(40), torch.ones(40))[~masks] == 0).all()
    logits = head.masked_fill(~masks, -math.inf).split(counts, dim=1)
    parts = [torch.distributions.Categorical(logits=own) for own in logits]
    columns = actions.reshape(40, -1).unbind(1)
    logprobs = [part.log_prob(column) for part, column in zip(parts, columns, strict=True)]
    torch.testing.assert_close(found.logprobs, torch.stack(logprobs).sum(0))  # finite: none of them was forbidden
    assert torch.isfinite(found.logprobs).all()
    torch.testing.assert_close(found.entropies, torch.stack([part.entropy() for part in parts]).sum(0))


def test_a_model_scores_actions_among_the_allowed_ones() -> None:
    model = PPOModel(spec_of(dtype="float32"), 1)
    obs, masks = torch.zeros(2, *model.spec.spaces.obs.shape), torch.tensor([[True, False, True], [False, True, False]])
    scored = model.forward(obs, torch.tensor([2, 1]), masks)
    assert scored.policy.logprobs[1].item() == 0.0
    assert scored.policy.logprobs[0].item() == pytest.approx(-math.log(2), abs=0.05)
