"""Made-up observations to try a user's module on, and calls in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dppo.spaces.spaces import Spaces, is_image

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


def call_in_words(obs: Inputs, state: Tensor | None = None, starts: Tensor | None = None) -> str:
    """Return a call of a module with the shapes of its arguments."""
    if isinstance(obs, dict):
        words = f"a dict of the shapes {{{', '.join(f'{name!r}: {tuple(leaf.shape)}' for name, leaf in obs.items())}}}"
    else:
        words = f"of shape {tuple(obs.shape)} and {obs.dtype}"
    if state is None or starts is None:
        return f"forward(obs), with obs {words},"
    shapes = tuple(state.shape), tuple(starts.shape)
    return f"forward(obs, state, starts), with obs {words}, state of shape {shapes[0]} and starts of shape {shapes[1]},"


def kind_in_words(outputs: Any) -> str:
    """Return the type of what a module returned."""
    if isinstance(outputs, tuple):
        return f"a tuple of {', '.join(type(one).__name__ for one in outputs) or 'nothing'}"
    return f"a {type(outputs).__name__}"
