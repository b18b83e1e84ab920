"""Value normalization (PopArt), against slow twins: units, exact outputs, ranks, checkpoints, actors."""

from __future__ import annotations

import dataclasses
import math
from contextlib import nullcontext
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import DISCRETE, PLAIN, at_rate, random_weights, sampler_of
from torch import nn
from updates import DISCRETE_SPEC as SPEC
from updates import make_trainer, random_batch

from dppo.errors import ConfigError
from dppo.ppo.exchange.moments import Moments
from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.popart import last_layer
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.spaces.spaces import Spaces


def mean_and_deviation(returns: list[torch.Tensor]) -> tuple[float, float]:
    """Return mean and deviation of all targets, one after the other."""
    targets = [float(target) for one in returns for target in one]
    mean = math.fsum(targets) / len(targets)
    return mean, math.sqrt(math.fsum((one - mean) ** 2 for one in targets) / len(targets))


def test_the_unit_is_mean_and_deviation_of_all_targets_so_far() -> None:
    """Rows that are not transitions are not counted."""
    trainer, seen = make_trainer(norm_value=True), []
    for number in range(3):
        batch = random_batch(seed=number)
        weights = (torch.arange(len(batch)) % 3 >= number).to(batch.returns.dtype)
        returns = batch.returns * 100**number + 300 * number
        seen.append(returns[weights > 0])
        batch = dataclasses.replace(batch, returns=torch.where(weights > 0, returns, 1e9), weights=weights)
        figures = trainer.update(batch, at_rate(trainer, 1e-3), np.random.default_rng(number)).figures
        np.testing.assert_allclose([figures["value_mean"], figures["value_std"]], mean_and_deviation(seen))


@pytest.mark.proves("PopArt")
def test_a_change_of_the_unit_changes_no_value() -> None:
    trainer, obs = make_trainer(SPEC, norm_value=True), random_batch(SPEC).obs
    assert trainer._popart is not None
    for shift in (0.0, 5e3, -70.0):
        before = trainer._popart.scale.restore(trainer.model.values(obs))
        batch = random_batch(SPEC, seed=2)
        trainer._popart.learn(dataclasses.replace(batch, returns=batch.returns * 100 + shift), trainer.parallel)
        after = trainer._popart.scale.restore(trainer.model.values(obs))
        torch.testing.assert_close(after, before, rtol=1e-9, atol=1e-9)


