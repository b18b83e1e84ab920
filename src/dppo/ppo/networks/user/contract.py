"""The contract of a user's module, and its check: each error names the broken part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dppo.errors import ConfigError
from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.drawing import drawn, shapes_of
from dppo.ppo.networks.torch_state import default_dtype
from dppo.ppo.networks.user.trial import call_in_words, kind_in_words, made_up_inputs
from dppo.spaces.spaces import Spaces
from dppo.user_code import import_path, imported, in_a_line, place_of

STEPS, ROWS = 4, 3  # of the trial passes
OUTPUTS = ("head", "values", "state")
SQUEEZE = "values.squeeze(-1) removes a last axis"
COUNTS = {2: "two", 3: "three"}


class Facts(NamedTuple):
    """Facts that only building a module shows."""

    shapes: dict[str, tuple[int, ...]]
    state_size: int


_tried: WeakKeyDictionary[type, dict[str, Facts]] = WeakKeyDictionary()
"""Of each class that kept the contract in this process, by its arguments."""


@dataclass(frozen=True, slots=True)
class Contract:
    """The module maps observations [rows, *O] to a head [rows, head_size] and values [rows], all of one dtype.

    With memory it maps sequences, a state and starts to head, values and state; see `ModuleSpec`.
    """

    made_of: type[nn.Module]
    name: str
    """Import path of the class, for errors."""
    kwargs: dict[str, Any]
    spaces: Spaces
    head_size: int
    dtype: str

    def facts(self) -> Facts:
        """Return the facts about the module, after trying it on made-up observations once in this process.

        Raises:
            ConfigError: it breaks the contract.
        """
        tried = _tried.setdefault(self.made_of, {})
        arguments = repr((self.kwargs, self.spaces, self.spaces.actions.as_json(), self.head_size, self.dtype))
        if arguments not in tried:
            tried[arguments] = self._try()
        return tried[arguments]

    def build(self, seed: int) -> nn.Module:
        """Return the module in its dtype, with weights drawn from `seed`.

        Raises:
            ConfigError: the constructor raises, or parameters are missing or not dppo's to place.
        """
        return drawn(self._made, seed, self.dtype)

    def _made(self) -> nn.Module:
        try:
            module = self.made_of(self.spaces, self.head_size, **self.kwargs)
        except Exception as error:
            raise self._broken(
                f"its constructor raised {in_a_line(error)}{place_of(error)}. It is called with (spaces, head_size, "
                f"**model_kwargs); head_size is {self.head_size}"
            ) from error
        self._check_parameters(module)
        return module

    def _try(self) -> Facts:
        module = self.build(0)
        state_size = getattr(module, "state_size", 0)
        if type(state_size) is not int or state_size < 0:
            raise self._broken(
                f"its state_size is {state_size!r}. It must be the number of elements of the memory's state, or be "
                f"left out"
            )
        with torch.random.fork_rng(devices=[]):
            if state_size:
                self._check_sequences(module, state_size)
            else:
                self._check_rows(module)
        if dict(module.named_buffers()):
            self._check_buffers(module, self.build(1))
        return Facts(shapes_of(module), state_size)

    def _check_parameters(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        if not parameters:
            raise self._broken("it has no parameters, so there is nothing to learn. Assign its layers to self")
        first_name, first = next(iter(parameters.items()))
        for name, parameter in parameters.items():
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

    def _check_buffers(self, module: nn.Module, other: nn.Module) -> None:
        """Compare with a module built from another seed, because actors build theirs without knowing the seed."""
        others = dict(other.named_buffers())
        for name, buffer in module.named_buffers():
            if name not in others or not torch.equal(buffer, others[name]):
                raise self._broken(
                    f"its buffer {name} is random, so each actor would get different values. Make it a parameter with "
                    f"requires_grad=False"
                )

    # ------------------------------------------------------------------ trial passes

    def _check_rows(self, module: nn.Module) -> None:
        """Run a module without memory on a few random observations and check its outputs."""
        obs = made_up_inputs(self.spaces, ROWS, getattr(torch, self.dtype))

        def run(rows: int) -> tuple[Tensor, ...]:
            shapes = ((rows, self.head_size), "[rows, head_size]"), ((rows,), f"[rows]; {SQUEEZE}")
            return self._outputs(module, (each_leaf(obs, lambda leaf: leaf[:rows]),), shapes)

        first, again, alone = self._passes(module, [lambda: run(ROWS), lambda: run(ROWS), lambda: run(1)])
        for at in range(2):
            self._check_output(OUTPUTS[at], first[at], again[at], alone[at], first[at][:1])

    def _check_sequences(self, module: nn.Module, state_size: int) -> None:
        """Run a module with memory on a few random sequences and check its outputs."""
        obs, state, starts = self._sequences(state_size)

        def run(
            steps: slice = slice(None), rows: slice = slice(None), *, before: Tensor = state, flags: Tensor = starts
        ) -> tuple[Tensor, ...]:
            flags = flags[steps, rows]
            of_row = (*flags.shape, self.head_size), tuple(flags.shape), (flags.shape[1], state_size)
            hints = "[L, rows, head_size]", f"[L, rows]; {SQUEEZE}", "[rows, state_size], after the last step"
            part = each_leaf(obs, lambda leaf: leaf[steps, rows])
            return self._outputs(module, (part, before[rows], flags), tuple(zip(of_row, hints, strict=True)))

        def in_turn() -> tuple[Tensor, ...]:
            results, after = [], state
            for t in range(STEPS):
                results.append(run(slice(t, t + 1), before=after))
                after = results[-1][2]
            return torch.cat([one[0] for one in results]), torch.cat([one[1] for one in results]), after

        first, none = slice(1), torch.zeros_like
        calls = [run, run, lambda: run(rows=slice(1, 2)), in_turn]
        calls.append(lambda: run(first, flags=torch.ones_like(starts)))
        calls.append(lambda: run(first, before=none(state), flags=none(starts)))
        one, again, alone, stepped, started, from_zero = self._passes(module, calls)
        for at in range(2):
            self._check_output(OUTPUTS[at], one[at], again[at], alone[at], one[at][:, 1:2])
        self._check_equal(
            started,
            from_zero,
            "where starts is True differ from those of a state of zeros. Set the state of these rows to zero before "
            "the step",
        )
        self._check_equal(
            stepped,
            one,
            "of a sequence differ from those of its steps one after the other, as actors call it. Return the state "
            "after the last step, and let no step see a later one",
        )

    def _sequences(self, state_size: int) -> tuple[Any, Tensor, Tensor]:
        """Return random sequences of 3 rows, in two of which an episode starts: observations, state and starts."""
        dtype = getattr(torch, self.dtype)
        inputs = made_up_inputs(self.spaces, STEPS * ROWS, dtype)
        state = torch.randn((ROWS, state_size), generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        starts = torch.zeros((STEPS, ROWS), dtype=torch.bool)
        starts[0, 1] = starts[2, 2] = True
        return each_leaf(inputs, lambda leaf: leaf.view(STEPS, ROWS, *leaf.shape[1:])), state.to(dtype), starts

    def _check_equal(self, found: tuple[Tensor, ...], expected: tuple[Tensor, ...], otherwise: str) -> None:
        for name, one, other in zip(OUTPUTS, found, expected, strict=True):
            if not _close(one, other):
                raise self._broken(f"its {name} {otherwise}")

    def _passes(self, module: nn.Module, calls: list[Callable[[], tuple[Tensor, ...]]]) -> list[tuple[Tensor, ...]]:
        """Return the results of forward passes, after checking that they leave the buffers unchanged."""
        before = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with torch.enable_grad():
            results = [call() for call in calls]
        for name, buffer in module.named_buffers():
            if not torch.equal(buffer, before[name]):
                raise self._broken(
                    f"its buffer {name} changes in a forward pass, as those of BatchNorm do, so actors and learners "
                    f"would hold different values. Use LayerNorm or GroupNorm"
                )
        return results

    def _outputs(
        self, module: nn.Module, inputs: tuple[Any, ...], expected: tuple[tuple[tuple[int, ...], str], ...]
    ) -> tuple[Tensor, ...]:
        """Return what the module makes of `inputs` after checking type, shape and dtype.

        Args:
            expected: shape and a hint at the meaning of the axes, for each output.
        """
        dtype, called = getattr(torch, self.dtype), call_in_words(*inputs)
        try:
            with default_dtype(dtype):
                outputs: Any = module(*inputs)
        except Exception as error:
            raise self._broken(f"{called} raised {in_a_line(error)}{place_of(error)}") from error
        names = OUTPUTS[: len(expected)]
        if not (isinstance(outputs, tuple) and [isinstance(one, Tensor) for one in outputs] == [True] * len(names)):
            wanted = f"{COUNTS[len(names)]} tensors, {', '.join(names[:-1])} and {names[-1]}"
            raise self._broken(f"{called} returned {kind_in_words(outputs)}. Return {wanted}")
        for name, output, (shape, hint) in zip(names, outputs, expected, strict=True):
            if output.shape != shape:
                raise self._broken(f"{called} returned {name} of shape {tuple(output.shape)}, not {shape}: {hint}")
            if output.dtype != dtype:
                raise self._broken(f"{called} returned {name} of {output.dtype}. Return the dtype of obs")
            if not torch.isfinite(output).all():
                raise self._broken(f"{called} returned non-finite {name}. Look for a division by zero")
        return outputs

    def _check_output(self, name: str, one: Tensor, again: Tensor, alone: Tensor, of_row: Tensor) -> None:
        """Check an output: equal in a second pass, and of a row alone, which is `of_row` among others."""
        if not torch.equal(one, again):
            raise self._broken(
                f"its {name} differ between two passes over the same observations. Remove dropout and noise"
            )
        if not _close(alone, of_row):
            raise self._broken(
                f"its {name} of one observation depend on the other rows of the batch. Process each row on its own"
            )
        if not one.requires_grad:
            raise self._broken(
                f"its {name} do not depend on any parameter with requires_grad=True. Compute them from parameters"
            )

    def _broken(self, fact: str) -> ConfigError:
        return ConfigError(f"model={self.name}: {fact}.")


def _close(one: Tensor, other: Tensor) -> bool:
    """Return whether two outputs are equal up to rounding."""
    return torch.allclose(one, other, rtol=1e-3, atol=1e-4)


def model_class(model: Any) -> type[nn.Module]:
    """Return the class at the import path `model`, or `model` itself.

    Raises:
        ConfigError: it cannot be imported, or is not a subclass of `torch.nn.Module`.
    """
    name = import_path(model)
    try:
        found = imported(model, "Class") if isinstance(model, str) else model
    except ImportError as error:
        raise ConfigError(f"model={name}: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"model={name}: {found!r} is not a subclass of torch.nn.Module. Pass one.")
    return found
