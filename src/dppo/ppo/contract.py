"""The contract of a user's module, and its check: each error names the broken part."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dppo.errors import ConfigError
from dppo.ppo.memory_contract import check_memory
from dppo.ppo.torch_state import default_dtype
from dppo.ppo.trial_inputs import Inputs, close, inputs_in_words, made_up_inputs
from dppo.spaces import Spaces

ROWS = 3  # observations in the trial pass
COUNTS = {2: "two", 3: "three"}


@dataclass(frozen=True, slots=True)
class Contract:
    """The module `name` maps observations [rows, *O] of `dtype` to a head [rows, head_size] and values [rows]."""

    name: str
    spaces: Spaces
    head_size: int
    dtype: str

    def checked(self, build: Callable[[int], nn.Module], seed: int) -> nn.Module:
        """Return the module that `build` makes from `seed`, in this dtype.

        Raises:
            ConfigError: `build` raises, or the module breaks the contract.
        """
        module = self._built(build, seed)
        if self._state_size(module):
            check_memory(self, module, module.state_size)
        else:
            self._check_forward(module)
        if dict(module.named_buffers()):
            self._check_buffers(module, self._built(build, seed + 1))
        return module

    def _built(self, build: Callable[[int], nn.Module], seed: int) -> nn.Module:
        try:
            module = build(seed)
        except Exception as error:
            raise self.broken(
                f"its constructor raised {_in_words(error)}. It is called with (spaces, head_size, **model_kwargs); "
                f"head_size is {self.head_size}"
            ) from error
        self._check_parameters(module)
        return module.to(getattr(torch, self.dtype))

    def _check_parameters(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        if not parameters:
            raise self.broken("it has no parameters, so there is nothing to learn. Assign its layers to self")
        first_name, first = next(iter(parameters.items()))
        for name, parameter in parameters.items():
            if nn.parameter.is_lazy(parameter):
                raise self.broken(f"its parameter {name} has no shape yet. Give lazy layers their sizes")
            if (parameter.device, parameter.dtype) != (first.device, first.dtype):
                raise self.broken(
                    f"its parameters differ: {name} is {parameter.dtype} on {parameter.device}, {first_name} is "
                    f"{first.dtype} on {first.device}. Let dppo choose both (settings device and dtype)"
                )
        if first.device.type != "cpu" or not first.is_floating_point():
            raise self.broken(
                f"its parameters are {first.dtype} on {first.device}. Let dppo choose both (settings device and dtype)"
            )

    def _state_size(self, module: nn.Module) -> int:
        size = getattr(module, "state_size", 0)
        if type(size) is not int or size < 0:
            raise self.broken(
                f"its state_size is {size!r}. It must be the number of elements of the memory's state, or be left out"
            )
        return size

    def _check_forward(self, module: nn.Module) -> None:
        """Run the module on a few random observations and check its outputs."""
        obs = made_up_inputs(self.spaces, ROWS, getattr(torch, self.dtype))
        alone_obs = {name: leaf[:1] for name, leaf in obs.items()} if isinstance(obs, dict) else obs[:1]

        def outputs(some: Inputs) -> tuple[Tensor, ...]:
            rows = _size(some)
            expected = (
                ("head", (rows, self.head_size), "[rows, head_size]"),
                ("values", (rows,), "[rows]; values.squeeze(-1) removes a last axis"),
            )
            return self.outputs(module, (some,), f"forward(obs), with obs {inputs_in_words(some)},", expected)

        first, again, alone = self.passes(
            module, [lambda: outputs(obs), lambda: outputs(obs), lambda: outputs(alone_obs)]
        )
        for name, one, other, single in zip(("head", "values"), first, again, alone, strict=True):
            self.check_output(name, one, other, single, one[:1])

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
            raise self.broken(f"{called} raised {_in_words(error)}") from error
        if not (isinstance(outputs, tuple) and [isinstance(one, Tensor) for one in outputs] == [True] * len(expected)):
            names = [name for name, _, _ in expected]
            wanted = f"{COUNTS[len(names)]} tensors, {', '.join(names[:-1])} and {names[-1]}"
            raise self.broken(f"{called} returned {_kind(outputs)}. Return {wanted}")
        for output, (name, shape, remedy) in zip(outputs, expected, strict=True):
            if output.shape != shape:
                raise self.broken(f"{called} returned {name} of shape {tuple(output.shape)}, not {shape}: {remedy}")
            if output.dtype != dtype:
                raise self.broken(f"{called} returned {name} of {output.dtype}. Return the dtype of obs")
            if not torch.isfinite(output).all():
                raise self.broken(f"{called} returned non-finite {name}. Look for a division by zero")
        return outputs

    def _check_buffers(self, module: nn.Module, other: nn.Module) -> None:
        """Compare with a module built from another seed, because actors build theirs without knowing the seed."""
        others = dict(other.named_buffers())
        for name, buffer in module.named_buffers():
            if name not in others or not torch.equal(buffer, others[name]):
                raise self.broken(
                    f"its buffer {name} is random, so each actor would get different values. Make it a parameter with "
                    f"requires_grad=False"
                )

    def broken(self, fact: str) -> ConfigError:
        """Return the error that names the module and the broken part of the contract."""
        return _broken(self.name, fact)


def _size(obs: Inputs) -> int:
    return len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)


def model_class(model: Any, name: str) -> type[nn.Module]:
    """Return the class at the import path `model`, or `model` itself; `name` is used in errors.

    Raises:
        ConfigError: it cannot be imported, or is not a subclass of `torch.nn.Module`.
    """
    found = _imported(model) if isinstance(model, str) else model
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise _broken(name, f"{found!r} is not a subclass of torch.nn.Module. Pass one")
    return found


def _imported(path: str) -> Any:
    module_name, _, name = path.rpartition(":")
    if not module_name:
        raise _broken(path, "is not of the form module:Class. Add the name of the module that defines the class")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever a user's module raises while it is imported
        raise _broken(
            path,
            f"importing {module_name} failed: {_in_words(error)}. It must be importable on every machine that runs "
            f"actors or learners",
        ) from None
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise _broken(path, f"the module {module_name} has no {name}. Check the spelling") from None


def _broken(name: str, fact: str) -> ConfigError:
    return ConfigError(f"model={name}: {fact}.")


def _in_words(error: BaseException) -> str:
    """Return the last line of the traceback, with file and line."""
    summary = traceback.format_exception_only(error)[-1].strip().rstrip(".")
    frames = traceback.extract_tb(error.__traceback__)
    return f"{summary} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else summary


def _kind(outputs: Any) -> str:
    if isinstance(outputs, tuple):
        return f"a tuple of {', '.join(type(one).__name__ for one in outputs) or 'nothing'}"
    return f"a {type(outputs).__name__}"
