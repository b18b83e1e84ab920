"""The contract of a user's module, and its check: each error names the broken part."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.user.memory_contract import check_memory
from dppo.ppo.networks.user.trial import Inputs, Trial, broken, inputs_in_words, made_up_inputs, summary_of

ROWS = 3  # observations in the trial pass
MOST_BUILDS = 20  # of a module, to find two with equal weights


@dataclass(frozen=True, slots=True)
class Contract:
    """The module maps observations [rows, *O] to a head [rows, head_size] and values [rows], all of one dtype."""

    trial: Trial

    def checked(self, build: Callable[[int], nn.Module], seed: int, *, settled: bool = False) -> nn.Module:
        """Return the module that `build` makes from `seed`, in this dtype.

        Args:
            settled: build until the same weights have come out twice.

        Raises:
            ConfigError: `build` raises, or the module breaks the contract.
        """
        module = self._settled(build, seed) if settled else self._built(build, seed)
        state_size = self._state_size(module)
        if state_size:
            check_memory(self.trial, module, state_size)
        else:
            self._check_forward(module)
        if dict(module.named_buffers()):
            self._check_buffers(module, self._built(build, seed + 1))
        return module

    def _settled(self, build: Callable[[int], nn.Module], seed: int) -> nn.Module:
        """Build until the same weights have come out twice: a thread of an environment may draw from the generator."""
        seen: set[bytes] = set()
        for _ in range(MOST_BUILDS):
            module = self._built(build, seed)
            weights = [parameter.detach().numpy().tobytes() for parameter in module.parameters()]
            drawn = hashlib.sha256(b"".join(weights)).digest()
            if drawn in seen:
                return module
            seen.add(drawn)
        raise self.trial.broken(
            f"its initial weights differ each time, in {MOST_BUILDS} builds from one seed. Draw them from torch's "
            f"generator, not from NumPy or uninitialised memory; and let threads of an environment draw from a "
            f"torch.Generator of their own"
        )

    def _built(self, build: Callable[[int], nn.Module], seed: int) -> nn.Module:
        try:
            module = build(seed)
        except Exception as error:
            raise self.trial.broken(
                f"its constructor raised {summary_of(error)}. It is called with (spaces, head_size, **model_kwargs); "
                f"head_size is {self.trial.head_size}"
            ) from error
        self._check_parameters(module)
        return module.to(getattr(torch, self.trial.dtype))

    def _check_parameters(self, module: nn.Module) -> None:
        parameters = dict(module.named_parameters())
        if not parameters:
            raise self.trial.broken("it has no parameters, so there is nothing to learn. Assign its layers to self")
        first_name, first = next(iter(parameters.items()))
        for name, parameter in parameters.items():
            if nn.parameter.is_lazy(parameter):
                raise self.trial.broken(f"its parameter {name} has no shape yet. Give lazy layers their sizes")
            if (parameter.device, parameter.dtype) != (first.device, first.dtype):
                raise self.trial.broken(
                    f"its parameters differ: {name} is {parameter.dtype} on {parameter.device}, {first_name} is "
                    f"{first.dtype} on {first.device}. Let dppo choose both (settings device and dtype)"
                )
        if first.device.type != "cpu" or not first.is_floating_point():
            raise self.trial.broken(
                f"its parameters are {first.dtype} on {first.device}. Let dppo choose both (settings device and dtype)"
            )

    def _state_size(self, module: nn.Module) -> int:
        size = getattr(module, "state_size", 0)
        if type(size) is not int or size < 0:
            raise self.trial.broken(
                f"its state_size is {size!r}. It must be the number of elements of the memory's state, or be left out"
            )
        return size

    def _check_forward(self, module: nn.Module) -> None:
        """Run the module on a few random observations and check its outputs."""
        obs = made_up_inputs(self.trial.spaces, ROWS, getattr(torch, self.trial.dtype))
        alone_obs = each_leaf(obs, lambda leaf: leaf[:1])

        def outputs(some: Inputs) -> tuple[Tensor, ...]:
            rows = _size(some)
            expected = (
                ("head", (rows, self.trial.head_size), "[rows, head_size]"),
                ("values", (rows,), "[rows]; values.squeeze(-1) removes a last axis"),
            )
            return self.trial.outputs(module, (some,), f"forward(obs), with obs {inputs_in_words(some)},", expected)

        first, again, alone = self.trial.passes(
            module, [lambda: outputs(obs), lambda: outputs(obs), lambda: outputs(alone_obs)]
        )
        for name, one, other, single in zip(("head", "values"), first, again, alone, strict=True):
            self.trial.check_output(name, one, other, single, one[:1])

    def _check_buffers(self, module: nn.Module, other: nn.Module) -> None:
        """Compare with a module built from another seed, because actors build theirs without knowing the seed."""
        others = dict(other.named_buffers())
        for name, buffer in module.named_buffers():
            if name not in others or not torch.equal(buffer, others[name]):
                raise self.trial.broken(
                    f"its buffer {name} is random, so each actor would get different values. Make it a parameter with "
                    f"requires_grad=False"
                )


def _size(obs: Inputs) -> int:
    return len(next(iter(obs.values()))) if isinstance(obs, dict) else len(obs)


def model_class(model: Any, name: str) -> type[nn.Module]:
    """Return the class at the import path `model`, or `model` itself; `name` is used in errors.

    Raises:
        ConfigError: it cannot be imported, or is not a subclass of `torch.nn.Module`.
    """
    found = _imported(model) if isinstance(model, str) else model
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise broken(name, f"{found!r} is not a subclass of torch.nn.Module. Pass one")
    return found


def _imported(path: str) -> Any:
    module_name, _, name = path.rpartition(":")
    if not module_name:
        raise broken(path, "is not of the form module:Class. Add the name of the module that defines the class")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever a user's module raises while it is imported
        raise broken(
            path,
            f"importing {module_name} failed: {summary_of(error)}. It must be importable on every machine that runs "
            f"actors or learners",
        ) from None
    try:
        return attrgetter(name)(module)
    except AttributeError:
        raise broken(path, f"the module {module_name} has no {name}. Check the spelling") from None
