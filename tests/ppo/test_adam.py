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
    model, twin = (spec_of(BOX, dtype=dtype).mlp(1) for _ in range(2))
    ours = FlatAdam(FlatParameters(model.parameters()))
    theirs = torch.optim.Adam(twin.parameters(), eps=1e-5)
    rng = np.random.default_rng(0)
    for step in range(60):
        learning_rate = 0.01 / (1 + step)
        theirs.param_groups[0]["lr"] = learning_rate
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            gradient = torch.from_numpy(rng.normal(size=tuple(one.shape)) * 10.0 ** rng.integers(-6, 3)).to(one.dtype)
            assert one.grad is not None
            one.grad.copy_(gradient)
            other.grad = gradient.clone()
        ours.step(learning_rate)
        theirs.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        np.testing.assert_allclose(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def test_a_longer_memory_is_another_beta_and_slowed_weights_take_a_share_of_each_step() -> None:
    spec = spec_of(BOX, dtype="float64")
    start, rng, deviations = torch.arange(spec.num_parameters, dtype=torch.float64), np.random.default_rng(0), [0.0]
    ours, theirs = (torch.nn.Parameter(start.clone()) for _ in range(2))
    flat, where = FlatParameters([ours]), free_deviations(spec)
    assert where.stop - where.start == spec.unflatten(start.numpy())["log_std"].size > 0
    adam, twin = FlatAdam(flat, 4000, where, 0.25), torch.optim.Adam([theirs], lr=0.01, betas=(0.9, 0.99975), eps=1e-5)
    for _ in range(30):
        gradient = torch.from_numpy(rng.normal(size=spec.num_parameters))
        flat.gradient.copy_(gradient)
        theirs.grad, before = gradient, theirs.detach().clone()
        adam.step(0.01)
        twin.step()
        deviations.append(deviations[-1] + ((theirs.detach() - before)[where.start].item()) / 4)
        weights = flat.weights.detach()
        assert weights[where.start].item() == pytest.approx(start[where.start].item() + deviations[-1], rel=1e-12)
    others = torch.ones(spec.num_parameters, dtype=torch.bool)
    others[where] = False
    np.testing.assert_allclose(weights[others], theirs.detach()[others], rtol=1e-13)
    assert free_deviations(spec_of()) == slice(0, 0)
