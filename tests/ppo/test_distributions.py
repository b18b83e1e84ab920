"""Distributions in NumPy and in torch against torch.distributions and numerical integration."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal
from torch import Tensor, from_numpy

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
    start = 0
    for number, count in enumerate(counts):
        columns = list(range(start, start + count))
        part = Part(Categorical(count), columns, columns, number)
        parts.append(part)
        start += count

    return parts


THREE = [0, 1, 2]
PARTS = {
    # free parameters are at the end
    "mixed": [
        Part(Categorical(3), head=THREE, noise=THREE, actions=0),
        Part(DiagonalGaussian(2), head=[3, 4, 9, 10], noise=[3, 4], actions=[1, 2]),
        Part(Categorical(4), head=[5, 6, 7, 8], noise=[5, 6, 7, 8], actions=3),
    ],
    "choices": choices(3, 2),
    "uneven": choices(3, 1, 5),
    "even": choices(4, 4),
}


def heads(rows: int, size: int, dtype: str = "float64") -> np.ndarray:
    normal = default_rng(7).normal(size=(rows, size))
    return (3 * normal).astype(dtype)


def noise_of(
    distribution: Distribution, rows: int, dtype: str = "float64", seed: int = 6
) -> np.ndarray:
    """Return the noise of a sampler with these rows."""
    noise = distribution.noise(default_rng(seed), 1, rows, dtype)
    return noise[0]


def drawn(distribution: Distribution, head: np.ndarray) -> np.ndarray:
    noise = noise_of(distribution, len(head), str(head.dtype))
    return distribution.sample(head, noise)


def scored(distribution: Distribution, head: np.ndarray, actions: np.ndarray) -> Any:
    """Return the scores that are learned from."""
    return distribution.scores_with_gradient(from_numpy(head), from_numpy(actions))


def ones(size: int) -> Tensor:
    return torch.ones(size, dtype=torch.float64)


def test_categorical_scores_extreme_logits() -> None:
    certain = [1e4, 0.0, -1e4]
    impossible = [-3e38, 0.0, 1.0]
    head = np.array([certain, impossible])
    actions = np.array([0, 2])
    expected = [0.0, -math.log1p(math.exp(-1))]
    categorical = Categorical(3)
    acted = categorical.log_prob(head, actions)
    assert_allclose(acted, expected, atol=1e-12)

    learned = scored(categorical, head, actions)
    assert_allclose(learned.logprobs, expected, atol=1e-12)
    assert torch.isfinite(learned.entropies).all()

    gradient = learned.gradient(ones(2), 0.1)
    assert torch.isfinite(gradient).all()


@pytest.mark.proves("_Choices.sample")
def test_categorical_samples_follow_their_probabilities() -> None:
    logits = np.array([0.0, 1.0, -1.0, 2.0, 0.5])
    steps = 10_000
    rows = 4
    draws = steps * rows
    noise = Categorical(5).noise(default_rng(0), steps, rows, "float32")
    assert noise.shape == (steps, rows, 5)

    head = np.broadcast_to(logits, (draws, 5))
    actions = Categorical(5).sample(head, noise.reshape(draws, 5))
    counts = np.bincount(actions, minlength=5)
    likelihoods = np.exp(logits)
    expected = draws * likelihoods / likelihoods.sum()
    deviations = np.square(counts - expected) / expected
    # 4 degrees of freedom: exceeded by chance once in a thousand, but the seed is fixed
    assert deviations.sum() < 18.5


def test_the_mode_is_the_most_likely_action() -> None:
    logits = heads(40, 5)
    most_likely = logits.argmax(axis=1)
    assert_array_equal(Categorical(5).mode(logits), most_likely)
    head = heads(40, 4)
    means = head[:, :2]
    assert_array_equal(DiagonalGaussian(2).mode(head), means)


@kinds
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_samples_keep_to_their_dtype_and_generator(kind: str, dtype: str) -> None:
    distribution = KINDS[kind]
    head = heads(6, distribution.head_size, dtype)

    def noise(dtype: str) -> np.ndarray:
        return distribution.noise(default_rng(3), 2, 6, dtype)

    in_dtype = noise(dtype)
    assert_array_equal(in_dtype, noise(dtype))

    exact = noise("float64")
    assert_array_equal(in_dtype, exact.astype(dtype))
    assert str(in_dtype.dtype) == dtype
    assert in_dtype.shape == (2, 6, distribution.noise_size)

    sampled = distribution.sample(head, in_dtype[0])
    modes = distribution.mode(head)
    for actions in (sampled, modes):
        assert actions.dtype == distribution.action_dtype(dtype)
        assert actions.shape == (6, *distribution.action_shape)

    logprobs = distribution.log_prob(head, sampled)
    assert logprobs.dtype == dtype


@kinds
def test_leading_axes_do_not_change_the_bits(kind: str) -> None:
    distribution = KINDS[kind]
    head = heads(12, distribution.head_size, "float32")
    noise = noise_of(distribution, 12, "float32")
    actions = distribution.sample(head, noise)
    logprobs = distribution.log_prob(head, actions)
    stacked_head = head.reshape(3, 4, -1)
    stacked_noise = noise.reshape(3, 4, -1)
    stacked = distribution.sample(stacked_head, stacked_noise)
    assert_array_equal(stacked.reshape(actions.shape), actions)

    stacked_logprobs = distribution.log_prob(stacked_head, stacked)
    assert stacked_logprobs.shape == (3, 4)
    assert_array_equal(stacked_logprobs.flatten(), logprobs)


@pytest.mark.proves("_Choices.sample")
@pytest.mark.parametrize("kind", PARTS)
def test_samples_and_modes_are_those_of_the_parts(kind: str) -> None:
    whole = KINDS[kind]
    head = heads(24, whole.head_size)
    noise = noise_of(whole, 24, seed=5)
    samples = whole.sample(head, noise)
    modes = whole.mode(head)
    in_turn = default_rng(5)

    for part in PARTS[kind]:
        distribution = part.distribution
        part_head = head[:, part.head]
        part_noise = noise[:, part.noise]
        if isinstance(whole, Joint):
            noise_in_turn = distribution.noise(in_turn, 1, 24, "float64")
            assert_array_equal(part_noise, noise_in_turn[0])
        sampled = distribution.sample(part_head, part_noise)
        assert_array_equal(samples[:, part.actions], sampled)
        mode = distribution.mode(part_head)
        assert_array_equal(modes[:, part.actions], mode)


def torch_scores(distribution: Distribution, head: Tensor, actions: Tensor) -> tuple[Any, Any]:
    """Return log-probabilities and entropies from torch.distributions."""
    if isinstance(distribution, Categorical):
        categorical: Any = torch.distributions.Categorical(logits=head)
        logprobs = categorical.log_prob(actions.long())
        return logprobs, categorical.entropy()
    mean, log_std = head.chunk(2, dim=1)
    normal: Any = torch.distributions.Normal(mean, log_std.exp())
    logprobs = normal.log_prob(actions)
    entropies = normal.entropy()
    return logprobs.sum(dim=1), entropies.sum(dim=1)


def torch_scores_of(kind: str, head: Tensor, actions: Tensor) -> tuple[Any, Any]:
    """Return the sums over the parts of a distribution."""
    if kind not in PARTS:
        return torch_scores(KINDS[kind], head, actions)
    logprobs = torch.zeros(len(head), dtype=head.dtype)
    entropies = logprobs

    for part in PARTS[kind]:
        part_head = head[:, part.head]
        part_actions = actions[:, part.actions]
        scores = torch_scores(part.distribution, part_head, part_actions)
        logprobs = logprobs + scores[0]
        entropies = entropies + scores[1]

    return logprobs, entropies


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "squashed"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 5e-5)])
def test_scores_and_gradients_are_those_of_torchs_own(
    kind: str, dtype: str, tolerance: float
) -> None:
    assert_close = partial(assert_allclose, rtol=tolerance, atol=tolerance)
    distribution = KINDS[kind]
    rows = heads(20, distribution.head_size, dtype)
    actions = drawn(distribution, rows)
    head = from_numpy(rows).requires_grad_()
    logprobs, entropies = torch_scores_of(kind, head, from_numpy(actions))

    acted = distribution.log_prob(rows, actions)
    assert_close(acted, logprobs.detach())

    learned = scored(distribution, rows, actions)
    assert_close(learned.logprobs, logprobs.detach())
    assert_close(learned.entropies, entropies.detach())

    random = default_rng(5).normal(size=(2, 20))
    grad_logprobs, by_rows = from_numpy(random.astype(dtype))
    grad_entropies: Any

    for grad_entropies in (0.7, by_rows, by_rows):  # the second call has changed nothing
        loss = grad_logprobs * logprobs + grad_entropies * entropies
        (expected,) = torch.autograd.grad(loss.sum(), head, retain_graph=True)
        gradient = learned.gradient(grad_logprobs, grad_entropies)
        assert_close(gradient, expected)


@pytest.mark.proves("SquashedGaussian")
def test_a_squashed_normal_variable_is_scored_as_torch_does() -> None:
    head = heads(20, 4) / 3
    squashed = SquashedGaussian(2)
    actions = drawn(squashed, head)
    mean, log_std = from_numpy(head).chunk(2, dim=1)
    normal = torch.distributions.Normal(mean, log_std.exp())
    u = from_numpy(actions)
    transform = torch.distributions.TanhTransform()
    slopes = transform.log_abs_det_jacobian(u, u.tanh())
    densities = normal.log_prob(u) - slopes
    expected = densities.sum(dim=1)
    acted = squashed.log_prob(head, actions)
    assert_allclose(acted, expected, rtol=1e-8)

    learned = scored(squashed, head, actions)
    assert_allclose(learned.logprobs, expected, rtol=1e-8)


@pytest.mark.proves("SquashedGaussian")
@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
@pytest.mark.parametrize("std", [0.05, 0.5, 3.0])
def test_density_and_entropy_of_a_squashed_variable_are_integrals(mean: float, std: float) -> None:
    squashed = SquashedGaussian(1)
    head = np.array([[mean, math.log(std)]])
    lowest = max(mean - 9 * std, -18.0)
    highest = min(mean + 9 * std, 18.0)
    u = np.linspace(lowest, highest, 200_001)
    width = u[1] - u[0]
    many_heads = np.repeat(head, len(u), axis=0)
    log_density = squashed.log_prob(many_heads, u[:, None])
    # da/du of a = tanh(u): the integrals are over u
    squash = np.tanh(u)
    slope = 1 - np.square(squash)
    mass = np.exp(log_density) * slope * width
    assert mass.sum() == pytest.approx(1.0, abs=1e-6)

    information = mass * log_density
    entropy = -information.sum()
    learned = scored(squashed, head, np.zeros((1, 1)))
    assert learned.entropies.item() == pytest.approx(entropy, abs=5e-3)


def test_the_gradient_of_a_squashed_entropy_is_that_of_differences() -> None:
    squashed = SquashedGaussian(2)
    head = heads(1, 4) / 3
    u = np.zeros((1, 2))

    def entropy(head: np.ndarray) -> float:
        return scored(squashed, head, u).entropies.item()

    learned = scored(squashed, head, u)
    gradient = learned.gradient(0 * ones(1), ones(1))
    for column in range(4):
        step = np.zeros_like(head)
        step[0, column] = 1e-5
        difference = entropy(head + step) - entropy(head - step)
        expected = pytest.approx(difference / 2e-5, rel=1e-5)
        assert gradient[0, column].item() == expected


def test_a_squashed_variable_far_outside_scores_finitely() -> None:
    squashed = SquashedGaussian(1)
    actions = np.array([[400.0], [-400.0]])
    head = np.array([[300.0, 5.0], [-300.0, 5.0]])
    acted = squashed.log_prob(head, actions)
    assert np.isfinite(acted).all()

    learned = scored(squashed, head, actions)
    assert torch.isfinite(learned.logprobs).all()

    gradient = learned.gradient(learned.logprobs, learned.entropies)
    assert torch.isfinite(gradient).all()


def test_a_mask_renormalizes_over_the_allowed_choices() -> None:
    """As logits of minus infinity do; these have no gradient."""
    distribution = Categorical(6)
    logits = heads(40, 6, "float32")
    allowed = default_rng(2).random((40, 6)) < 0.5
    allowed[:, 2] = True  # one choice remains
    head = from_numpy(logits)
    masks = from_numpy(allowed)
    limited = distribution.limited_in_torch(head, masks)
    assert_array_equal(limited, torch.where(masks, head, -1e9))

    acted = distribution.limited(logits, allowed)
    assert_array_equal(acted, limited)

    actions = from_numpy(drawn(distribution, acted))
    learned = distribution.scores_with_gradient(limited, actions)
    assert torch.isfinite(learned.logprobs).all()

    excluded = head.masked_fill(~masks, -math.inf)
    expected = torch_scores(distribution, excluded, actions)
    torch.testing.assert_close((learned.logprobs, learned.entropies), expected)

    ones = torch.ones(40)
    gradient = learned.gradient(ones, ones)
    assert (gradient[~masks] == 0).all()
