"""Distributions in NumPy and in torch against torch.distributions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.joint import Joint
from dppo.ppo.distributions.simple import Categorical, DiagonalGaussian, MultiCategorical


def heads(rows: int, size: int, dtype: str = "float64") -> np.ndarray:
    return (np.random.default_rng(7).normal(size=(rows, size)) * 3).astype(dtype)


def test_categorical_scores_extreme_logits() -> None:
    head = np.array([[1e4, 0.0, -1e4], [-3e38, 0.0, 1.0]])
    actions = np.array([0, 2])
    expected = [0.0, -math.log1p(math.exp(-1))]
    np.testing.assert_allclose(Categorical(3).log_prob(head, actions), expected, atol=1e-12)
    found = Categorical(3).scores_with_gradient(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-12)
    by_head = found.gradient(torch.ones(2, dtype=torch.float64), 0.1)
    assert torch.isfinite(found.entropies).all()
    assert torch.isfinite(by_head).all()


@pytest.mark.proves("_Choices.sample")
def test_categorical_samples_follow_their_probabilities() -> None:
    logits, draws = np.array([0.0, 1.0, -1.0, 2.0, 0.5]), 40_000
    categorical = Categorical(5)
    noise = categorical.noise(np.random.default_rng(0), draws // 4, 4, "float32")
    assert noise.shape == (draws // 4, 4, 5)
    assert noise.dtype == np.float32
    actions = categorical.sample(np.broadcast_to(logits, (draws, 5)), noise.reshape(draws, 5))
    expected = draws * np.exp(logits) / np.exp(logits).sum()
    chi_square = (np.square(np.bincount(actions, minlength=5) - expected) / expected).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: exceeded by chance once in a thousand, but the seed is fixed


def test_categorical_mode_is_the_most_likely_choice() -> None:
    head = heads(40, 5)
    np.testing.assert_array_equal(Categorical(5).mode(head), head.argmax(axis=1))
    np.testing.assert_array_equal(Categorical(5).sample(head, np.zeros_like(head)), Categorical(5).mode(head))


def test_gaussian_samples_have_the_mean_and_deviation_asked_for() -> None:
    mean, log_std, draws = np.array([1.0, -2.0]), np.array([0.5, -1.0]), 40_000
    noise = DiagonalGaussian(2).noise(np.random.default_rng(0), draws, 1, "float64")
    assert noise.shape == (draws, 1, 2)
    head = np.tile(np.concatenate([mean, log_std]), (draws, 1))
    drawn = DiagonalGaussian(2).sample(head, noise[:, 0])
    np.testing.assert_array_equal(DiagonalGaussian(2).mode(head), head[:, :2])
    np.testing.assert_array_equal(drawn, mean + np.exp(log_std) * noise[:, 0])
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=5 * np.exp(0.5) / math.sqrt(draws))
    np.testing.assert_allclose(drawn.std(axis=0), np.exp(log_std), rtol=0.02)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03


MIXED = Joint((Categorical(3), DiagonalGaussian(2), Categorical(4)))
CHOICES = Joint((Categorical(3), Categorical(2)))
UNEVEN, EVEN = MultiCategorical((3, 1, 5)), MultiCategorical((4, 4))


def parts_of_mixed(head: np.ndarray) -> list[np.ndarray]:
    """Split [logits, mean, logits, log_std] into the heads of the parts."""
    return [head[..., :3], np.concatenate([head[..., 3:5], head[..., 9:]], axis=-1), head[..., 5:9]]


def test_joint_concatenates_its_parts_with_the_free_parameters_at_the_end() -> None:
    assert (MIXED.head_size, MIXED.free_size, MIXED.noise_size, MIXED.action_shape) == (11, 2, 9, (4,))
    assert (MIXED.action_dtype("float32"), CHOICES.action_dtype("float32")) == ("float32", "int64")
    head = heads(6, 11)
    noise = MIXED.noise(np.random.default_rng(3), 1, 6, "float64")[0]
    parts = [noise[:, :3], noise[:, 3:5], noise[:, 5:]]
    first, second, third = (
        part.sample(one, own) for part, one, own in zip(MIXED.parts, parts_of_mixed(head), parts, strict=True)
    )
    np.testing.assert_array_equal(MIXED.sample(head, noise), np.column_stack([first, second, third]))
    rng = np.random.default_rng(3)  # parts draw in turn
    np.testing.assert_array_equal(parts[0], Categorical(3).noise(rng, 1, 6, "float64")[0])
    np.testing.assert_array_equal(parts[1], DiagonalGaussian(2).noise(rng, 1, 6, "float64")[0])
    likeliest = [part.mode(one) for part, one in zip(MIXED.parts, parts_of_mixed(head), strict=True)]
    np.testing.assert_array_equal(MIXED.mode(head), np.column_stack(likeliest))
    assert CHOICES.mode(heads(6, 5)).dtype == np.int64


KINDS: dict[str, Distribution] = {
    "categorical": Categorical(4),
    "gaussian": DiagonalGaussian(4),
    "choices": CHOICES,
    "mixed": MIXED,
    "uneven": UNEVEN,
    "even": EVEN,
}
kinds = pytest.mark.parametrize("kind", KINDS)


def drawn(distribution: Distribution, head: np.ndarray) -> np.ndarray:
    noise = distribution.noise(np.random.default_rng(6), 1, len(head), str(head.dtype))[0]
    return distribution.sample(head, noise)


@kinds
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_samples_keep_to_their_dtype_and_generator(kind: str, dtype: str) -> None:
    distribution = KINDS[kind]
    head = heads(6, distribution.head_size, dtype)
    one, two = (distribution.noise(np.random.default_rng(3), 2, 6, dtype) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert (str(one.dtype), one.shape) == (dtype, (2, 6, distribution.noise_size))
    actions = distribution.sample(head, one[0])
    for some in (actions, distribution.mode(head)):
        assert some.dtype == distribution.action_dtype(dtype)
        assert some.shape == (6, *distribution.action_shape)
    assert distribution.log_prob(head, actions).dtype == dtype


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
@pytest.mark.parametrize("choices", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_several_choices_are_drawn_and_chosen_one_by_one(choices: MultiCategorical) -> None:
    head, noise = heads(24, choices.head_size), choices.noise(np.random.default_rng(5), 1, 24, "float64")[0]
    ends = np.cumsum(choices.counts)[:-1]
    parts = list(zip(choices.counts, np.split(head, ends, axis=1), np.split(noise, ends, axis=1), strict=True))
    expected = np.stack([Categorical(n).sample(own, own_noise) for n, own, own_noise in parts], axis=1)
    np.testing.assert_array_equal(choices.sample(head, noise), expected)
    likeliest = np.stack([Categorical(n).mode(own) for n, own, _ in parts], axis=1)
    np.testing.assert_array_equal(choices.mode(head), likeliest)


@kinds
def test_noise_in_float32_is_that_of_float64_rounded(kind: str) -> None:
    distribution = KINDS[kind]
    exact = distribution.noise(np.random.default_rng(2), 5, 2, "float64")
    np.testing.assert_array_equal(
        distribution.noise(np.random.default_rng(2), 5, 2, "float32"), exact.astype(np.float32)
    )


def torchs_own(distribution: Distribution, head: Any, actions: Any) -> tuple[Any, Any]:
    """Return log-probabilities and entropies from torch.distributions."""
    if isinstance(distribution, Categorical):
        reference: Any = torch.distributions.Categorical(logits=head)
        return reference.log_prob(actions.long()), reference.entropy()
    if isinstance(distribution, DiagonalGaussian):
        mean, log_std = head.chunk(2, dim=1)
        reference = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
        return reference.log_prob(actions), reference.entropy()
    if distribution is MIXED:
        gaussian = torch.cat([head[:, 3:5], head[:, 9:]], dim=1)
        parts = [(head[:, :3], actions[:, 0]), (gaussian, actions[:, 1:3]), (head[:, 5:9], actions[:, 3])]
        both = [torchs_own(part, *rest) for part, rest in zip(MIXED.parts, parts, strict=True)]
    else:
        counts = (3, 2) if distribution is CHOICES else distribution.counts  # type: ignore[attr-defined]
        columns = zip(counts, head.split(counts, dim=1), actions.unbind(1), strict=True)
        both = [torchs_own(Categorical(n), own, column) for n, own, column in columns]
    return sum(one for one, _ in both), sum(other for _, other in both)


@kinds
@pytest.mark.parametrize("counted", ["logprobs", "entropies", "entropies by row", "both"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 5e-5)])
def test_scores_and_gradients_are_those_of_torchs_own(kind: str, counted: str, dtype: str, tolerance: float) -> None:
    distribution = KINDS[kind]
    head = torch.from_numpy(heads(20, distribution.head_size, dtype)).requires_grad_()
    actions = torch.from_numpy(drawn(distribution, head.detach().numpy()))
    by_logprobs, by_row = torch.from_numpy(np.random.default_rng(5).normal(size=(2, 20)).astype(dtype))
    by_logprobs = by_logprobs * (not counted.startswith("entropies"))
    by_entropies: Any = by_row if counted == "entropies by row" else 0.7 * (counted != "logprobs")
    logprobs, entropies = torchs_own(distribution, head, actions)
    ((by_logprobs * logprobs).sum() + (by_entropies * entropies).sum()).backward()
    found = distribution.scores_with_gradient(head.detach(), actions)
    close = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    close(distribution.log_prob(head.detach().numpy(), actions.numpy()), logprobs.detach())
    close(found.logprobs, logprobs.detach())
    close(found.entropies, entropies.detach())
    by_head = found.gradient(by_logprobs, by_entropies)
    assert head.grad is not None
    close(by_head, head.grad)
    again = found.gradient(by_logprobs, by_entropies)
    np.testing.assert_array_equal(again, by_head)  # the first call has changed nothing


def test_a_new_distribution_needs_only_its_formulas() -> None:
    """The gradient follows from them; here, for an exponential distribution with its rate as the head."""

    class Exponential(Distribution):
        def __init__(self) -> None:
            super().__init__(head_size=1, noise_size=1, action_shape=(), integer=False)

        def noise(self, generator: np.random.Generator, steps: int, rows: int, dtype: str) -> np.ndarray:
            return generator.exponential(size=(steps, rows, 1)).astype(dtype)

        def sample(self, head: np.ndarray, noise: np.ndarray) -> np.ndarray:
            drawn: np.ndarray = (noise / np.exp(head))[..., 0]
            return drawn

        def mode(self, head: np.ndarray) -> np.ndarray:
            return np.zeros(head.shape[:-1], head.dtype)

        def log_prob(self, head: np.ndarray, actions: np.ndarray) -> np.ndarray:
            logprobs: np.ndarray = head[..., 0] - np.exp(head[..., 0]) * actions
            return logprobs

        def scores(self, head: torch.Tensor, actions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return head[:, 0] - head[:, 0].exp() * actions, 1 - head[:, 0]

    distribution = Exponential()
    head = heads(9, 1)
    actions = drawn(distribution, head)
    found = distribution.scores_with_gradient(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, distribution.log_prob(head, actions), rtol=1e-12)
    by_head = found.gradient(torch.full((9,), 2.0, dtype=torch.float64), 0.5)
    np.testing.assert_allclose(by_head, 2 * (1 - np.exp(head) * actions[:, None]) - 0.5, rtol=1e-12)
