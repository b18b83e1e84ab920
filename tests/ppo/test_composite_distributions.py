"""Several choices, squashed normal variables and masks, against torch.distributions and numerical integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from dppo.ppo.distributions.base import Distribution, allowed
from dppo.ppo.distributions.categorical import Categorical, MultiCategorical
from dppo.ppo.distributions.gaussian import SquashedGaussian
from dppo.ppo.learning.model import PPOModel

UNEVEN, EVEN = MultiCategorical((3, 1, 5)), MultiCategorical((4, 4))
both = pytest.mark.parametrize("choices", [UNEVEN, EVEN], ids=["uneven", "even"])


def heads(rows: int, size: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, size)) * 3


def drawn(distribution: Distribution, head: np.ndarray, seed: int = 3) -> np.ndarray:
    noise = distribution.noise(np.random.default_rng(seed), 1, len(head), "float64")[0]
    return distribution.sample(head, noise)


def parts(choices: MultiCategorical, head: np.ndarray) -> list[np.ndarray]:
    return np.split(head, np.cumsum(choices.counts)[:-1], axis=-1)


@both
def test_several_choices_are_scored_as_torch_does(choices: MultiCategorical) -> None:
    head = heads(30, choices.head_size)
    actions = drawn(choices, head)
    assert actions.dtype == choices.action_dtype("float32") == "int64"
    references = [torch.distributions.Categorical(logits=torch.from_numpy(one)) for one in parts(choices, head)]
    expected = sum(one.log_prob(torch.from_numpy(actions[:, at].copy())) for at, one in enumerate(references))
    entropies = sum(one.entropy() for one in references)
    np.testing.assert_allclose(choices.log_prob(head, actions), expected, rtol=1e-12)
    found = choices.evaluate(torch.from_numpy(head), torch.from_numpy(actions))
    np.testing.assert_allclose(found.logprobs, expected, rtol=1e-12)
    np.testing.assert_allclose(found.entropies, entropies, rtol=1e-12)


@both
def test_several_choices_are_drawn_and_chosen_one_by_one(choices: MultiCategorical) -> None:
    head = heads(24, choices.head_size).reshape(2, 12, -1)
    noise = choices.noise(np.random.default_rng(5), 2, 12, "float64")
    alone = [Categorical(n) for n in choices.counts]
    pairs = list(zip(alone, parts(choices, head), parts(choices, noise), strict=True))
    expected = np.stack([one.sample(own, own_noise) for one, own, own_noise in pairs], axis=-1)
    np.testing.assert_array_equal(choices.sample(head, noise), expected)
    np.testing.assert_array_equal(choices.mode(head), np.stack([one.mode(own) for one, own, _ in pairs], axis=-1))
    np.testing.assert_array_equal(
        choices.log_prob(head, expected).ravel(), choices.log_prob(head.reshape(24, -1), expected.reshape(24, -1))
    )


@both
def test_gradients_of_several_choices_are_those_of_each(choices: MultiCategorical) -> None:
    head = heads(9, choices.head_size)
    actions = drawn(choices, head)
    by_logprobs, by_entropies = (torch.from_numpy(one) for one in heads(2, 9))
    whole = choices.evaluate(torch.from_numpy(head), torch.from_numpy(actions)).gradients(by_logprobs, by_entropies)
    each = [
        Categorical(n).evaluate(torch.from_numpy(own.copy()), torch.from_numpy(actions[:, at].copy()))
        for at, (n, own) in enumerate(zip(choices.counts, parts(choices, head), strict=True))
    ]
    expected = torch.cat([one.gradients(by_logprobs, by_entropies) for one in each], dim=1)
    np.testing.assert_allclose(whole, expected, atol=1e-12)


def test_a_squashed_normal_variable_is_scored_as_torch_does() -> None:
    head, squashed = heads(20, 4) / 3, SquashedGaussian(2)
    u = torch.from_numpy(drawn(squashed, head))
    normal = torch.distributions.Normal(torch.from_numpy(head[:, :2]), torch.from_numpy(head[:, 2:]).exp())
    tanh = torch.distributions.TransformedDistribution(normal, torch.distributions.TanhTransform(cache_size=1))
    expected = (normal.log_prob(u) - tanh.transforms[0].log_abs_det_jacobian(u, u.tanh())).sum(dim=1)
    np.testing.assert_allclose(squashed.log_prob(head, u.numpy()), expected, rtol=1e-8)
    np.testing.assert_allclose(squashed.evaluate(torch.from_numpy(head), u).logprobs, expected, rtol=1e-8)


@pytest.mark.parametrize("mean", [0.0, 0.7, -3.0])
@pytest.mark.parametrize("std", [0.05, 0.5, 1.0, 3.0])
def test_density_and_entropy_of_a_squashed_variable_are_those_of_an_integral(mean: float, std: float) -> None:
    squashed, head = SquashedGaussian(1), np.array([[mean, math.log(std)]])
    u = np.linspace(max(mean - 9 * std, -18.0), min(mean + 9 * std, 18.0), 200_001)
    log_density = squashed.log_prob(np.repeat(head, len(u), axis=0), u[:, None])
    mass = np.exp(log_density) * (1 - np.square(np.tanh(u)))  # da/du of a = tanh(u): the integrals are over u
    sums = np.array([mass, -mass * log_density]).sum(axis=1) * (u[1] - u[0])
    assert sums[0] == pytest.approx(1.0, abs=1e-6)
    found = squashed.evaluate(torch.from_numpy(head), torch.zeros(1, 1, dtype=torch.float64)).entropies.item()
    assert found == pytest.approx(sums[1], abs=5e-3)


def test_the_gradient_of_a_squashed_entropy_is_that_of_differences() -> None:
    squashed, step = SquashedGaussian(2), 1e-5
    head, u = torch.from_numpy(heads(1, 4) / 3), torch.zeros(1, 2, dtype=torch.float64)
    zeros, ones = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    found = squashed.evaluate(head, u).gradients(zeros, ones)
    for at in range(4):
        moved = torch.zeros_like(head)
        moved[0, at] = step
        higher, lower = (squashed.evaluate(head + sign * moved, u).entropies.item() for sign in (1, -1))
        assert found[0, at].item() == pytest.approx((higher - lower) / (2 * step), rel=1e-5)


def test_a_squashed_variable_far_outside_scores_finitely() -> None:
    squashed, far = SquashedGaussian(1), np.array([[400.0], [-400.0]])
    head = np.array([[300.0, 5.0], [-300.0, 5.0]])
    found = squashed.evaluate(torch.from_numpy(head), torch.from_numpy(far))
    assert np.isfinite(squashed.log_prob(head, far)).all()
    assert torch.isfinite(found.logprobs).all()
    assert torch.isfinite(found.gradients(found.logprobs, found.entropies)).all()


@pytest.mark.parametrize("distribution", [Categorical(6), MultiCategorical((2, 4))], ids=["one", "several"])
def test_a_mask_renormalizes_over_the_allowed_choices(distribution: Distribution) -> None:
    """Log-probabilities, entropies and gradients are those of a smaller distribution; the rest has no gradient."""
    head = torch.from_numpy(heads(40, 6).astype(np.float32))
    masks = np.random.default_rng(2).random((40, 6)) < 0.5
    masks[:, [0, 2]] = True  # each element keeps a choice
    shown = torch.where(torch.from_numpy(masks), head, -1e9)
    np.testing.assert_array_equal(allowed(head.numpy(), masks), shown)
    actions = drawn(distribution, shown.numpy())
    counts = (6,) if isinstance(distribution, Categorical) else (2, 4)
    columns = actions.reshape(40, -1)
    for row in range(40):
        start = 0
        for at, n in enumerate(counts):
            assert masks[row, start + columns[row, at]]
            start += n
    found = distribution.evaluate(shown, torch.from_numpy(actions))
    by_head = found.gradients(torch.ones(40), torch.ones(40))
    assert (by_head[~torch.from_numpy(masks)] == 0).all()
    for row in range(40):
        start, logprob, entropy = 0, 0.0, 0.0
        for at, n in enumerate(counts):
            own, mask = head[row, start : start + n], torch.from_numpy(masks[row, start : start + n])
            kept = torch.distributions.Categorical(logits=own[mask])
            index = int(mask[: columns[row, at]].sum())
            logprob += kept.log_prob(torch.tensor(index)).item()
            entropy += kept.entropy().item()
            start += n
        assert found.logprobs[row].item() == pytest.approx(logprob, abs=1e-5)
        assert found.entropies[row].item() == pytest.approx(entropy, abs=1e-5)


def test_a_model_scores_actions_among_the_allowed_ones() -> None:
    from builders import DISCRETE, spec_of

    model = PPOModel(spec_of(DISCRETE, dtype="float32"), 1)
    obs, masks = torch.zeros(2, *model.spec.obs_shape), torch.tensor([[True, False, True], [False, True, False]])
    scored = model.forward(obs, torch.tensor([2, 1]), masks)
    assert scored.policy.logprobs[1].item() == 0.0
    assert scored.policy.logprobs[0].item() == pytest.approx(-math.log(2), abs=0.05)
    np.testing.assert_array_equal(model.log_probs(obs, torch.tensor([2, 1]), masks), scored.policy.logprobs)
