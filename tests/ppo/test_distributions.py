"""Distributions in NumPy and in torch against torch.distributions and numerical integration."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from builders import spec_of
from torch import Tensor

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.joint import Joint
from dppo.ppo.distributions.simple import (
    Categorical,
    DiagonalGaussian,
    MultiCategorical,
    SquashedGaussian,
)
from dppo.ppo.learning.model import PPOModel

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


def test_gaussian_samples_have_the_mean_and_deviation_asked_for() -> None:
    mean = np.array([1.0, -2.0])
    std = np.exp([0.5, -1.0])
    head = np.tile(np.concatenate([mean, np.log(std)]), (40_000, 1))
    actions = drawn(DiagonalGaussian(2), head)
    np.testing.assert_allclose(actions.mean(axis=0), mean, atol=5 * std[0] / 200)
    np.testing.assert_allclose(actions.std(axis=0), std, rtol=0.02)
    assert abs(np.corrcoef(actions.T)[0, 1]) < 0.03


def parts_of_mixed(head: np.ndarray) -> list[np.ndarray]:
    """Split [logits, mean, logits, log_std] into the heads of the parts."""
    return [head[..., :3], np.concatenate([head[..., 3:5], head[..., 9:]], axis=-1), head[..., 5:9]]


def test_joint_concatenates_its_parts_with_the_free_parameters_at_the_end() -> None:
    assert (MIXED.head_size, MIXED.free_size, MIXED.noise_size, MIXED.action_shape) == (
        11,
        2,
        9,
        (4,),
    )
    assert (MIXED.action_dtype("float32"), CHOICES.action_dtype("float32")) == ("float32", "int64")
    head = heads(6, 11)
    rng = np.random.default_rng(3)  # parts draw in turn
    noises = [part.noise(rng, 1, 6, "float64")[0] for part in MIXED.parts]
    noise = MIXED.noise(np.random.default_rng(3), 1, 6, "float64")[0]
    np.testing.assert_array_equal(noise, np.concatenate(noises, axis=1))
    parts = list(zip(MIXED.parts, parts_of_mixed(head), noises, strict=True))
    samples = [part.sample(part_head, part_noise) for part, part_head, part_noise in parts]
    np.testing.assert_array_equal(MIXED.sample(head, noise), np.column_stack(samples))
    modes = [part.mode(part_head) for part, part_head, _ in parts]
    np.testing.assert_array_equal(MIXED.mode(head), np.column_stack(modes))


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
@pytest.mark.parametrize("choices", [UNEVEN, EVEN], ids=["uneven", "even"])
def test_several_choices_are_drawn_and_chosen_one_by_one(choices: MultiCategorical) -> None:
    head = heads(24, choices.head_size)
    noise = choices.noise(np.random.default_rng(5), 1, 24, "float64")[0]
    ends = np.cumsum(choices.counts)[:-1]
    parts = list(
        zip(
            choices.counts, np.split(head, ends, axis=1), np.split(noise, ends, axis=1), strict=True
        )
    )
    samples = [Categorical(n).sample(part_head, part_noise) for n, part_head, part_noise in parts]
    modes = [Categorical(n).mode(part_head) for n, part_head, _ in parts]
    np.testing.assert_array_equal(choices.sample(head, noise), np.stack(samples, axis=1))
    np.testing.assert_array_equal(choices.mode(head), np.stack(modes, axis=1))


def torch_scores(distribution: Distribution, head: Tensor, actions: Tensor) -> tuple[Any, Any]:
    """Return log-probabilities and entropies from torch.distributions."""
    if isinstance(distribution, Categorical):
        categorical: Any = torch.distributions.Categorical(logits=head)
        return categorical.log_prob(actions.long()), categorical.entropy()
    if isinstance(distribution, DiagonalGaussian):
        mean, log_std = head.chunk(2, dim=1)
        normal: Any = torch.distributions.Independent(
            torch.distributions.Normal(mean, log_std.exp()), 1
        )
        return normal.log_prob(actions), normal.entropy()
    if distribution is MIXED:
        gaussian = torch.cat([head[:, 3:5], head[:, 9:]], dim=1)
        part_heads = (head[:, :3], gaussian, head[:, 5:9])
        part_actions: Any = (actions[:, 0], actions[:, 1:3], actions[:, 3])
        parts = zip(MIXED.parts, part_heads, part_actions, strict=True)
    else:
        counts = (3, 2) if distribution is CHOICES else distribution.counts  # type: ignore[attr-defined]
        parts = zip(
            map(Categorical, counts), head.split(counts, dim=1), actions.unbind(1), strict=True
        )
    logprobs, entropies = zip(*(torch_scores(*part) for part in parts), strict=True)
    return sum(logprobs), sum(entropies)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "squashed"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-11), ("float32", 5e-5)])
def test_scores_and_gradients_are_those_of_torchs_own(
    kind: str, dtype: str, tolerance: float
) -> None:
    distribution = KINDS[kind]
    head = torch.from_numpy(heads(20, distribution.head_size, dtype)).requires_grad_()
    actions = torch.from_numpy(drawn(distribution, head.detach().numpy()))
    by_logprobs = torch.from_numpy(np.random.default_rng(5).normal(size=20).astype(dtype))
    logprobs, entropies = torch_scores(distribution, head, actions)
    ((by_logprobs * logprobs).sum() + 0.7 * entropies.sum()).backward()
    scored = distribution.scores_with_gradient(head.detach(), actions)
    assert_close = partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    assert_close(distribution.log_prob(head.detach().numpy(), actions.numpy()), logprobs.detach())
    assert_close(scored.logprobs, logprobs.detach())
    assert_close(scored.entropies, entropies.detach())
    assert head.grad is not None
    assert_close(scored.gradient(by_logprobs, 0.7), head.grad)


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


@pytest.mark.parametrize("counts", [(6,), (2, 4)], ids=["one", "several"])
def test_a_mask_renormalizes_over_the_allowed_choices(counts: tuple[int, ...]) -> None:
    """Log-probabilities and entropies are those of torch with logits of minus infinity; these have no gradient."""
    distribution = Categorical(6) if counts == (6,) else MultiCategorical(counts)
    head = torch.from_numpy(heads(40, 6, "float32"))
    masks = torch.from_numpy(np.random.default_rng(2).random((40, 6)) < 0.5)
    masks[:, [0, 2]] = True  # each element has a choice
    limited = distribution.limited_in_torch(head, masks)
    np.testing.assert_array_equal(limited, torch.where(masks, head, -1e9))
    np.testing.assert_array_equal(distribution.limited(head.numpy(), masks.numpy()), limited)
    actions = torch.from_numpy(drawn(distribution, limited.numpy()))
    scored = distribution.scores_with_gradient(limited, actions)
    assert (scored.gradient(torch.ones(40), torch.ones(40))[~masks] == 0).all()
    columns = actions.reshape(40, -1).unbind(1)
    logits = head.masked_fill(~masks, -math.inf).split(counts, dim=1)
    parts = [torch.distributions.Categorical(logits=part_logits) for part_logits in logits]
    logprobs = [part.log_prob(column) for part, column in zip(parts, columns, strict=True)]
    # finite: no action was forbidden
    torch.testing.assert_close(scored.logprobs, torch.stack(logprobs).sum(0))
    assert torch.isfinite(scored.logprobs).all()
    torch.testing.assert_close(
        scored.entropies, torch.stack([part.entropy() for part in parts]).sum(0)
    )


def test_a_model_scores_actions_among_the_allowed_ones() -> None:
    model = PPOModel(spec_of(dtype="float32"), 1)
    obs = torch.zeros(2, *model.spec.spaces.obs.shape)
    masks = torch.tensor([[True, False, True], [False, True, False]])
    scored = model.forward(obs, torch.tensor([2, 1]), masks)
    np.testing.assert_allclose(scored.policy.logprobs.exp(), [0.5, 1.0], rtol=0.05)
