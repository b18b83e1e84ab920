"""A user's module as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dppo.ppo.distributions import Distribution, distribution_of
from dppo.ppo.networks.network import NetworkSpec
from dppo.spaces.spaces import Spaces
from dppo.user_code import import_path

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

    obs_shape: tuple[int, ...]
    distribution: Distribution
    model: ModelClass
    """`module:Class`, or the class itself."""
    kwargs: dict[str, Any]
    dtype: str
    spaces: Spaces = field(compare=False, repr=False)

    @staticmethod
    def of(spaces: Spaces, model: ModelClass, kwargs: dict[str, Any], dtype: str) -> ModuleSpec:
        """Return the network for these spaces."""
        return ModuleSpec(spaces.obs.shape, distribution_of(spaces.actions), model, kwargs, dtype, spaces)

    @property
    @override
    def state_size(self) -> int:
        return self._contract().facts().state_size

    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._contract().facts().shapes

    def module(self, seed: int) -> nn.Module:
        """Build the module on the CPU with weights drawn from `seed`; imports torch.

        Raises:
            ConfigError: the module does not keep the contract.
        """
        contract = self._contract()
        contract.facts()
        return contract.build(seed)

    def _contract(self) -> Contract:
        from dppo.ppo.networks.user.contract import Contract, model_class

        made_of, name = model_class(self.model), import_path(self.model)
        return Contract(made_of, name, self.kwargs, self.spaces, self.distribution.head_size, self.dtype)

    @override
    def as_json(self) -> dict[str, Any]:
        return {"model": import_path(self.model), "model_kwargs": self.kwargs, "dtype": self.dtype}


def check_model(model: ModelClass) -> None:
    """Check that `model` is or names a subclass of `torch.nn.Module`, without creating one; imports torch.

    Raises:
        ConfigError: it does not.
    """
    from dppo.ppo.networks.user.contract import model_class

    model_class(model)
