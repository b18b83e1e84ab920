"""Distributions in NumPy and in torch against torch.distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.categorical import Categorical
from dppo.ppo.distributions.gaussian import DiagonalGaussian
from dppo.ppo.distributions.joint import Joint


def side_by_side(mean: np.ndarray, log_std: np.ndarray) -> np.ndarray:
    """Return the head of a Gaussian."""
    return np.concatenate([mean, np.broadcast_to(log_std, mean.shape)], axis=-1)


def heads(rows: int, size: int, dtype: str = "float64") -> np.ndarray:
    return (np.random.default_rng(7).normal(size=(rows, size)) * 3).astype(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_categorical_scores_as_torch_does(dtype: str, tolerance: float) -> None:
    head = heads(50, 6, dtype)
    actions = np.random.default_rng(8).integers(0, 6, 50)
    reference = torch.distributions.Categorical(logits=torch.from_numpy(head))
    expected = reference.log_prob(torch.from_numpy(actions)).numpy()
    np.testing.assert_allclose(Categorical(6).log_prob(head, actions), expected, rtol=tolerance, atol=tolerance)
    found = Categorical(6).evaluate(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.entropies, reference.entropy(), rtol=tolerance)


def test_categorical_scores_any_leading_shape() -> None:
    head, actions = heads(12, 3).reshape(4, 3, 3), np.random.default_rng(1).integers(0, 3, (4, 3))
    found = Categorical(3).log_prob(head, actions)
    assert found.shape == (4, 3)
    for row in np.ndindex(4, 3):
        assert found[row] == pytest.approx(math.log(np.exp(head[row])[actions[row]] / np.exp(head[row]).sum()))


def test_categorical_scores_extreme_logits() -> None:
    head = np.array([[1e4, 0.0, -1e4], [-3e38, 0.0, 1.0]])
    actions = np.array([0, 2])
    expected = [0.0, -math.log1p(math.exp(-1))]
    np.testing.assert_allclose(Categorical(3).log_prob(head, actions), expected, atol=1e-12)
    found = Categorical(3).evaluate(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-12)
    by_head = found.gradients(torch.ones(2, dtype=torch.float64), 0.1)
    assert torch.isfinite(found.entropies).all()
    assert torch.isfinite(by_head).all()


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


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_gaussian_scores_as_torch_does(dtype: str, tolerance: float) -> None:
    mean, actions = heads(50, 3, dtype), heads(51, 3, dtype)[1:]
    log_std = np.array([0.3, -1.0, 0.0], dtype)
    normal = torch.distributions.Normal(torch.from_numpy(mean), torch.from_numpy(np.exp(log_std)))
    reference = torch.distributions.Independent(normal, 1)
    expected = reference.log_prob(torch.from_numpy(actions)).numpy()
    gaussian, head = DiagonalGaussian(3), side_by_side(mean, log_std)
    np.testing.assert_allclose(gaussian.log_prob(head, actions), expected, rtol=tolerance, atol=tolerance)
    found = gaussian.evaluate(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.entropies, reference.entropy(), rtol=tolerance)


def test_gaussian_scores_any_leading_shape() -> None:
    mean, actions, log_std = heads(12, 2).reshape(4, 3, 2), heads(12, 2).reshape(4, 3, 2)[::-1], np.array([0.5, -0.5])
    head = side_by_side(mean, log_std)
    found = DiagonalGaussian(2).log_prob(head, actions)
    flat = DiagonalGaussian(2).log_prob(head.reshape(12, 4), actions.reshape(12, 2))
    np.testing.assert_array_equal(found, flat.reshape(4, 3))


def test_gaussian_samples_have_the_mean_and_deviation_asked_for() -> None:
    mean, log_std, draws = np.array([1.0, -2.0]), np.array([0.5, -1.0]), 40_000
    noise = DiagonalGaussian(2).noise(np.random.default_rng(0), draws, 1, "float64")
    assert noise.shape == (draws, 1, 2)
    drawn = DiagonalGaussian(2).sample(np.repeat(side_by_side(mean[None], log_std), draws, axis=0), noise[:, 0])
    np.testing.assert_array_equal(drawn, mean + np.exp(log_std) * noise[:, 0])
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=5 * np.exp(0.5) / math.sqrt(draws))
    np.testing.assert_allclose(drawn.std(axis=0), np.exp(log_std), rtol=0.02)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03


def test_gaussian_mode_is_the_mean() -> None:
    np.testing.assert_array_equal(DiagonalGaussian(3).mode(heads(4, 6)), heads(4, 6)[:, :3])


MIXED = Joint((Categorical(3), DiagonalGaussian(2), Categorical(4)))
CHOICES = Joint((Categorical(3), Categorical(2)))


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


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 5e-5)])
def test_joint_adds_the_scores_of_its_parts(dtype: str, tolerance: float) -> None:
    head = heads(12, 11, dtype)
    actions = MIXED.sample(head, MIXED.noise(np.random.default_rng(1), 1, 12, dtype)[0])
    columns = [actions[:, 0].astype(np.int64), actions[:, 1:3], actions[:, 3].astype(np.int64)]
    parts = list(zip(MIXED.parts, parts_of_mixed(head), columns, strict=True))
    expected = sum(part.log_prob(one, own) for part, one, own in parts)
    np.testing.assert_allclose(MIXED.log_prob(head, actions), expected, rtol=tolerance)
    found = MIXED.evaluate(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, rtol=tolerance, atol=tolerance)
    entropies = [part.evaluate(torch.from_numpy(one), torch.from_numpy(own)).entropies for part, one, own in parts]
    np.testing.assert_allclose(found.entropies, torch.stack(entropies).sum(dim=0), rtol=tolerance, atol=tolerance)


def test_joint_gradients_are_those_of_its_parts() -> None:
    head = heads(12, 11)
    actions = torch.from_numpy(MIXED.sample(head, MIXED.noise(np.random.default_rng(1), 1, 12, "float64")[0]))
    by_logprobs, by_entropies = (torch.from_numpy(np.random.default_rng(seed).normal(size=12)) for seed in (1, 2))
    found = MIXED.evaluate(torch.from_numpy(head), actions).gradients(by_logprobs, by_entropies)
    columns = [actions[:, 0].long(), actions[:, 1:3], actions[:, 3].long()]
    first, second, third = (
        part.evaluate(torch.from_numpy(one), own).gradients(by_logprobs, by_entropies)
        for part, one, own in zip(MIXED.parts, parts_of_mixed(head), columns, strict=True)
    )
    expected = torch.cat([first, second[:, :2], third, second[:, 2:]], dim=1)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


KINDS: dict[str, Distribution] = {
    "categorical": Categorical(4),
    "gaussian": DiagonalGaussian(4),
    "choices": CHOICES,
    "mixed": MIXED,
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


@kinds
def test_noise_in_float32_is_that_of_float64_rounded(kind: str) -> None:
    distribution = KINDS[kind]
    exact = distribution.noise(np.random.default_rng(2), 5, 2, "float64")
    np.testing.assert_array_equal(
        distribution.noise(np.random.default_rng(2), 5, 2, "float32"), exact.astype(np.float32)
    )


@kinds
@pytest.mark.parametrize("counted", ["logprobs", "entropies", "entropies by row", "both"])
def test_gradients_are_those_of_autograd_through_torchs_own(kind: str, counted: str) -> None:
    distribution = KINDS[kind]
    head = torch.from_numpy(heads(20, distribution.head_size)).requires_grad_()
    actions = torch.from_numpy(drawn(distribution, head.detach().numpy()))
    rng = np.random.default_rng(5)
    by_logprobs = torch.from_numpy(rng.normal(size=20)) * (counted not in ("entropies", "entropies by row"))
    by_entropies: Any = 0.7 * (counted != "logprobs")
    if counted == "entropies by row":
        by_entropies = torch.from_numpy(rng.normal(size=20))
    logprobs, entropies = torchs_own(distribution, head, actions)
    ((by_logprobs * logprobs).sum() + (by_entropies * entropies).sum()).backward()
    found = distribution.evaluate(head.detach(), actions)
    by_head = found.gradients(by_logprobs, by_entropies)
    assert head.grad is not None
    np.testing.assert_allclose(by_head, head.grad, rtol=1e-10, atol=1e-12)
    again = found.gradients(by_logprobs, by_entropies)
    np.testing.assert_array_equal(again, by_head)  # the first call has changed nothing


def torchs_own(distribution: Distribution, head: Any, actions: Any) -> tuple[Any, Any]:
    """Return log-probabilities and entropies from torch.distributions."""
    if isinstance(distribution, Categorical):
        reference: Any = torch.distributions.Categorical(logits=head)
        return reference.log_prob(actions), reference.entropy()
    if isinstance(distribution, DiagonalGaussian):
        mean, log_std = head.chunk(2, dim=1)
        reference = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
        return reference.log_prob(actions), reference.entropy()
    if distribution is CHOICES:
        parts = [(head[:, :3], actions[:, 0]), (head[:, 3:], actions[:, 1])]
    else:
        gaussian = torch.cat([head[:, 3:5], head[:, 9:]], dim=1)
        parts = [(head[:, :3], actions[:, 0]), (gaussian, actions[:, 1:3]), (head[:, 5:9], actions[:, 3])]
    assert isinstance(distribution, Joint)
    both = [torchs_own(part, *rest) for part, rest in zip(distribution.parts, parts, strict=True)]
    return sum(one for one, _ in both), sum(other for _, other in both)


@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_gradients_by_hand_are_those_of_the_default(kind: str) -> None:
    """Compare in float64 with autograd through the distribution's own formulas."""
    distribution = KINDS[kind]
    head = torch.from_numpy(heads(20, distribution.head_size))
    actions = torch.from_numpy(drawn(distribution, head.numpy()))
    by_hand = distribution.evaluate(head, actions)
    default = Distribution.evaluate(distribution, head, actions)
    for name in ("logprobs", "entropies"):
        np.testing.assert_allclose(getattr(by_hand, name), getattr(default, name), rtol=1e-12, atol=1e-14)
    for by_entropies in (0.3, torch.linspace(-1, 1, 20, dtype=torch.float64)):
        by_logprobs = torch.linspace(2, -1, 20, dtype=torch.float64)
        found, expected = (one.gradients(by_logprobs, by_entropies) for one in (by_hand, default))
        np.testing.assert_allclose(found, expected, rtol=1e-11, atol=1e-13)


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
    found = distribution.evaluate(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, distribution.log_prob(head, actions), rtol=1e-12)
    by_head = found.gradients(torch.full((9,), 2.0, dtype=torch.float64), 0.5)
    np.testing.assert_allclose(by_head, 2 * (1 - np.exp(head) * actions[:, None]) - 0.5, rtol=1e-12)
