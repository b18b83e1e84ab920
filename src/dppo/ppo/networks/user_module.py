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
from dppo.numerics.torch_modes import default_dtype
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.network import ModelClass, NetworkSpec, model_class
from dppo.ppo.networks.parameters import initialized, shapes_of
from dppo.spaces.spaces import Spaces, is_image
from dppo.user_code import import_path, in_a_line, place_of

Inputs = Tensor | dict[str, Tensor]
NUM_STEPS = 4  # length of the trial sequences
NUM_ROWS = 3
OUTPUTS = ("head", "values", "state")
SQUEEZE = "values.squeeze(-1) removes a last axis"
SHAPES = ("[rows, head_size]", f"[rows]; {SQUEEZE}")
SHAPES_WITH_MEMORY = (
    "[L, rows, head_size]",
    f"[L, rows]; {SQUEEZE}",
    "[rows, state_size], after the last step",
)
NOT_RESET = (
    "where starts is True differ from those of a state of zeros. Set the state of these rows to zero "
    "before the step"
)
NOT_STEPWISE = (
    "of a sequence differ from those of its steps one after the other, as actors call it. Return the state after the "
    "last step, and let no step see a later one"
)
DIFFERENT_VALUES = "so actors and learners would get different values"
MAKE_A_PARAMETER = "Make it a parameter with requires_grad=False"


class ModuleFacts(NamedTuple):
    """Facts that only building a module shows."""

    shapes: dict[str, tuple[int, ...]]
    state_size: int


