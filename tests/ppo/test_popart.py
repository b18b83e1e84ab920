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
from dppo.ppo.exchange.records import PolicySnapshot, Segment, SegmentRequest
from dppo.ppo.exchange.scales import Moments, ValueScale
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.learning.popart import last_layer
from dppo.ppo.learning.trainer import PPOTrainer
from dppo.ppo.networks.user_module import ModuleSpec
from dppo.spaces.spaces import Spaces


def mean_and_deviation(targets: list[float]) -> tuple[float, float]:
    count = len(targets)
    mean = math.fsum(targets) / count
    squares = [(target - mean) ** 2 for target in targets]
    variance = math.fsum(squares) / count
    return mean, math.sqrt(variance)


def test_the_unit_is_mean_and_deviation_of_all_targets_so_far() -> None:
    """Rows that are not transitions are not counted."""
    trainer = make_trainer(norm_value=True)
    targets: list[float] = []
    for number in range(3):
        batch = random_batch(seed=number)
        counted = torch.arange(len(batch)) % 3 >= number
        returns = batch.returns * 100**number + 300 * number
        targets += returns[counted].tolist()
        weights = counted.to(returns.dtype)
        loud = torch.where(counted, returns, 1e9)
        batch = replace(batch, returns=loud, weights=weights)
        figures = train(trainer, batch, seed=number)
        mean, std = mean_and_deviation(targets)
        assert_allclose(figures["value_mean"], mean)
        assert_allclose(figures["value_std"], std)


@pytest.mark.proves("PopArt")
def test_a_change_of_the_unit_changes_no_value() -> None:
    trainer = make_trainer(SPEC, norm_value=True)
    popart = trainer.popart
    assert popart is not None

    obs = random_batch(SPEC).obs
    batch = random_batch(SPEC, seed=2)

    def restored_values() -> torch.Tensor:
        return popart.scale.restore(trainer.model.values(obs))

    for shift in (0.0, 5e3, -70.0):
        before = restored_values()
        returns = batch.returns * 100 + shift
        shifted = replace(batch, returns=returns)
        popart.learn(shifted, trainer.parallel)
        assert_close(restored_values(), before, rtol=1e-9, atol=1e-9)


@pytest.mark.proves("PopArt")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"clip_vloss": True}, id="clipped"),
        pytest.param({"ent_coef": 0.0, "update_epochs": 1}, id="an epoch without entropy"),
    ],
)
def test_an_update_is_that_on_standardized_targets(options: dict[str, Any]) -> None:
    """The twin: no option, but its returns, old values and last layer are put into the unit by hand."""
    batch = random_batch(SPEC)
    returns = batch.returns * 50 - 20
    batch = replace(batch, returns=returns)
    mean, std = mean_and_deviation(batch.returns.tolist())
    trainer = make_trainer(SPEC, norm_value=True, **options)
    figures = train(trainer, batch)

    twin = make_trainer(SPEC, **options)
    named = SPEC.unflatten(twin.weights())
    weight = named["value.4.weight"]
    bias = named["value.4.bias"]
    named["value.4.weight"] = weight / std
    named["value.4.bias"] = (bias - mean) / std
    in_unit = SPEC.flatten(named)
    twin.load(in_unit, twin.state())
    values = (batch.values - mean) / std
    returns = (batch.returns - mean) / std
    expected = train(twin, replace(batch, values=values, returns=returns))

    assert_allclose(trainer.weights(), twin.weights(), rtol=1e-9, atol=1e-12)
    for name in ("value_loss", "explained_variance"):
        assert figures[name] == pytest.approx(expected[name], rel=1e-7)


def segment_with(scale: ValueScale | None) -> Segment:
    env = gym.make("CartPole-v1")
    sampler, spec = sampler_of([env], num_steps=40, track=False, dtype="float32")
    policy = PolicySnapshot(0, random_weights(spec), None, scale)
    _, segment = sampler.collect(SegmentRequest(0, 0), policy)
    return segment


def test_actors_report_values_in_units_of_rewards() -> None:
    mean = -300.0
    std = 40.0
    plain = segment_with(None)
    restored = segment_with(ValueScale(mean, std))
    assert restored.values.dtype == plain.values.dtype
    assert_allclose(restored.values, plain.values * std + mean, rtol=1e-6)
    assert_allclose(restored.next_values, plain.next_values * std + mean, rtol=1e-6)
    assert restored.actions.tobytes() == plain.actions.tobytes()


def test_without_targets_and_with_equal_ones_the_unit_is_safe() -> None:
    without_targets = Moments.empty(())
    assert ValueScale.of(without_targets) == ValueScale(0.0, 1.0)
    equal = Moments.of(np.full(5, 7.0))
    assert ValueScale.of(equal) == ValueScale(7.0, 1e-6)


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
        layers = nn.Sequential()
        layers.append(nn.Linear(4, 8))
        layers.append(nn.Tanh())
        layers.append(nn.Linear(8, 1))
        last_module = getattr(nn, last)()
        layers.append(last_module)
        setattr(self, name, layers)
        self.name = name
        self.output = output

    def forward(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layers = getattr(self, self.name)
        values = self.output(layers(obs))
        return self.policy(obs), values.reshape(len(obs))


VECTOR = np.dtype((np.float32, (4,)))
NORMALIZED = replace(PLAIN, norm_value=True)


def spec_with(**options: Any) -> ModuleSpec:
    return ModuleSpec(Spaces(VECTOR, DISCRETE), Values, options, "float32")


@pytest.mark.parametrize("options", [{"last": "Softplus"}, {"name": "critic"}], ids=str)
def test_values_that_do_not_end_in_a_linear_layer_called_value_are_refused(
    options: dict[str, str],
) -> None:
    """To correct the layer would change them."""
    words = "no linear layer with one output and a bias that is called `value`"
    with pytest.raises(ConfigError, match=words):
        last_layer(spec_with(**options))


def tenth(values: torch.Tensor) -> torch.Tensor:
    return 0.1 * values


@pytest.mark.parametrize("output", [tenth, torch.neg, torch.tanh])
def test_a_network_that_changes_the_values_of_its_last_layer_is_refused(output: Any) -> None:
    model = PPOModel(spec_with(output=output), 1)
    words = "the network changes what its layer `value` returns"
    with pytest.raises(ConfigError, match=words):
        PPOTrainer(model, NORMALIZED, minibatches=1)


def test_checking_the_last_layer_changes_no_weight() -> None:
    spec = spec_with()
    model = PPOModel(spec, 1)
    before = model.parameters.weights.detach().clone()
    checked = PPOTrainer(model, NORMALIZED, minibatches=1)
    assert_array_equal(checked.weights(), before)


@pytest.mark.parametrize("last", ["Identity", "Flatten"])
def test_the_last_linear_layer_is_found_by_its_name(last: str) -> None:
    """A layer behind it may change the shape."""
    spec = spec_with(last=last)
    places = np.arange(spec.num_parameters, dtype=np.float32)
    named = spec.unflatten(places)
    weight, bias = last_layer(spec)
    assert_array_equal(named["value.2.weight"].flatten(), places[weight])
    assert_array_equal(named["value.2.bias"], places[bias])
