"""FlatAdam on one vector against torch's Adam on many tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import BOX, spec_of

from dppo.ppo.learning.adam import FlatAdam
from dppo.ppo.learning.model import free_deviations
from dppo.ppo.networks.parameters import FlatParameters


@pytest.mark.proves("FlatAdam")
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_steps_are_those_of_torch(dtype: str, tolerance: float) -> None:
    model = spec_of(BOX, dtype=dtype).mlp(1)
    twin = spec_of(BOX, dtype=dtype).mlp(1)
    ours = FlatAdam(FlatParameters(model.parameters()))
    theirs = torch.optim.Adam(twin.parameters(), eps=1e-5)
    rng = np.random.default_rng(0)
    for step in range(60):
        learning_rate = 0.01 / (1 + step)
        theirs.param_groups[0]["lr"] = learning_rate
        for weights, expected in zip(model.parameters(), twin.parameters(), strict=True):
            gradient = rng.normal(size=tuple(weights.shape)) * 10.0 ** rng.integers(-6, 3)
            expected.grad = torch.from_numpy(gradient).to(expected.dtype)
            assert weights.grad is not None
            weights.grad.copy_(expected.grad)
        ours.step(learning_rate)
        theirs.step()
    for weights, expected in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(
            weights.detach(), expected.detach(), rtol=tolerance, atol=tolerance
        )


def test_slowed_weights_take_a_share_of_each_step_with_a_longer_memory() -> None:
    """`memory` is 1 / (1 - beta2)."""
    spec = spec_of(BOX, dtype="float64")
    slowed = free_deviations(spec)
    start = torch.arange(spec.num_parameters, dtype=torch.float64)
    flat = FlatParameters([torch.nn.Parameter(start.clone())])
    adam = FlatAdam(flat, memory=4000, slowed=slowed, share=0.25)
    expected = torch.nn.Parameter(start.clone())
    twin = torch.optim.Adam([expected], lr=0.01, betas=(0.9, 0.99975), eps=1e-5)
    rng = np.random.default_rng(0)
    for _ in range(30):
        gradient = torch.from_numpy(rng.normal(size=spec.num_parameters))
        flat.gradient.copy_(gradient)
        expected.grad = gradient
        adam.step(0.01)
        twin.step()
    moved = flat.weights.detach() - start
    moved[slowed] *= 4
    np.testing.assert_allclose(moved, expected.detach() - start, rtol=1e-9, atol=1e-12)


def test_free_deviations_are_the_place_of_log_std() -> None:
    spec = spec_of(BOX)
    places = free_deviations(spec)
    assert (
        places.stop - places.start
        == spec.unflatten(np.zeros(spec.num_parameters))["log_std"].size
        > 0
    )
    assert free_deviations(spec_of()) == slice(0, 0)