_facts_of_class: WeakKeyDictionary[type, dict[str, ModuleFacts]] = WeakKeyDictionary()
"""Facts about each class that kept the contract in this process, by its arguments."""


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
        return initialized(self._build, seed, self.dtype)

    @override
    def as_json(self) -> dict[str, Any]:
        return {"model": import_path(self.model), "model_kwargs": self.kwargs, "dtype": self.dtype}

    def _facts(self) -> ModuleFacts:
        """Return the facts about the module, after trying it on made-up observations once in this process.

        Raise ConfigError if it breaks the contract.
        """
        facts_by_arguments = _facts_of_class.setdefault(model_class(self.model), {})
        arguments = repr((self.kwargs, self.spaces, self.spaces.actions.as_json(), self.dtype))
        if arguments not in facts_by_arguments:
            facts_by_arguments[arguments] = self._try()
        return facts_by_arguments[arguments]

    def _build(self) -> nn.Module:
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

    def _try(self) -> ModuleFacts:
        module = initialized(self._build, 0, self.dtype)
        state_size = getattr(module, "state_size", 0)
        if type(state_size) is not int or state_size < 0:
            raise self._broken(
                f"its state_size is {state_size!r}. It must be the number of elements of the memory's state, or be "
                f"left out"
            )
        with torch.random.fork_rng(devices=[]), default_dtype(self._torch_dtype):
            if state_size:
                self._check_sequences(module, state_size)
            else:
                self._check_rows(module)
            self._check_seeds(module, state_size)
        return ModuleFacts(shapes_of(module), state_size)

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def _check_parameters(self, module: nn.Module) -> None:
        parameters = list(module.named_parameters())
        if not parameters:
            raise self._broken(
                "it has no parameters, so there is nothing to learn. Assign its layers to self"
            )
        first_name, first = parameters[0]
        for name, parameter in parameters:
            if nn.parameter.is_lazy(parameter):
                raise self._broken(
                    f"its parameter {name} has no shape yet. Give lazy layers their sizes"
                )
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
        obs = _made_up_inputs(self.spaces, NUM_ROWS, self._torch_dtype)

        def run(num_rows: int = NUM_ROWS) -> tuple[Tensor, ...]:
            return self._outputs(module, (num_rows,), each_leaf(obs, lambda leaf: leaf[:num_rows]))

        outputs, repeated, row_alone = self._results(module, [run, run, lambda: run(1)])
        self._check_repeated(outputs, repeated, row_alone, slice(1))

    def _check_sequences(self, module: nn.Module, state_size: int) -> None:
        """Check sequences of 3 rows, in two of which an episode starts."""
        obs_rows = _made_up_inputs(self.spaces, NUM_STEPS * NUM_ROWS, self._torch_dtype)
        obs = each_leaf(obs_rows, lambda leaf: leaf.view(NUM_STEPS, NUM_ROWS, *leaf.shape[1:]))
        state = self._random_state(state_size)
        starts = torch.zeros((NUM_STEPS, NUM_ROWS), dtype=torch.bool)
        starts[0, 1] = True
        starts[2, 2] = True

        def run(
            steps: slice = slice(None),
            rows: slice = slice(None),
            *,
            states: Tensor = state,
            flags: Tensor = starts,
        ) -> tuple[Tensor, ...]:
            chosen_flags = flags[steps, rows]
            chosen_obs = each_leaf(obs, lambda leaf: leaf[steps, rows])
            return self._outputs(
                module, tuple(chosen_flags.shape), chosen_obs, states[rows], chosen_flags
            )

        def run_step_by_step() -> tuple[Tensor, ...]:
            heads = []
            values = []
            step_state = state
            for t in range(NUM_STEPS):
                step_head, step_values, step_state = run(slice(t, t + 1), states=step_state)
                heads.append(step_head)
                values.append(step_values)
            return torch.cat(heads), torch.cat(values), step_state

        first_step = slice(1)
        second_row = slice(1, 2)
        results = self._results(
            module,
            [
                run,
                run,
                lambda: run(rows=second_row),
                run_step_by_step,
                lambda: run(first_step, flags=torch.ones_like(starts)),
                lambda: run(
                    first_step, states=torch.zeros_like(state), flags=torch.zeros_like(starts)
                ),
            ],
        )
        at_once, repeated, row_alone, stepwise, reset, from_zeros = results
        self._check_repeated(at_once, repeated, row_alone, (slice(None), second_row))
        self._check_close(stepwise, at_once, NOT_STEPWISE)
        self._check_close(reset, from_zeros, NOT_RESET)

    def _random_state(self, state_size: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        state = torch.randn((NUM_ROWS, state_size), generator=generator, dtype=torch.float32)
        return state.to(self._torch_dtype)

    def _check_close(
        self, outputs: tuple[Tensor, ...], expected: tuple[Tensor, ...], fact: str
    ) -> None:
        for name, output, expected_output in zip(OUTPUTS, outputs, expected, strict=False):
            if not _is_close(output, expected_output):
                raise self._broken(f"elements of its {name} {fact}")

    def _check_seeds(self, module: nn.Module, state_size: int) -> None:
        """Check that nothing but the parameters depends on the seed, which actors do not know."""
        other_module = initialized(self._build, 1, self.dtype)
        buffers = dict(other_module.named_buffers())
        for name, buffer in module.named_buffers():
            if name not in buffers or not torch.equal(buffer, buffers[name]):
                raise self._broken(
                    f"its buffer {name} is random, {DIFFERENT_VALUES}. {MAKE_A_PARAMETER}"
                )
        if shapes_of(other_module) != shapes_of(module):
            raise self._broken(
                "the names or shapes of its parameters are random. Let them follow from the arguments"
            )
        for parameter, other_parameter in zip(
            module.parameters(), other_module.parameters(), strict=True
        ):
            other_parameter.data.copy_(parameter.data)
        obs = _made_up_inputs(self.spaces, NUM_ROWS, self._torch_dtype)
        inputs: list[Any] = [obs]
        shape: tuple[int, ...] = (NUM_ROWS,)
        if state_size:
            shape = (1, NUM_ROWS)
            state = torch.zeros(NUM_ROWS, state_size, dtype=self._torch_dtype)
            inputs = [
                each_leaf(obs, lambda leaf: leaf[None]),
                state,
                torch.zeros(shape, dtype=torch.bool),
            ]
        outputs = self._outputs(module, shape, *inputs)
        fact = f"depend on something random besides its parameters, {DIFFERENT_VALUES}. {MAKE_A_PARAMETER}"
        self._check_close(outputs, self._outputs(other_module, shape, *inputs), fact)

    def _results(
        self, module: nn.Module, calls: list[Callable[[], tuple[Tensor, ...]]]
    ) -> list[tuple[Tensor, ...]]:
        """Return the results of forward passes; check that these leave the buffers unchanged."""
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        results = []
        for call in calls:
            with torch.enable_grad():
                results.append(call())
            self._check_buffers(module, buffers)
        return results

    def _check_repeated(
        self,
        outputs: tuple[Tensor, ...],
        repeated_outputs: tuple[Tensor, ...],
        row_outputs: tuple[Tensor, ...],
        row: Any,
    ) -> None:
        """Check that head and values are the same in another pass, and for the rows at the index `row` alone."""
        for name, output, repeated, single_row in zip(
            OUTPUTS[:2], outputs, repeated_outputs, row_outputs, strict=False
        ):
            if not torch.equal(output, repeated):
                fact = (
                    "differ between two passes over the same observations. Remove dropout and noise"
                )
            elif not _is_close(single_row, output[row]):
                fact = "of one observation depend on the other rows of the batch. Process each row on its own"
            elif not output.requires_grad:
                fact = "do not depend on any parameter with requires_grad=True. Compute them from parameters"
            else:
                continue
            raise self._broken(f"elements of its {name} {fact}")

    def _check_buffers(self, module: nn.Module, buffers: dict[str, Tensor]) -> None:
        for name, buffer in module.named_buffers():
            if name not in buffers:
                raise self._broken(
                    f"its buffer {name} is made in a forward pass. Make it in the constructor"
                )
            if not torch.equal(buffer, buffers[name]):
                raise self._broken(
                    f"its buffer {name} changes in a forward pass, as those of BatchNorm do, so actors and learners "
                    f"would hold different values. Use LayerNorm or GroupNorm"
                )

    def _outputs(
        self, module: nn.Module, rows: tuple[int, ...], *inputs: Any
    ) -> tuple[Tensor, ...]:
        """Return the outputs for observations [*rows, *O]; with memory also a state and starts [*rows]."""
        call = _describe_call(*inputs)
        copies = [each_leaf(argument, torch.clone) for argument in inputs]
        try:
            with default_dtype(self._torch_dtype):
                outputs: Any = module(*inputs)
        except Exception as error:
            raise self._broken(f"{call} raised {in_a_line(error)}{place_of(error)}") from error
        for argument, copy in zip(inputs, copies, strict=True):
            if not _is_equal(argument, copy):
                raise self._broken(
                    f"{call} changes its arguments in place. Change a copy of them (obs.clone())"
                )
        self._check_outputs(outputs, call, rows, *inputs[1:])
        checked: tuple[Tensor, ...] = outputs
        return checked

    def _check_outputs(
        self, outputs: Any, call: str, rows: tuple[int, ...], *memory: Tensor
    ) -> None:
        """Check the outputs for observations [*rows, *O]; `memory` are state and starts, if the module has one."""
        expected_shapes = [(*rows, self.distribution.head_size), rows]
        described_shapes: tuple[str, ...] = SHAPES
        expected = "two tensors, head and values"
        if memory:
            expected_shapes.append(tuple(memory[0].shape))
            described_shapes = SHAPES_WITH_MEMORY
            expected = "three tensors, head, values and state"
        is_tuple = isinstance(outputs, tuple)
        if (
            not is_tuple
            or len(outputs) != len(expected_shapes)
            or not all(isinstance(o, Tensor) for o in outputs)
        ):
            kind = type(outputs).__name__
            if is_tuple:
                kind = f"tuple of {', '.join(type(output).__name__ for output in outputs) or 'nothing'}"
            raise self._broken(f"{call} returned a {kind}. Return {expected}")
        for name, output, shape, described in zip(
            OUTPUTS, outputs, expected_shapes, described_shapes, strict=False
        ):
            if output.shape != shape:
                raise self._broken(
                    f"{call} returned {name} of shape {tuple(output.shape)}, not {shape}: {described}"
                )
            if output.dtype != self._torch_dtype:
                raise self._broken(
                    f"{call} returned {name} of {output.dtype}. Return the dtype of obs"
                )
            if not torch.isfinite(output).all():
                raise self._broken(
                    f"{call} returned non-finite {name}. Look for a division by zero"
                )

    def _broken(self, fact: str) -> ConfigError:
        return ConfigError(f"model={import_path(self.model)}: {fact}.")


def _is_equal(a: Inputs, b: Inputs) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_equal(leaf, b[name]) for name, leaf in a.items())
    return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-3, atol=1e-4)


