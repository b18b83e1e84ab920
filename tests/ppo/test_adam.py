"""FlatAdam on one vector against torch's Adam on many tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import BOX, spec_of
from mlp_twin import initial_mlp

from dppo.ppo.learning.model import FlatAdam
from dppo.ppo.networks.parameters import FlatParameters


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-13), ("float32", 1e-6)])
def test_steps_are_those_of_torch(dtype: str, tolerance: float) -> None:
    model, twin = (initial_mlp(spec_of(BOX, dtype=dtype), seed=1) for _ in range(2))
    ours = FlatAdam(FlatParameters(model.ordered_parameters()))
    theirs = torch.optim.Adam(twin.parameters(), eps=1e-5)
    rng = np.random.default_rng(0)
    for step in range(60):
        learning_rate = 0.01 / (1 + step)
        theirs.param_groups[0]["lr"] = learning_rate
        for one, other in zip(model.ordered_parameters(), twin.ordered_parameters(), strict=True):
            gradient = torch.from_numpy(rng.normal(size=tuple(one.shape)) * 10.0 ** rng.integers(-6, 3)).to(one.dtype)
            assert one.grad is not None
            one.grad.copy_(gradient)
            other.grad = gradient.clone()
        ours.step(learning_rate)
        theirs.step()
    for one, other in zip(model.ordered_parameters(), twin.ordered_parameters(), strict=True):
        np.testing.assert_allclose(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)
