"""Made-up observations, on which a user's module is tried before training."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dppo.spaces import Spaces, is_image

Inputs = Tensor | dict[str, Tensor]


def made_up_inputs(spaces: Spaces, rows: int, dtype: torch.dtype) -> Inputs:
    """Return a module's input for some random observations of `spaces`."""
    generator = np.random.default_rng(0)
    inputs = {}
    for name, leaf in spaces.leaves().items():
        shape = rows, *leaf.shape
        if is_image(leaf):
            numbers: np.ndarray = generator.integers(0, 256, shape)
        elif name in spaces.categories:
            found = spaces.categories[name]
            drawn = generator.integers(0, found.counts, (rows, len(found.counts)))
            numbers = (drawn + np.array(found.starts)).reshape(shape)
        else:
            numbers = generator.standard_normal(shape)
        inputs[name] = torch.from_numpy(numbers).to(dtype)
    return inputs if spaces.obs.names is not None else inputs[""]


def inputs_in_words(obs: Inputs) -> str:
    """Return shapes and dtype of observations."""
    if not isinstance(obs, dict):
        return f"of shape {tuple(obs.shape)} and {obs.dtype}"
    shapes = ", ".join(f"{name!r}: {tuple(leaf.shape)}" for name, leaf in obs.items())
    return f"a dict of the shapes {{{shapes}}}"


def close(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal up to rounding."""
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)
