"""Value normalization (PopArt), against slow twins: units, exact outputs, ranks, checkpoints, actors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from builders import DISCRETE, PLAIN, random_weights, sampler_of
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.testing import assert_close
from updates import DISCRETE_SPEC as SPEC
from updates import make_trainer, random_batch, train

from dppo.errors import ConfigError
from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
from dppo.ppo.exchange.scales import Moments, ValueScale
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.popart import last_layer
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.spaces.spaces import Spaces


def mean_and_deviation(targets: list[float]) -> tuple[float, float]:
    mean = math.fsum(targets) / len(targets)
    return mean, math.sqrt(math.fsum((target - mean) ** 2 for target in targets) / len(targets))


def test_the_unit_is_mean_and_deviation_of_all_targets_so_far() -> None:
    """Rows that are not transitions are not counted."""
    trainer = make_trainer(norm_value=True)
    targets: list[float] = []
    for number in range(3):
        batch = random_batch(seed=number)
        weights = (torch.arange(len(batch)) % 3 >= number).to(batch.returns.dtype)
        returns = batch.returns * 100**number + 300 * number
        targets += returns[weights > 0].tolist()
        batch = replace(batch, returns=torch.where(weights > 0, returns, 1e9), weights=weights)
        figures = train(trainer, batch, seed=number)
        assert_allclose([figures["value_mean"], figures["value_std"]], mean_and_deviation(targets))


@pytest.mark.proves("PopArt")
def test_a_change_of_the_unit_changes_no_value() -> None:
    trainer = make_trainer(SPEC, norm_value=True)
    obs = random_batch(SPEC).obs
    assert trainer.popart is not None
    for shift in (0.0, 5e3, -70.0):
        before = trainer.popart.scale.restore(trainer.model.values(obs))
        batch = random_batch(SPEC, seed=2)
        trainer.popart.learn(replace(batch, returns=batch.returns * 100 + shift), trainer.parallel)
        after = trainer.popart.scale.restore(trainer.model.values(obs))
        assert_close(after, before, rtol=1e-9, atol=1e-9)


@pytest.mark.proves("PopArt")
@pytest.mark.parametrize(
    "options", [{}, {"clip_vloss": True}, {"ent_coef": 0.0, "update_epochs": 1}]
)
def test_an_update_is_that_on_standardized_targets(options: dict[str, Any]) -> None:
    """The twin: no option, but its returns, old values and last layer are put into the unit by hand."""
    batch = random_batch(SPEC)
    batch = replace(batch, returns=batch.returns * 50 - 20)
    trainer = make_trainer(SPEC, norm_value=True, **options)
    twin = make_trainer(SPEC, **options)
    mean, std = mean_and_deviation(batch.returns.tolist())
    named = SPEC.unflatten(twin.weights())
    named["value.4.weight"] = named["value.4.weight"] / std
    named["value.4.bias"] = (named["value.4.bias"] - mean) / std
    twin.load(SPEC.flatten(named), twin.state())
    by_hand = replace(
        batch, values=(batch.values - mean) / std, returns=(batch.returns - mean) / std
    )
    figures = train(trainer, batch)
    expected = train(twin, by_hand)
    assert_allclose(trainer.weights(), twin.weights(), rtol=1e-9, atol=1e-12)
    for name in ("value_loss", "explained_variance"):
        assert figures[name] == pytest.approx(expected[name], rel=1e-7)


def test_actors_report_values_in_units_of_rewards() -> None:
    segments = []
    for scale in (None, ValueScale(mean=-300.0, std=40.0)):
        sampler, spec = sampler_of(
            [gym.make("CartPole-v1")], num_steps=40, track=False, dtype="float32"
        )
        snapshot = PolicySnapshot(0, random_weights(spec), None, scale)
        segments.append(sampler.collect(SegmentRequest(0, 0), snapshot)[1])
    plain, restored = segments
    assert restored.values.dtype == plain.values.dtype
    assert_allclose(restored.values, plain.values * 40 - 300, rtol=1e-6)
    assert_allclose(restored.next_values, plain.next_values * 40 - 300, rtol=1e-6)
    assert restored.actions.tobytes() == plain.actions.tobytes()


def test_without_targets_and_with_equal_ones_the_unit_is_safe() -> None:
    assert ValueScale.of(Moments.empty(())) == ValueScale(0.0, 1.0)
    assert ValueScale.of(Moments.of(np.full(5, 7.0))) == ValueScale(7.0, 1e-6)


class Values(nn.Module):
    """A module whose values come from a sequence called `name`, and are changed by `output`."""

    def __init__(
        self,
        spaces: Spaces,
        head_size: int,
        name: str = "value",
        last: str = "Identity",
        output: Any = torch.squeeze,
    ) -> None:
        super().__init__()
        self.policy = nn.Linear(4, head_size)
        layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), getattr(nn, last)())
        setattr(self, name, layers)
        self.name = name
        self.output = output

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.policy(obs), self.output(getattr(self, self.name)(obs)).reshape(len(obs))


def spec_with(**options: Any) -> ModuleSpec:
    return ModuleSpec(Spaces(np.dtype((np.float32, (4,))), DISCRETE), Values, options, "float32")


@pytest.mark.parametrize("options", [{"last": "Softplus"}, {"name": "critic"}], ids=str)
def test_values_that_do_not_end_in_a_linear_layer_called_value_are_refused(
    options: dict[str, str],
) -> None:
    """To correct the layer would change them."""
    with pytest.raises(
        ConfigError, match="no linear layer with one output and a bias that is called `value`"
    ):
        last_layer(spec_with(**options))


@pytest.mark.parametrize("output", [lambda values: 0.1 * values, torch.neg, torch.tanh])
def test_a_network_that_changes_the_values_of_its_last_layer_is_refused(output: Any) -> None:
    model = PPOModel(spec_with(output=output), 1)
    with pytest.raises(ConfigError, match="the network changes what its layer `value` returns"):
        PPOTrainer(model, replace(PLAIN, norm_value=True), minibatches=1)


def test_checking_the_last_layer_changes_no_weight() -> None:
    spec = spec_with()
    checked = PPOTrainer(PPOModel(spec, 1), replace(PLAIN, norm_value=True), minibatches=1)
    assert_array_equal(checked.weights(), PPOModel(spec, 1).parameters.weights.detach())


@pytest.mark.parametrize("last", ["Identity", "Flatten"])
def test_the_last_linear_layer_is_found_by_its_name(last: str) -> None:
    """A layer behind it may change the shape."""
    spec = spec_with(last=last)
    named = spec.unflatten(np.arange(spec.num_parameters, dtype=np.float32))
    weight, bias = last_layer(spec)
    assert named["value.2.weight"].flatten().tolist() == list(range(weight.start, weight.stop))
    assert named["value.2.bias"].tolist() == list(range(bias.start, bias.stop))
