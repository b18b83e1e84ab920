"""Try a user's module on made-up observations before training; errors name it and the broken part."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dppo.errors import ConfigError
from dppo.ppo.networks.torch_state import default_dtype
from dppo.spaces.spaces import Spaces, is_image

Inputs = Tensor | dict[str, Tensor]
COUNTS = {2: "two", 3: "three"}


@dataclass(frozen=True, slots=True)
class Trial:
    """Calls the module `name`, and checks what is common to all its calls."""

    name: str
    spaces: Spaces
    head_size: int
    dtype: str

    def passes(self, module: nn.Module, each: list[Callable[[], tuple[Tensor, ...]]]) -> list[tuple[Tensor, ...]]:
        """Return the results of forward passes, after checking that they leave the buffers unchanged."""
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        results = [one() for one in each]
        for name, buffer in module.named_buffers():
            if not torch.equal(buffer, before[name]):
                raise self.broken(
                    f"its buffer {name} changes in a forward pass, as those of BatchNorm do, so actors and learners "
                    f"would hold different values. Use LayerNorm or GroupNorm"
                )
        return results

    def check_output(self, name: str, one: Tensor, again: Tensor, alone: Tensor, of_row: Tensor) -> None:
        """Check an output: equal in a second pass, and of a row alone, which is `of_row` among others."""
        if not torch.equal(one, again):
            raise self.broken(
                f"its {name} differ between two passes over the same observations. Remove dropout and noise"
            )
        if not close(alone, of_row):
            raise self.broken(
                f"its {name} of one observation depend on the other rows of the batch. Process each row on its own"
            )
        if not one.requires_grad:
            raise self.broken(
                f"its {name} do not depend on any parameter with requires_grad=True. Compute them from parameters"
            )

    def outputs(
        self,
        module: nn.Module,
        inputs: tuple[Any, ...],
        called: str,
        expected: tuple[tuple[str, tuple[int, ...], str], ...],
    ) -> tuple[Tensor, ...]:
        """Return what the module makes of `inputs` after checking type, shape and dtype.

        Args:
            called: the call in words.
            expected: name, shape and a hint at the meaning of the axes, for each output.
        """
        dtype = getattr(torch, self.dtype)
        try:
            with torch.enable_grad(), default_dtype(dtype):
                outputs: Any = module(*inputs)
        except Exception as error:
            raise self.broken(f"{called} raised {summary_of(error)}") from error
        if not (isinstance(outputs, tuple) and [isinstance(one, Tensor) for one in outputs] == [True] * len(expected)):
            names = [name for name, _, _ in expected]
            wanted = f"{COUNTS[len(names)]} tensors, {', '.join(names[:-1])} and {names[-1]}"
            raise self.broken(f"{called} returned {kind_in_words(outputs)}. Return {wanted}")
        for output, (name, shape, remedy) in zip(outputs, expected, strict=True):
            if output.shape != shape:
                raise self.broken(f"{called} returned {name} of shape {tuple(output.shape)}, not {shape}: {remedy}")
            if output.dtype != dtype:
                raise self.broken(f"{called} returned {name} of {output.dtype}. Return the dtype of obs")
            if not torch.isfinite(output).all():
                raise self.broken(f"{called} returned non-finite {name}. Look for a division by zero")
        return outputs

    def broken(self, fact: str) -> ConfigError:
        """Return the error that names the module and the broken part of its contract."""
        return broken(self.name, fact)


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


def broken(name: str, fact: str) -> ConfigError:
    """Return the error for the module `name`."""
    return ConfigError(f"model={name}: {fact}.")


def summary_of(error: BaseException) -> str:
    """Return the last line of the traceback, with file and line if they are those of a file."""
    summary = traceback.format_exception_only(error)[-1].strip().rstrip(".")
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f"{summary} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else summary


def kind_in_words(outputs: Any) -> str:
    """Return the type of what a module returned."""
    if isinstance(outputs, tuple):
        return f"a tuple of {', '.join(type(one).__name__ for one in outputs) or 'nothing'}"
    return f"a {type(outputs).__name__}"
