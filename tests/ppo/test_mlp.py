"""The initial weights of the default network, and weights of another one."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from builders import random_weights, spec_of
from torch import nn
from updates import ACTIONS

from dppo.ppo.networks.mlp import MLP
from dppo.spaces.actions import Actions, BoxActions


def arrays(model: MLP) -> dict[str, np.ndarray]:
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def test_weights_of_another_network_are_refused() -> None:
    spec = spec_of()
    with pytest.raises(ValueError, match=r"got 1,00\d weights, this network has"):
        spec.unflatten(np.zeros(1003))
    named = spec.unflatten(random_weights(spec))
    with pytest.raises(ValueError, match=r"value\.4\.bias has shape None, this network has \(1,\)"):
        spec.flatten({name: array for name, array in named.items() if name != "value.4.bias"})
    with pytest.raises(ValueError, match=r"log_std has shape \(2,\), this network has None"):
        spec.flatten(named | {"log_std": np.zeros(2)})
    with pytest.raises(ValueError, match=r"policy\.0\.weight has shape \(4, 16\)"):
        spec.flatten(named | {"policy.0.weight": named["policy.0.weight"].T})


@ACTIONS
@pytest.mark.parametrize("hidden_sizes", [(32,), (8, 64, 16)], ids=str)
def test_initial_weights_are_orthogonal_with_the_gains_of_the_paper_code(
    actions: Actions, hidden_sizes: Any
) -> None:
    parameters = arrays(spec_of(actions, hidden_sizes=hidden_sizes).mlp(5))
    last = 2 * len(hidden_sizes)
    gains = {f"policy.{last}.weight": 0.01, f"value.{last}.weight": 1.0}
    for name, array in parameters.items():
        if array.ndim == 1:
            np.testing.assert_array_equal(array, 0, err_msg=name)
            continue
        wide = array if array.shape[0] <= array.shape[1] else array.T
        gain = gains.get(name, math.sqrt(2))
        np.testing.assert_allclose(
            wide @ wide.T, gain**2 * np.eye(len(wide)), atol=1e-5 * gain**2, err_msg=name
        )
    assert ("log_std" in parameters) == isinstance(actions, BoxActions)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_initial_weights_are_drawn_from_the_seed_in_a_fixed_order(dtype: str) -> None:
    """One generator; the policy trunk from the first layer to the head, then the value trunk; in float32."""
    parameters = arrays(spec_of(hidden_sizes=(16, 8), dtype=dtype).mlp(42))
    generator = torch.Generator().manual_seed(42)
    for trunk, outputs, head_gain in (("policy", 3, 0.01), ("value", 1, 1.0)):
        sizes = (4, 16, 8, outputs)
        for layer, (inputs, units) in enumerate(pairwise(sizes)):
            gain = head_gain if layer == 2 else math.sqrt(2)
            drawn = nn.init.orthogonal_(torch.empty(units, inputs), gain, generator=generator)
            np.testing.assert_array_equal(
                parameters[f"{trunk}.{2 * layer}.weight"], drawn.numpy().astype(dtype)
            )
