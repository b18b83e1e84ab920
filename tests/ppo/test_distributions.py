"""Distributions in NumPy and in torch against torch.distributions and numerical integration."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.joint import Joint
from dppo.ppo.distributions.simple import (
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
)

MIXED = Joint((Categorical(3), DiagonalGaussian(2), Categorical(4)))
CHOICES = Joint((Categorical(3), Categorical(2)))
UNEVEN = MultiCategorical((3, 1, 5))
EVEN = MultiCategorical((4, 4))
KINDS: dict[str, Distribution] = {
    "categorical": Categorical(4),
    "gaussian": DiagonalGaussian(4),
    "choices": CHOICES,
    "mixed": MIXED,
    "uneven": UNEVEN,
    "even": EVEN,
    "squashed": SquashedGaussian(2),
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Part(NamedTuple):
    """A distribution within another, with its columns there."""

    distribution: Distribution
    head: list[int]
    noise: list[int]
    actions: Any


def choices(*counts: int) -> list[Part]:
    parts = []
    for number, end in enumerate(np.cumsum(counts)):
        columns = list(range(end - counts[number], end))
        parts.append(Part(Categorical(counts[number]), columns, columns, number))
    return parts


PARTS = {
    # free parameters are at the end
    "mixed": [
        Part(Categorical(3), [0, 1, 2], [0, 1, 2], 0),
        Part(DiagonalGaussian(2), [3, 4, 9, 10], [3, 4], [1, 2]),
        Part(Categorical(4), [5, 6, 7, 8], [5, 6, 7, 8], 3),
    ],
    "choices": choices(3, 2),
    "uneven": choices(3, 1, 5),
    "even": choices(4, 4),
}


def heads(rows: int, size: int, dtype: str = "float64") -> np.ndarray:
    return (np.random.default_rng(7).normal(size=(rows, size)) * 3).astype(dtype)


def drawn(distribution: Distribution, head: np.ndarray) -> np.ndarray:
    noise = distribution.noise(np.random.default_rng(6), 1, len(head), str(head.dtype))[0]
    return distribution.sample(head, noise)


def ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.float64)


def test_categorical_scores_extreme_logits() -> None:
    head = np.array([[1e4, 0.0, -1e4], [-3e38, 0.0, 1.0]])
    actions = np.array([0, 2])
    expected = [0.0, -math.log1p(math.exp(-1))]
    np.testing.assert_allclose(Categorical(3).log_prob(head, actions), expected, atol=1e-12)
    scored = Categorical(3).scores_with_gradient(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(scored.logprobs, expected, atol=1e-12)
    assert torch.isfinite(scored.entropies).all()
    assert torch.isfinite(scored.gradient(ones(2), 0.1)).all()


@pytest.mark.proves("_Choices.sample")
def test_categorical_samples_follow_their_probabilities() -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5])
    draws = 40_000
    noise = Categorical(5).noise(np.random.default_rng(0), draws // 4, 4, "float32")
    assert noise.shape == (draws // 4, 4, 5)
    actions = Categorical(5).sample(np.broadcast_to(logits, (draws, 5)), noise.reshape(draws, 5))
    expected = draws * np.exp(logits) / np.exp(logits).sum()
    chi_square = (np.square(np.bincount(actions, minlength=5) - expected) / expected).sum()
    # 4 degrees of freedom: exceeded by chance once in a thousand, but the seed is fixed
    assert chi_square < 18.5


def test_the_mode_is_the_most_likely_action() -> None:
    head = heads(40, 5)
    np.testing.assert_array_equal(Categorical(5).mode(head), head.argmax(axis=1))
    head = heads(40, 4)
    np.testing.assert_array_equal(DiagonalGaussian(2).mode(head), head[:, :2])


@kinds
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_samples_keep_to_their_dtype_and_generator(kind: str, dtype: str) -> None:
    distribution = KINDS[kind]
    head = heads(6, distribution.head_size, dtype)
    noise, repeated = (distribution.noise(np.random.default_rng(3), 2, 6, dtype) for _ in range(2))
    exact = distribution.noise(np.random.default_rng(3), 2, 6, "float64")
    np.testing.assert_array_equal(noise, repeated)
    np.testing.assert_array_equal(noise, exact.astype(dtype))
    assert (str(noise.dtype), noise.shape) == (dtype, (2, 6, distribution.noise_size))
    sampled = distribution.sample(head, noise[0])
    for actions in (sampled, distribution.mode(head)):
        assert actions.dtype == distribution.action_dtype(dtype)
        assert actions.shape == (6, *distribution.action_shape)
    assert distribution.log_prob(head, sampled).dtype == dtype


@kinds
def test_leading_axes_do_not_change_the_bits(kind: str) -> None:
    distribution = KINDS[kind]
    head = heads(12, distribution.head_size, "float32")
    noise = distribution.noise(np.random.default_rng(3), 1, 12, "float32")[0]
    actions = distribution.sample(head, noise)
    stacked = distribution.sample(head.reshape(3, 4, -1), noise.reshape(3, 4, -1))
    np.testing.assert_array_equal(stacked.reshape(actions.shape), actions)
    logprobs = distribution.log_prob(head.reshape(3, 4, -1), stacked)
    assert logprobs.shape == (3, 4)
    np.testing.assert_array_equal(logprobs.reshape(12), distribution.log_prob(head, actions))


@pytest.mark.proves("_Choices.sample")
@pytest.mark.parametrize("kind", PARTS)
def test_samples_and_modes_are_those_of_the_parts(kind: str) -> None:
    whole = KINDS[kind]
    head = heads(24, whole.head_size)
    noise = whole.noise(np.random.default_rng(5), 1, 24, "float64")[0]
    samples = whole.sample(head, noise)
    modes = whole.mode(head)
    in_turn = np.random.default_rng(5)
    for part, head_columns, noise_columns, action_columns in PARTS[kind]:
        part_head = head[:, head_columns]
        part_noise = noise[:, noise_columns]
        if isinstance(whole, Joint):
            np.testing.assert_array_equal(part_noise, part.noise(in_turn, 1, 24, "float64")[0])
        np.testing.assert_array_equal(
            samples[:, action_columns], part.sample(part_head, part_noise)
        )
        np.testing.assert_array_equal(modes[:, action_columns], part.mode(part_head))


def torch_scores(distribution: Distribution, head: Tensor, actions: Tensor) -> tuple[Any, Any]:
    """Return log-probabilities and entropies from torch.distributions."""
    if isinstance(distribution, Categorical):
        categorical: Any = torch.distributions.Categorical(logits=head)
        return categorical.log_prob(actions.long()), categorical.entropy()
    mean, log_std = head.chunk(2, dim=1)
    normal: Any = torch.distributions.Normal(mean, log_std.exp())
    return normal.log_prob(actions).sum(dim=1), normal.entropy().sum(dim=1)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "squashed"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 5e-5)])
def test_scores_and_gradients_are_those_of_torchs_own(
    kind: str, dtype: str, tolerance: float
) -> None:
    distribution = KINDS[kind]
    head = torch.from_numpy(heads(20, distribution.head_size, dtype)).requires_grad_()
    actions = torch.from_numpy(drawn(distribution, head.detach().numpy()))
    grad_logprobs, by_rows = torch.from_numpy(
        np.random.default_rng(5).normal(size=(2, 20)).astype(dtype)
    )
    if kind in PARTS:
        scores = [
            torch_scores(part, head[:, head_columns], actions[:, action_columns])
            for part, head_columns, _, action_columns in PARTS[kind]
        ]
        logprobs, entropies = (torch.stack(column).sum(0) for column in zip(*scores, strict=True))
    else:
        logprobs, entropies = torch_scores(distribution, head, actions)
    scored = distribution.scores_with_gradient(head.detach(), actions)
    assert_close = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    assert_close(distribution.log_prob(head.detach().numpy(), actions.numpy()), logprobs.detach())
    assert_close(scored.logprobs, logprobs.detach())
    assert_close(scored.entropies, entropies.detach())
    grad_entropies: Any
    for grad_entropies in (0.7, by_rows, by_rows):  # the second call has changed nothing
        loss = (grad_logprobs * logprobs + grad_entropies * entropies).sum()
        (expected,) = torch.autograd.grad(loss, head, retain_graph=True)
        assert_close(scored.gradient(grad_logprobs, grad_entropies), expected)


@pytest.mark.proves("SquashedGaussian")
def test_a_squashed_normal_variable_is_scored_as_torch_does() -> None:
    head = heads(20, 4) / 3
    squashed = SquashedGaussian(2)
    u = torch.from_numpy(drawn(squashed, head))
    normal = torch.distributions.Normal(
        torch.from_numpy(head[:, :2]), torch.from_numpy(head[:, 2:]).exp()
    )
    slopes = torch.distributions.TanhTransform().log_abs_det_jacobian(u, u.tanh())
    expected = (normal.log_prob(u) - slopes).sum(dim=1)
    np.testing.assert_allclose(squashed.log_prob(head, u.numpy()), expected, rtol=1e-8)
    np.testing.assert_allclose(
        squashed.scores_with_gradient(torch.from_numpy(head), u).logprobs, expected, rtol=1e-8
    )


@pytest.mark.proves("SquashedGaussian")
@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
@pytest.mark.parametrize("std", [0.05, 0.5, 3.0])
def test_density_and_entropy_of_a_squashed_variable_are_integrals(mean: float, std: float) -> None:
    squashed = SquashedGaussian(1)
    head = np.array([[mean, math.log(std)]])
    u = np.linspace(max(mean - 9 * std, -18.0), min(mean + 9 * std, 18.0), 200_001)
    log_density = squashed.log_prob(np.repeat(head, len(u), axis=0), u[:, None])
    # da/du of a = tanh(u): the integrals are over u
    mass = np.exp(log_density) * (1 - np.square(np.tanh(u)))
    width = u[1] - u[0]
    assert mass.sum() * width == pytest.approx(1.0, abs=1e-6)
    scored = squashed.scores_with_gradient(
        torch.from_numpy(head), torch.zeros(1, 1, dtype=torch.float64)
    )
    assert scored.entropies.item() == pytest.approx(-(mass * log_density).sum() * width, abs=5e-3)


def test_the_gradient_of_a_squashed_entropy_is_that_of_differences() -> None:
    squashed = SquashedGaussian(2)
    head = torch.from_numpy(heads(1, 4) / 3)
    u = torch.zeros(1, 2, dtype=torch.float64)
    gradient = squashed.scores_with_gradient(head, u).gradient(0 * ones(1), ones(1))
    for column in range(4):
        step = torch.zeros_like(head)
        step[0, column] = 1e-5
        higher, lower = (
            squashed.scores_with_gradient(head + sign * step, u).entropies.item()
            for sign in (1, -1)
        )
        assert gradient[0, column].item() == pytest.approx((higher - lower) / 2e-5, rel=1e-5)


def test_a_squashed_variable_far_outside_scores_finitely() -> None:
    actions = np.array([[400.0], [-400.0]])
    head = np.array([[300.0, 5.0], [-300.0, 5.0]])
    scored = SquashedGaussian(1).scores_with_gradient(
        torch.from_numpy(head), torch.from_numpy(actions)
    )
    assert np.isfinite(SquashedGaussian(1).log_prob(head, actions)).all()
    assert torch.isfinite(scored.logprobs).all()
    assert torch.isfinite(scored.gradient(scored.logprobs, scored.entropies)).all()


def test_a_mask_renormalizes_over_the_allowed_choices() -> None:
    """As logits of minus infinity do; these have no gradient."""
    distribution = Categorical(6)
    head = torch.from_numpy(heads(40, 6, "float32"))
    masks = torch.from_numpy(np.random.default_rng(2).random((40, 6)) < 0.5)
    masks[:, 2] = True  # one choice remains
    limited = distribution.limited_in_torch(head, masks)
    np.testing.assert_array_equal(limited, torch.where(masks, head, -1e9))
    np.testing.assert_array_equal(distribution.limited(head.numpy(), masks.numpy()), limited)
    actions = torch.from_numpy(drawn(distribution, limited.numpy()))
    scored = distribution.scores_with_gradient(limited, actions)
    assert torch.isfinite(scored.logprobs).all()
    expected = torch_scores(distribution, head.masked_fill(~masks, -math.inf), actions)
    torch.testing.assert_close((scored.logprobs, scored.entropies), expected)
    assert (scored.gradient(torch.ones(40), torch.ones(40))[~masks] == 0).all()
