"""A user's module as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dppo.errors import ConfigError
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.spaces import Spaces
from dppo.user_code import import_path, imported

if TYPE_CHECKING:
    from torch import nn

    from dppo.ppo.networks.user.contract import Contract

ModelClass = str | Callable[..., Any]


@dataclass(frozen=True)
class ModuleSpec(NetworkSpec):
    """A user's module, by its class.

    The contract: `Class(spaces, head_size, **kwargs)` returns a `torch.nn.Module` whose `forward(obs)` maps a
    floating-point tensor of observations [rows, *O] to the head [rows, head_size] and the values [rows]. Of a Dict or
    Tuple space, it gets a dict of such tensors by the leaf's name.

    A module with memory has an attribute `state_size`, S. Its `forward(obs, state, starts)` maps sequences of
    observations [L, rows, *O], the state [rows, S] before the first step, and flags [L, rows] at which the state
    becomes zero before the step, to head [L, rows, head_size], values [L, rows] and the state after the last step.
    Actors call it with L = 1. `dppo.ppo.networks.user.contract` checks it, once in each process.
    """

    spaces: Spaces = field(compare=False, repr=False)
    model: ModelClass
    """`module:Class`, or the class itself."""
    kwargs: dict[str, Any]
    dtype: str

    @property
    @override
    def state_size(self) -> int:
        return self._contract().facts().state_size

    @property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._contract().facts().shapes

    @override
    def module(self, seed: int) -> nn.Module:
        self._contract().facts()
        return self._contract().build(seed)

    def _contract(self) -> Contract:
        from dppo.ppo.networks.user.contract import Contract

        made_of, head_size = model_class(self.model), self.distribution.head_size
        return Contract(made_of, import_path(self.model), self.kwargs, self.spaces, head_size, self.dtype)

    @override
    def as_json(self) -> dict[str, Any]:
        return {"model": import_path(self.model), "model_kwargs": self.kwargs, "dtype": self.dtype}


def model_class(model: ModelClass) -> type[nn.Module]:
    """Return the class at the import path `model`, or `model` itself; raise ConfigError if it is no `nn.Module`."""
    from torch import nn

    try:
        found: Any = imported(model, "Class") if isinstance(model, str) else model
    except ImportError as error:
        raise ConfigError(f"model={import_path(model)}: {error}.") from None
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(f"model={import_path(model)}: {found!r} is not a subclass of torch.nn.Module. Pass one.")
    return found
