"""Both sides of the distributions, NumPy's and torch's, against torch.distributions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from dppo.ppo.distributions import Categorical, DiagonalGaussian


def heads(rows: int, size: int, dtype: str = "float64") -> np.ndarray:
    return (np.random.default_rng(7).normal(size=(rows, size)) * 3).astype(dtype)


# ---------------------------------------------------------------------------------------- categorical


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_categorical_scores_as_torch_does(dtype: str, tolerance: float) -> None:
    head = heads(50, 6, dtype)
    actions = np.random.default_rng(8).integers(0, 6, 50)
    reference = torch.distributions.Categorical(logits=torch.from_numpy(head))
    expected = reference.log_prob(torch.from_numpy(actions)).numpy()
    np.testing.assert_allclose(Categorical(6).log_prob(head, None, actions), expected, rtol=tolerance, atol=tolerance)
    found = Categorical(6).evaluate(torch.from_numpy(head), None, torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.entropy, reference.entropy().mean(), rtol=tolerance)


def test_categorical_scores_any_leading_shape() -> None:
    head, actions = heads(12, 3).reshape(4, 3, 3), np.random.default_rng(1).integers(0, 3, (4, 3))
    found = Categorical(3).log_prob(head, None, actions)
    assert found.shape == (4, 3)
    for row in np.ndindex(4, 3):
        assert found[row] == pytest.approx(math.log(np.exp(head[row])[actions[row]] / np.exp(head[row]).sum()))


def test_categorical_survives_extreme_logits() -> None:
    head = np.array([[1e4, 0.0, -1e4], [-3e38, 0.0, 1.0]])
    actions = np.array([0, 2])
    expected = [0.0, -math.log1p(math.exp(-1))]
    np.testing.assert_allclose(Categorical(3).log_prob(head, None, actions), expected, atol=1e-12)
    found = Categorical(3).evaluate(torch.from_numpy(head), None, torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-12)
    by_head, _ = found.gradients(torch.ones(2, dtype=torch.float64), 0.1)
    assert torch.isfinite(found.entropy)
    assert torch.isfinite(by_head).all()


def test_categorical_samples_come_as_often_as_their_probability_says() -> None:
    logits, draws = np.array([0.0, 1.0, -1.0, 2.0, 0.5]), 40_000
    categorical = Categorical(5)
    noise = categorical.noise(np.random.default_rng(0), draws // 4, 4, "float32")
    assert noise.shape == (draws // 4, 4, 5)
    assert noise.dtype == np.float32
    actions = categorical.sample(np.broadcast_to(logits, (draws, 5)), None, noise.reshape(draws, 5))
    expected = draws * np.exp(logits) / np.exp(logits).sum()
    chi_square = (np.square(np.bincount(actions, minlength=5) - expected) / expected).sum()
    assert chi_square < 18.5  # of 4 degrees of freedom: passed by chance once in a thousand; the seed is fixed


def test_categorical_mode_is_the_likeliest_choice() -> None:
    head = heads(40, 5)
    np.testing.assert_array_equal(Categorical(5).mode(head), head.argmax(axis=1))
    np.testing.assert_array_equal(Categorical(5).sample(head, None, np.zeros_like(head)), Categorical(5).mode(head))


# ------------------------------------------------------------------------------------------- gaussian


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_gaussian_scores_as_torch_does(dtype: str, tolerance: float) -> None:
    mean, actions = heads(50, 3, dtype), heads(51, 3, dtype)[1:]
    log_std = np.array([0.3, -1.0, 0.0], dtype)
    normal = torch.distributions.Normal(torch.from_numpy(mean), torch.from_numpy(np.exp(log_std)))
    reference = torch.distributions.Independent(normal, 1)
    expected = reference.log_prob(torch.from_numpy(actions)).numpy()
    gaussian = DiagonalGaussian(3)
    np.testing.assert_allclose(gaussian.log_prob(mean, log_std, actions), expected, rtol=tolerance, atol=tolerance)
    found = gaussian.evaluate(torch.from_numpy(mean), torch.from_numpy(log_std), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.entropy, reference.entropy().mean(), rtol=tolerance)


def test_gaussian_scores_any_leading_shape() -> None:
    mean, actions, log_std = heads(12, 2).reshape(4, 3, 2), heads(12, 2).reshape(4, 3, 2)[::-1], np.array([0.5, -0.5])
    found = DiagonalGaussian(2).log_prob(mean, log_std, actions)
    flat = DiagonalGaussian(2).log_prob(mean.reshape(12, 2), log_std, actions.reshape(12, 2))
    np.testing.assert_array_equal(found, flat.reshape(4, 3))


def test_gaussian_samples_have_the_mean_and_deviation_asked_for() -> None:
    mean, log_std, draws = np.array([1.0, -2.0]), np.array([0.5, -1.0]), 40_000
    noise = DiagonalGaussian(2).noise(np.random.default_rng(0), draws, 1, "float64")
    assert noise.shape == (draws, 1, 2)
    drawn = DiagonalGaussian(2).sample(mean[None], log_std, noise[:, 0])
    np.testing.assert_array_equal(drawn, mean + np.exp(log_std) * noise[:, 0])
    np.testing.assert_allclose(drawn.mean(axis=0), mean, atol=5 * np.exp(0.5) / math.sqrt(draws))
    np.testing.assert_allclose(drawn.std(axis=0), np.exp(log_std), rtol=0.02)
    assert abs(np.corrcoef(drawn.T)[0, 1]) < 0.03


def test_gaussian_mode_is_the_mean() -> None:
    np.testing.assert_array_equal(DiagonalGaussian(3).mode(heads(4, 3)), heads(4, 3))


# ----------------------------------------------------------------------------------------------- both


@pytest.mark.parametrize("distribution", [Categorical(4), DiagonalGaussian(4)], ids=["categorical", "gaussian"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_samples_keep_to_their_dtype_and_generator(distribution: Categorical | DiagonalGaussian, dtype: str) -> None:
    head, log_std = heads(6, 4, dtype), np.zeros(4, dtype)
    one, two = (distribution.noise(np.random.default_rng(3), 2, 6, dtype) for _ in range(2))
    np.testing.assert_array_equal(one, two)
    assert one.dtype == dtype
    actions = distribution.sample(head, log_std, one[0])
    assert actions.dtype == distribution.action_dtype(dtype)
    assert actions.shape == (6, *distribution.action_shape)
    assert distribution.log_prob(head, log_std, actions).dtype == dtype


def test_noise_in_float32_is_that_of_float64_rounded() -> None:
    for distribution in (Categorical(3), DiagonalGaussian(3)):
        exact = distribution.noise(np.random.default_rng(2), 5, 2, "float64")
        np.testing.assert_array_equal(
            distribution.noise(np.random.default_rng(2), 5, 2, "float32"), exact.astype(np.float32)
        )


@pytest.mark.parametrize("weights", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("kind", ["categorical", "gaussian"])
def test_gradients_are_those_of_autograd(kind: str, weights: str) -> None:
    head = torch.from_numpy(heads(20, 4)).requires_grad_()
    log_std = torch.tensor([0.3, -0.5, 0.0, 1.0], dtype=torch.float64, requires_grad=True)
    distribution: Categorical | DiagonalGaussian
    if kind == "categorical":
        distribution, actions = Categorical(4), torch.arange(20) % 4
        reference: Any = torch.distributions.Categorical(logits=head)
    else:
        distribution, actions = DiagonalGaussian(4), torch.from_numpy(heads(21, 4)[1:])
        reference = torch.distributions.Independent(torch.distributions.Normal(head, log_std.exp()), 1)
    by_logprob = torch.from_numpy(np.random.default_rng(5).normal(size=20)) * (weights != "entropy")
    by_entropy = 0.7 * (weights != "logprobs")
    loss = (by_logprob * reference.log_prob(actions)).sum() + by_entropy * reference.entropy().sum()
    loss.backward()
    found = distribution.evaluate(head.detach(), log_std.detach(), actions)
    by_head, by_log_std = found.gradients(by_logprob, by_entropy)
    expected = torch.zeros_like(head) if head.grad is None else head.grad
    np.testing.assert_allclose(by_head, expected, rtol=1e-10, atol=1e-12)
    assert (by_log_std is None) == (log_std.grad is None)
    if by_log_std is not None:
        np.testing.assert_allclose(by_log_std, log_std.grad, rtol=1e-10, atol=1e-12)
    again, _ = found.gradients(by_logprob, by_entropy)
    np.testing.assert_array_equal(again, by_head)  # asking has changed nothing
