"""Critics and the gradient through actions against plain twins with autograd, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from plain import flat, plain_critics

from dppo.ppo.distributions.simple import SquashedGaussian
from dppo.sac.critics import Critics
from dppo.sac.policy import MAX_LOG_STD, MIN_LOG_STD, head_gradient, sample

ROWS = 7
INPUTS = 5


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("sizes", "count"), [((8,), 1), ((8, 6), 2), ((8, 6, 4), 3)], ids=str)
def test_values_and_gradients_are_those_of_autograd(sizes: tuple[int, ...], count: int) -> None:
    critics = Critics(INPUTS, sizes, count, torch.Generator().manual_seed(1))
    critics.to(torch.device("cpu"), torch.float64)
    weights = critics.parameters.weights.detach()
    weights.copy_(numbers(len(weights), seed=2))
    inputs = numbers(ROWS, INPUTS).requires_grad_()
    grad_values = numbers(count, ROWS, seed=3)
    modules = plain_critics(count, INPUTS, sizes, weights)
    expected = torch.stack([module(inputs).squeeze(1) for module in modules])
    parameters = [parameter for module in modules for parameter in module.parameters()]
    gradients = torch.autograd.grad((expected * grad_values).sum(), [inputs, *parameters])
    for parameter, gradient in zip(parameters, gradients[1:], strict=True):
        parameter.data = gradient

    values, residuals = critics.forward(inputs.detach())
    grad_actions = critics.action_gradients(residuals, grad_values, 2)
    assert not critics.parameters.gradient.any()
    critics.backward(residuals, grad_values)

    torch.testing.assert_close(values, expected.detach())
    torch.testing.assert_close(grad_actions, gradients[0][:, -2:])
    torch.testing.assert_close(critics.parameters.gradient, flat(modules))


def test_targets_follow_slowly() -> None:
    critics = Critics(INPUTS, (4,), 2, torch.Generator().manual_seed(1))
    inputs = torch.randn(ROWS, INPUTS)
    torch.testing.assert_close(critics.target_values(inputs), critics.forward(inputs)[0])
    before = critics.targets.clone()
    weights = critics.parameters.weights.detach()
    weights.add_(1.0)
    critics.follow(0.25)
    torch.testing.assert_close(critics.targets, before + 0.25)


@pytest.mark.proves("sample")
def test_samples_are_those_of_the_distribution_that_acts() -> None:
    squashed = SquashedGaussian(2, state_dependent=True)
    head = numbers(ROWS, 4)
    noise = numbers(ROWS, 2, seed=1)
    drawn = sample(head, noise)
    u = squashed.sample(head.numpy(), noise.numpy())
    np.testing.assert_allclose(drawn.actions.numpy(), np.tanh(u))
    np.testing.assert_allclose(drawn.logprobs.numpy(), squashed.log_prob(head.numpy(), u))


@pytest.mark.proves("head_gradient")
def test_gradient_of_the_head_is_that_of_autograd() -> None:
    head = (0.3 * numbers(ROWS, 4)).requires_grad_()
    noise = numbers(ROWS, 2, seed=1)
    grad_actions = numbers(ROWS, 2, seed=2)
    temperature = torch.tensor([0.3], dtype=torch.float64)
    drawn = sample(head, noise)
    loss = (temperature * drawn.logprobs).sum() + (grad_actions * drawn.actions).sum()
    (expected,) = torch.autograd.grad(loss, head)
    with torch.no_grad():
        gradient = head_gradient(head, sample(head, noise), grad_actions, temperature)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.proves("head_gradient")
def test_deviations_are_not_pushed_out_of_their_range() -> None:
    head = torch.tensor(
        [[0.0, MAX_LOG_STD], [0.0, MAX_LOG_STD], [0.0, MIN_LOG_STD], [0.0, MIN_LOG_STD]]
    )
    noise = torch.tensor([[1.0], [-1.0], [1.0], [-1.0]])
    drawn = sample(head, noise)
    grad_actions = torch.full((4, 1), 1e3)
    grad_log_std = head_gradient(head, drawn, grad_actions, torch.tensor([0.0]))[:, 1]
    assert (grad_log_std != 0).tolist() == [True, False, False, True]
    assert grad_log_std[0] > 0
    assert grad_log_std[3] < 0
