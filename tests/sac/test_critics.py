"""Critics and the gradient through actions against plain twins; what networks read, and how a run announces them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import make_config
from gymnasium import spaces
from numpy.testing import assert_allclose
from plain import flat, plain_critics
from torch.testing import assert_close

from dppo.config.resolve import resolve
from dppo.envs.spaces import describe_spaces, with_critic_obs
from dppo.hosts.plans import trainer_plan
from dppo.hosts.sac import networks_in_words
from dppo.hosts.trainer_builder import build_trainer
from dppo.ppo.distributions.simple import SquashedGaussian
from dppo.sac.critics import Critics
from dppo.sac.inputs import CriticInputs
from dppo.sac.policy import MAX_LOG_STD, MIN_LOG_STD, clone_gradient, head_gradient, sample
from dppo.sac.trainer import SACTrainer
from dppo.spaces.actions import continuous_width
from dppo.spaces.spaces import Spaces

ROWS = 7
INPUTS = 5


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def critics_of(sizes: tuple[int, ...], count: int) -> Critics:
    generator = torch.Generator().manual_seed(1)
    return Critics(INPUTS, sizes, count, generator)


@pytest.mark.parametrize(("sizes", "count"), [((8,), 1), ((8, 6), 2), ((8, 6, 4), 3)], ids=str)
def test_values_and_gradients_are_those_of_autograd(sizes: tuple[int, ...], count: int) -> None:
    critics = critics_of(sizes, count)
    critics.to(torch.device("cpu"), torch.float64)
    weights = critics.parameters.weights.detach()
    weights.copy_(numbers(len(weights), seed=2))
    inputs = numbers(ROWS, INPUTS)
    grad_values = numbers(count, ROWS, seed=3)

    inputs.requires_grad_()
    modules = plain_critics(count, INPUTS, sizes, weights)
    rows_of_critics = [module(inputs).squeeze(1) for module in modules]
    expected = torch.stack(rows_of_critics)
    loss = (expected * grad_values).sum()
    loss.backward()
    assert inputs.grad is not None
    for module in modules:
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.data = parameter.grad
    expected_gradient = flat(modules)

    values, residuals = critics.forward(inputs.detach())
    assert_close(values, expected.detach())

    num_actions = 2
    grad_actions = critics.action_gradients(residuals, grad_values, num_actions)
    assert_close(grad_actions, inputs.grad[:, -num_actions:])

    gradient = critics.parameters.gradient
    assert not gradient.any()
    critics.backward(residuals, grad_values)
    assert_close(gradient, expected_gradient)


def test_targets_follow_slowly() -> None:
    critics = critics_of((4,), 2)
    inputs = torch.randn(ROWS, INPUTS)
    values, _ = critics.forward(inputs)
    assert_close(critics.target_values(inputs), values)

    before = critics.targets.clone()
    weights = critics.parameters.weights.detach()
    weights.add_(1.0)
    critics.follow(0.25)
    assert_close(critics.targets, before + 0.25)


@pytest.mark.proves("sample")
def test_samples_are_those_of_the_distribution_that_acts() -> None:
    squashed = SquashedGaussian(2, state_dependent=True)
    head = numbers(ROWS, 4)
    noise = numbers(ROWS, 2, seed=1)
    drawn = sample(head, noise)
    u = squashed.sample(head.numpy(), noise.numpy())
    assert_allclose(drawn.actions.numpy(), np.tanh(u))

    logprobs = squashed.log_prob(head.numpy(), u)
    assert_allclose(drawn.logprobs.numpy(), logprobs)


@pytest.mark.proves("head_gradient")
def test_gradient_of_the_head_is_that_of_autograd() -> None:
    head = 0.3 * numbers(ROWS, 4)
    head.requires_grad_()
    noise = numbers(ROWS, 2, seed=1)
    grad_actions = numbers(ROWS, 2, seed=2)
    temperature = torch.tensor([0.3], dtype=torch.float64)
    drawn = sample(head, noise)
    entropy_loss = temperature * drawn.logprobs
    value_loss = grad_actions * drawn.actions
    loss = entropy_loss.sum() + value_loss.sum()
    (expected,) = torch.autograd.grad(loss, head)

    with torch.no_grad():
        drawn = sample(head, noise)
        gradient = head_gradient(head, drawn, grad_actions, temperature)
    assert_close(gradient, expected)


@pytest.mark.proves("head_gradient")
def test_deviations_are_not_pushed_out_of_their_range() -> None:
    largest = [0.0, MAX_LOG_STD]
    smallest = [0.0, MIN_LOG_STD]
    head = torch.tensor([largest, largest, smallest, smallest])
    higher_and_lower = torch.tensor([1.0, -1.0, 1.0, -1.0])
    noise = higher_and_lower.unsqueeze(1)
    drawn = sample(head, noise)
    grad_actions = torch.full((4, 1), 1e3)
    without_entropy = torch.tensor([0.0])

    gradient = head_gradient(head, drawn, grad_actions, without_entropy)
    raised, kept_at_largest, kept_at_smallest, lowered = gradient[:, 1]
    assert raised > 0
    assert kept_at_largest == 0
    assert kept_at_smallest == 0
    assert lowered < 0


@pytest.mark.proves("clone_gradient")
def test_gradient_of_a_clone_is_that_of_autograd_within_the_range_of_deviations() -> None:
    head = 0.3 * numbers(ROWS, 4)
    head[0, 3] = MIN_LOG_STD
    head.requires_grad_()
    intended = numbers(ROWS, 2, seed=1)
    actions = intended + 0.1 * numbers(ROWS, 2, seed=2)
    intended[0] = actions[0] = head[0, :2].detach()  # without noise, the deviation would fall
    losses, gradient = clone_gradient(head, intended, actions)
    (expected,) = torch.autograd.grad(losses.sum(), head)
    assert expected[0, 3] == 1
    expected[0, 3] = 0
    assert_close(gradient.detach(), expected)


NUMBERS = spaces.Box(-9.0, 9.0, (3,))
PARTS = spaces.Dict(
    speed=spaces.Box(-9.0, 9.0, (2, 2)),
    gear=spaces.Discrete(3, start=-1),
    switches=spaces.MultiBinary(2),
    station=spaces.Discrete(5000),
)
ACTIONS = spaces.Box(-2.0, 2.0, (2,))


class Plant(gym.Env[Any, Any]):
    """An environment that is only described."""

    action_space = ACTIONS

    def __init__(self, obs: spaces.Space[Any]) -> None:
        self.observation_space = obs


def described(obs: spaces.Space[Any]) -> Spaces:
    return describe_spaces(Plant(obs), action_bounds="squash")


def test_critics_read_all_leaves_and_categories_as_one_hot_codes() -> None:
    speeds = torch.arange(1.0, 9.0).view(2, 4)
    gears = torch.tensor([1, -1])
    third = [0.0, 0.0, 1.0]
    first = [1.0, 0.0, 0.0]
    gear_codes = torch.tensor([third, first])
    switches = torch.eye(2)
    stations = torch.tensor([4000, 3])
    actions = torch.tensor([0.5, 0.25]).unsqueeze(1)

    inputs = CriticInputs(described(PARTS), 1, torch.device("cpu"))
    obs = {
        "gear": gears,
        "speed": speeds.view(2, 2, 2),
        "station": stations,
        "switches": switches.to(torch.int8),
    }
    station_numbers = stations.float().unsqueeze(1)
    columns = [speeds, gear_codes, switches, station_numbers, actions]
    expected = torch.cat(columns, dim=1)
    assert torch.equal(inputs(obs, actions), expected)
    assert inputs.size == expected.shape[1]


@pytest.mark.parametrize(
    ("obs", "settings", "policy", "ending"),
    [
        (NUMBERS, {}, "an MLP with 8 x 9 relu units for the policy", "."),
        (
            PARTS,
            {"critic_obs": ("speed",)},
            "one-hot codes, the numbers as they are, joined into an MLP with 8 x 9 relu units for the policy",
            "; only they read speed.",
        ),
    ],
)
def test_a_run_announces_policy_and_critics_with_their_sizes(
    obs: spaces.Space[Any], settings: dict[str, Any], policy: str, ending: str
) -> None:
    sizes = {"hidden_sizes": (8, 9), "critic_sizes": (7, 6)}
    config = make_config({"env_id": "Plant-v0", "algo": "sac"} | sizes | settings)
    run_spaces = described(obs)
    if config.critic_obs:
        run_spaces = with_critic_obs(run_spaces, config.critic_obs)
    resolved, _ = resolve(config, continuous_width(run_spaces.actions))
    trainer = build_trainer(trainer_plan(resolved), run_spaces)
    assert isinstance(trainer, SACTrainer)

    critics = len(trainer.learned_state()["critics.weights"])
    num_parameters = 0
    for name, parameter in trainer.spec.module(0).named_parameters():
        if not name.startswith("value"):
            num_parameters += parameter.numel()

    text = networks_in_words(config, run_spaces)
    start = f"Network: {policy}, {num_parameters:,} parameters, because the observation "
    assert text.startswith(start)

    critics_in_words = (
        f"two critics with 7 x 6 units, {critics:,} parameters, which also read the action{ending}"
    )
    assert text.endswith(critics_in_words)

    ppo = make_config({"env_id": "Plant-v0"})
    assert "for the value" in networks_in_words(ppo, described(NUMBERS))


def test_a_minibatch_has_the_rows_of_its_setting_however_small_the_batch_is() -> None:
    small = {"env_id": "Plant-v0", "algo": "sac", "num_samplers": 2, "num_steps": 20}
    default = make_config(small)
    assert default.sizes.minibatch_rows == 128
    changed = make_config(small | {"minibatch_size": 32})
    assert changed.sizes.minibatch_rows == 32
