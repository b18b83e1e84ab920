"""A user's module as plain data, and the check of its contract: each error names the broken part."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from dppo.errors import ConfigError
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.network import ModelClass, NetworkSpec, model_class
from dppo.ppo.networks.parameters import initialized, shapes_of
from dppo.ppo.networks.torch_settings import default_dtype
from dppo.spaces.spaces import Spaces, is_image
from dppo.user_code import import_path, in_a_line, place_of

Inputs = Tensor | dict[str, Tensor]
STEPS, ROWS = 4, 3  # of the trial passes
OUTPUTS = ("head", "values", "state")
SQUEEZE = "values.squeeze(-1) removes a last axis"
HINTS = (  # at the shapes of outputs: without memory, and with
    ("[rows, head_size]", f"[rows]; {SQUEEZE}"),
    ("[L, rows, head_size]", f"[L, rows]; {SQUEEZE}", "[rows, state_size], after the last step"),
)
NOT_RESET = (
    "where starts is True differ from those of a state of zeros. Set the state of these rows to zero before the step"
)
NOT_STEPWISE = (
    "of a sequence differ from those of its steps one after the other, as actors call it. Return the state after the "
    "last step, and let no step see a later one"
)


class Facts(NamedTuple):
    """Facts that only building a module shows."""

    shapes: dict[str, tuple[int, ...]]
    state_size: int


_tried: WeakKeyDictionary[type, dict[str, Facts]] = WeakKeyDictionary()
"""Of each class that kept the contract in this process, by its arguments."""


@dataclass(frozen=True)
class ModuleSpec(NetworkSpec):
    """A user's module, by its class.

    The contract: `Class(spaces, head_size, **kwargs)` returns a `torch.nn.Module` whose `forward(obs)` maps a
    floating-point tensor of observations [rows, *O] to the head [rows, head_size] and the values [rows]. Of a Dict or
    Tuple space, it gets a dict of such tensors by the leaf's name.

    A module with memory has an attribute `state_size`, S. Its `forward(obs, state, starts)` maps sequences of
    observations [L, rows, *O], the state [rows, S] before the first step, and flags [L, rows] at which the state
    becomes zero before the step, to head [L, rows, head_size], values [L, rows] and the state after the last step.
    Actors call it with L = 1.
    """

    spaces: Spaces = field(compare=False, repr=False)
    model: ModelClass
    """`module:Class`, or the class itself."""
    kwargs: dict[str, Any]
    dtype: str

    @property
    @override
    def state_size(self) -> int:
        return self._facts().state_size

    @property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._facts().shapes

    @override
    def module(self, seed: int) -> nn.Module:
        self._facts()
        return initialized(self._made, seed, self.dtype)

    @override
    def as_json(self) -> dict[str, Any]:
        return {"model": import_path(self.model), "model_kwargs": self.kwargs, "dtype": self.dtype}

    def _facts(self) -> Facts:
        """Return the facts about the module, after trying it on made-up observations once in this process.

        Raise ConfigError if it breaks the contract.
        """
        tried = _tried.setdefault(model_class(self.model), {})
        arguments = repr((self.kwargs, self.spaces, self.spaces.actions.as_json(), self.dtype))
        if arguments not in tried:
            tried[arguments] = self._try()
        return tried[arguments]

    def _made(self) -> nn.Module:
        head_size = self.distribution.head_size
        try:
            module = model_class(self.model)(self.spaces, head_size, **deepcopy(self.kwargs))
        except Exception as error:
            raise self._broken(
                f"its constructor raised {in_a_line(error)}{place_of(error)}. It is called with (spaces, head_size, "
                f"**model_kwargs); head_size is {head_size}"
            ) from error
        self._check_parameters(module)
        return module

    def _try(self) -> Facts:
        module = initialized(self._made, 0, self.dtype)
        state_size = getattr(module, "state_size", 0)
        if type(state_size) is not int or state_size < 0:
            raise self._broken(
                f"its state_size is {state_size!r}. It must be the number of elements of the memory's state, or be "
                f"left out"
            )
        with torch.random.fork_rng(devices=[]), default_dtype(getattr(torch, self.dtype)):
            if state_size:
                self._check_sequences(module, state_size)
            else:
                self._check_rows(module)
            self._check_seeds(module, state_size)
        return Facts(shapes_of(module), state_size)

    def _check_parameters(self, module: nn.Module) -> None:
        parameters = list(module.named_parameters())
        if not parameters:
            raise self._broken("it has no parameters, so there is nothing to learn. Assign its layers to self")
        first_name, first = parameters[0]
        for name, parameter in parameters:
            if nn.parameter.is_lazy(parameter):
                raise self._broken(f"its parameter {name} has no shape yet. Give lazy layers their sizes")
            if (parameter.device, parameter.dtype) != (first.device, first.dtype):
                raise self._broken(
                    f"its parameters differ: {name} is {parameter.dtype} on {parameter.device}, {first_name} is "
                    f"{first.dtype} on {first.device}. Let dppo choose both (settings device and dtype)"
                )
        if first.device.type != "cpu" or not first.is_floating_point():
            raise self._broken(
                f"its parameters are {first.dtype} on {first.device}. Let dppo choose both (settings device and dtype)"
            )

    def _check_rows(self, module: nn.Module) -> None:
        obs = _made_up_inputs(self.spaces, ROWS, getattr(torch, self.dtype))

        def run(rows: int = ROWS) -> tuple[Tensor, ...]:
            return self._outputs(module, (rows,), each_leaf(obs, lambda leaf: leaf[:rows]))

        self._passes(module, [run, run, lambda: run(1)], slice(1))

    def _check_sequences(self, module: nn.Module, state_size: int) -> None:
        """Check sequences of 3 rows, in two of which an episode starts."""
        dtype = getattr(torch, self.dtype)
        rows_of_obs = _made_up_inputs(self.spaces, STEPS * ROWS, dtype)
        obs = each_leaf(rows_of_obs, lambda leaf: leaf.view(STEPS, ROWS, *leaf.shape[1:]))
        generator = torch.Generator().manual_seed(0)
        state = torch.randn((ROWS, state_size), generator=generator, dtype=torch.float32).to(dtype)
        starts = torch.zeros((STEPS, ROWS), dtype=torch.bool)
        starts[0, 1] = starts[2, 2] = True

        def run(
            steps: slice = slice(None), rows: slice = slice(None), *, before: Tensor = state, flags: Tensor = starts
        ) -> tuple[Tensor, ...]:
            flags, part = flags[steps, rows], each_leaf(obs, lambda leaf: leaf[steps, rows])
            return self._outputs(module, tuple(flags.shape), part, before[rows], flags)

        def in_turn() -> tuple[Tensor, ...]:
            results, after = [], state
            for t in range(STEPS):
                results.append(run(slice(t, t + 1), before=after))
                after = results[-1][2]
            return torch.cat([one[0] for one in results]), torch.cat([one[1] for one in results]), after

        first, none, second = slice(1), torch.zeros_like, slice(1, 2)
        calls = [run, run, lambda: run(rows=second), in_turn]
        calls.append(lambda: run(first, flags=torch.ones_like(starts)))
        calls.append(lambda: run(first, before=none(state), flags=none(starts)))
        one, _, _, stepped, started, from_zero = self._passes(module, calls, (slice(None), second))
        for found, expected, otherwise in ((stepped, one, NOT_STEPWISE), (started, from_zero, NOT_RESET)):
            for name, output, other in zip(OUTPUTS, found, expected, strict=True):
                if not _close(output, other):
                    raise self._broken(f"its {name} {otherwise}")

    def _check_seeds(self, module: nn.Module, state_size: int) -> None:
        """Check that nothing but the parameters depends on the seed, which actors do not know."""
        other, remedy = initialized(self._made, 1, self.dtype), "Make it a parameter with requires_grad=False"
        differs, buffers = "so actors and learners would get different values", dict(other.named_buffers())
        for name, buffer in module.named_buffers():
            if name not in buffers or not torch.equal(buffer, buffers[name]):
                raise self._broken(f"its buffer {name} is random, {differs}. {remedy}")
        if shapes_of(other) != shapes_of(module):
            raise self._broken("the names or shapes of its parameters are random. Let them follow from the arguments")
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(module.parameters()).detach(), other.parameters())
        dtype, rows = getattr(torch, self.dtype), (1, ROWS) if state_size else (ROWS,)
        obs = each_leaf(_made_up_inputs(self.spaces, ROWS, dtype), lambda leaf: leaf.view(*rows, *leaf.shape[1:]))
        memory = (torch.zeros(ROWS, state_size, dtype=dtype), torch.zeros(rows, dtype=torch.bool)) if state_size else ()
        both = (self._outputs(one, rows, obs, *memory) for one in (module, other))
        for name, output, again in zip(OUTPUTS, *both, strict=False):
            if not _close(output, again):
                raise self._broken(f"its {name} depend on something random besides its parameters, {differs}. {remedy}")

    def _passes(
        self, module: nn.Module, calls: list[Callable[[], tuple[Tensor, ...]]], row: Any
    ) -> list[tuple[Tensor, ...]]:
        """Return the results of forward passes that leave the buffers unchanged.

        Head and values of the first must equal those of the second, and at the index `row` those of the third.
        """
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.enable_grad():
            results = [call() for call in calls]
        for name, buffer in module.named_buffers():
            if name not in before:
                raise self._broken(f"its buffer {name} is made in a forward pass. Make it in the constructor")
            if not torch.equal(buffer, before[name]):
                raise self._broken(
                    f"its buffer {name} changes in a forward pass, as those of BatchNorm do, so actors and learners "
                    f"would hold different values. Use LayerNorm or GroupNorm"
                )
        for name, output, again, alone in zip(OUTPUTS[:2], *results[:3], strict=False):
            if not torch.equal(output, again):
                fact = "differ between two passes over the same observations. Remove dropout and noise"
            elif not _close(alone, output[row]):
                fact = "of one observation depend on the other rows of the batch. Process each row on its own"
            elif not output.requires_grad:
                fact = "do not depend on any parameter with requires_grad=True. Compute them from parameters"
            else:
                continue
            raise self._broken(f"its {name} {fact}")
        return results

    def _outputs(self, module: nn.Module, rows: tuple[int, ...], *inputs: Any) -> tuple[Tensor, ...]:
        """Return the outputs for observations [*rows, *O]; with memory also a state and starts [*rows]."""
        dtype, called = getattr(torch, self.dtype), _call_in_words(*inputs)
        before = [each_leaf(argument, torch.clone) for argument in inputs]
        try:
            with default_dtype(dtype):
                outputs: Any = module(*inputs)
        except Exception as error:
            raise self._broken(f"{called} raised {in_a_line(error)}{place_of(error)}") from error
        for argument, copied in zip(inputs, before, strict=True):
            if not _equal(argument, copied):
                raise self._broken(f"{called} changes its arguments in place. Change a copy of them (obs.clone())")
        shapes = [(*rows, self.distribution.head_size), rows, *(tuple(state.shape) for state in inputs[1:2])]
        names = OUTPUTS[: len(shapes)]
        if not (isinstance(outputs, tuple) and [isinstance(one, Tensor) for one in outputs] == [True] * len(names)):
            wanted = f"{'two' if len(names) == 2 else 'three'} tensors, {', '.join(names[:-1])} and {names[-1]}"
            kinds = [type(one).__name__ for one in outputs] if isinstance(outputs, tuple) else []
            kind = f"tuple of {', '.join(kinds) or 'nothing'}" if isinstance(outputs, tuple) else type(outputs).__name__
            raise self._broken(f"{called} returned a {kind}. Return {wanted}")
        for name, output, shape, hint in zip(names, outputs, shapes, HINTS[len(inputs) > 1], strict=True):
            if output.shape != shape:
                raise self._broken(f"{called} returned {name} of shape {tuple(output.shape)}, not {shape}: {hint}")
            if output.dtype != dtype:
                raise self._broken(f"{called} returned {name} of {output.dtype}. Return the dtype of obs")
            if not torch.isfinite(output).all():
                raise self._broken(f"{called} returned non-finite {name}. Look for a division by zero")
        return outputs

    def _broken(self, fact: str) -> ConfigError:
        return ConfigError(f"model={import_path(self.model)}: {fact}.")


def _equal(one: Inputs, other: Inputs) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(leaf, other[name]) for name, leaf in one.items())
    return isinstance(one, Tensor) and isinstance(other, Tensor) and torch.equal(one, other)


def _close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def _made_up_inputs(spaces: Spaces, rows: int, dtype: torch.dtype) -> Inputs:
    """Return a module's input for some random observations of `spaces`."""
    generator = np.random.default_rng(0)
    inputs = {}
    for name, leaf in spaces.leaves().items():
        shape = rows, *leaf.shape
        if is_image(leaf):
            numbers: np.ndarray = generator.integers(0, 256, shape)
        elif name in spaces.categories:
            found = spaces.categories[name]
            initialized = generator.integers(0, found.counts, (rows, len(found.counts)))
            numbers = (initialized + np.array(found.starts)).reshape(shape)
        elif name and leaf.base.kind != "f":  # beside other leaves, which are not normalized
            numbers = generator.integers(0, 2, shape)
        else:
            numbers = generator.standard_normal(shape)
        inputs[name] = torch.from_numpy(numbers).to(dtype)
    return inputs if spaces.obs.names is not None else inputs[""]


def _call_in_words(obs: Inputs, state: Tensor | None = None, starts: Tensor | None = None) -> str:
    if isinstance(obs, dict):
        words = f"a dict of the shapes {{{', '.join(f'{name!r}: {tuple(leaf.shape)}' for name, leaf in obs.items())}}}"
    else:
        words = f"of shape {tuple(obs.shape)} and {obs.dtype}"
    if state is None or starts is None:
        return f"forward(obs), with obs {words},"
    shapes = tuple(state.shape), tuple(starts.shape)
    return f"forward(obs, state, starts), with obs {words}, state of shape {shapes[0]} and starts of shape {shapes[1]},"