def _made_up_inputs(spaces: Spaces, num_rows: int, dtype: torch.dtype) -> Inputs:
    generator = np.random.default_rng(0)
    inputs = {}
    for name, leaf in spaces.leaves().items():
        shape = num_rows, *leaf.shape
        if is_image(leaf):
            numbers: np.ndarray = generator.integers(0, 256, shape)
        elif name in spaces.categories:
            categories = spaces.categories[name]
            offsets = generator.integers(0, categories.counts, (num_rows, len(categories.counts)))
            numbers = (offsets + np.array(categories.starts)).reshape(shape)
        elif name and leaf.base.kind != "f":  # beside other leaves, which are not normalized
            numbers = generator.integers(0, 2, shape)
        else:
            numbers = generator.standard_normal(shape)
        inputs[name] = torch.from_numpy(numbers).to(dtype)
    if spaces.obs.names is not None:
        return inputs
    return inputs[""]


def _describe_call(obs: Inputs, state: Tensor | None = None, starts: Tensor | None = None) -> str:
    if isinstance(obs, dict):
        shapes = ", ".join(f"{name!r}: {tuple(leaf.shape)}" for name, leaf in obs.items())
        described_obs = f"a dict of the shapes {{{shapes}}}"
    else:
        described_obs = f"of shape {tuple(obs.shape)} and {obs.dtype}"
    if state is None or starts is None:
        return f"forward(obs), with obs {described_obs},"
    return (
        f"forward(obs, state, starts), with obs {described_obs}, state of shape {tuple(state.shape)} "
        f"and starts of shape {tuple(starts.shape)},"
    )