@pytest.mark.proves("PopArt")
@pytest.mark.parametrize("options", [{}, {"clip_vloss": True}, {"ent_coef": 0.0, "update_epochs": 1}])
def test_an_update_is_one_on_standardized_targets_with_a_corrected_last_layer(options: dict[str, Any]) -> None:
    """The twin: no option, but its returns, old values and last layer are put into the unit by hand."""
    batch = random_batch(SPEC)
    batch = dataclasses.replace(batch, returns=batch.returns * 50 - 20)
    trainer, twin = make_trainer(SPEC, norm_value=True, **options), make_trainer(SPEC, **options)
    mean, std = mean_and_deviation([batch.returns])
    named = SPEC.unflatten(twin.weights())
    named["value.4.weight"] = named["value.4.weight"] / std
    named["value.4.bias"] = (named["value.4.bias"] - mean) / std
    twin.load(SPEC.flatten(named), twin.state())
    by_hand = dataclasses.replace(batch, values=(batch.values - mean) / std, returns=(batch.returns - mean) / std)
    found = trainer.update(batch, at_rate(trainer, 1e-3), np.random.default_rng(0)).figures
    expected = twin.update(by_hand, at_rate(twin, 1e-3), np.random.default_rng(0)).figures
    np.testing.assert_allclose(trainer.weights(), twin.weights(), rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(found["value_loss"], expected["value_loss"])
    np.testing.assert_allclose(found["explained_variance"], expected["explained_variance"])


def test_actors_report_values_in_units_of_rewards() -> None:
    scale, collected = ValueScale(mean=-300.0, std=40.0), []
    for one in (None, scale):
        sampler, spec = sampler_of([gym.make("CartPole-v1")], num_steps=40, track=False, dtype="float32")
        snapshot = PolicySnapshot(0, random_weights(spec), None, one)
        collected.append(sampler.collect(SegmentRequest(0, 0), snapshot)[1])
    plain, restored = collected
    assert restored.values.dtype == plain.values.dtype
    np.testing.assert_allclose(restored.values, plain.values * 40 - 300, rtol=1e-6)
    np.testing.assert_allclose(restored.next_values, plain.next_values * 40 - 300, rtol=1e-6)
    assert restored.actions.tobytes() == plain.actions.tobytes()


def test_without_targets_and_with_equal_ones_the_unit_is_safe() -> None:
    assert ValueScale.of(Moments.empty(())) == ValueScale(0.0, 1.0)
    assert ValueScale.of(Moments.of(np.full(5, 7.0))) == ValueScale(7.0, 1e-6)


class Named(nn.Module):
    """A module whose values come from a sequence called `value`, or from a layer of another name."""

    def __init__(self, spaces: Spaces, head_size: int, name: str) -> None:
        super().__init__()
        self.policy = nn.Linear(4, head_size)
        setattr(self, name, nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.name = name

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(obs), getattr(self, self.name)(obs).squeeze(1)


class Positive(nn.Module):
    """Has values that are not those of a linear layer."""

    def __init__(self, spaces: Spaces, head_size: int) -> None:
        super().__init__()
        self.policy = nn.Linear(4, head_size)
        self.value = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Softplus())

    def forward(self, obs: torch.Tensor) -> Any:
        return self.policy(obs), self.value(obs).squeeze(-1)


def test_values_that_do_not_end_in_a_linear_layer_are_refused() -> None:
    """To correct the layer would change them."""
    spec = ModuleSpec(Spaces(np.dtype((np.float32, (4,))), DISCRETE), Positive, {}, "float32")
    with pytest.raises(ConfigError, match="the network has no linear layer with one output and"):
        last_layer(spec)


class Scaled(Named):
    """Changes what its last layer returns."""

    def __init__(self, spaces: Spaces, head_size: int, scale: float) -> None:
        super().__init__(spaces, head_size, "value")
        self.scale = scale

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        head, values = super().forward(obs)
        return head, values.tanh() if self.scale == 0 else self.scale * values


@pytest.mark.parametrize("scale", [1.0, 0.1, -1.0, 0.0])
def test_a_network_that_changes_the_values_of_its_last_layer_is_refused(scale: float) -> None:
    spec = ModuleSpec(Spaces(np.dtype((np.float32, (4,))), DISCRETE), Scaled, {"scale": scale}, "float32")
    refused = pytest.raises(ConfigError, match="the network changes what its layer `value` returns")
    with nullcontext() if scale == 1 else refused:
        trainer = PPOTrainer(PPOModel(spec, 1), dataclasses.replace(PLAIN, norm_value=True), minibatches=1)
        drawn = PPOTrainer(PPOModel(spec, 1), PLAIN, minibatches=1)
        np.testing.assert_array_equal(trainer.weights(), drawn.weights())


class Flat(Positive):
    """Ends in a layer that only changes the shape."""

    def __init__(self, spaces: Spaces, head_size: int) -> None:
        super().__init__(spaces, head_size)
        self.value = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))

    def forward(self, obs: torch.Tensor) -> Any:
        return self.policy(obs), self.value(obs)


def test_a_layer_behind_it_may_change_the_shape() -> None:
    spec = ModuleSpec(Spaces(np.dtype((np.float32, (4,))), DISCRETE), Flat, {}, "float32")
    assert [one.stop - one.start for one in last_layer(spec)] == [8, 1]


def test_the_last_layer_is_found_by_its_name() -> None:
    spaces = Spaces(np.dtype((np.float32, (4,))), DISCRETE)
    spec = ModuleSpec(spaces, Named, {"name": "value"}, "float32")
    weight, bias = last_layer(spec)
    named = spec.unflatten(np.arange(spec.num_parameters, dtype=np.float32))
    assert named["value.2.weight"].flatten().tolist() == list(range(weight.start, weight.stop))
    assert named["value.2.bias"].tolist() == list(range(bias.start, bias.stop))
    with pytest.raises(ConfigError, match="no linear layer with one output and a bias that is called `value`"):
        last_layer(ModuleSpec(spaces, Named, {"name": "critic"}, "float32"))
