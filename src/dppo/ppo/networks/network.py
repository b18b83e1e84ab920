"""The seam between PPO and networks: PPO works with any implementation of these classes.

The loss and the distribution compute gradients with respect to the network's outputs. The network backpropagates these
to its parameters, with autograd or by hand.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, final

import numpy as np

from dppo.errors import ConfigError
from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.simple import distribution_of
from dppo.spaces.spaces import Spaces
from dppo.user_code import import_path, imported

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Bool, Float, Shaped
    from torch import Tensor, nn

    from dppo.ppo.networks.parameters import FlatParameters

ModelClass = str | Callable[..., Any]
"""The class of a user's network: its import path, or itself."""


class NetworkOutputs(NamedTuple):
    """Outputs of an acting network."""

    head: Float[np.ndarray, "*rows H"]
    """All parameters of the action distribution."""
    values: Float[np.ndarray, "*rows"]
    state: Float[np.ndarray, "*rows S"] | None = None
    """State of the memory after the step; None without memory."""


class ActingNetwork(Protocol):
    """A network in an actor: NumPy arrays in and out, one thread."""

    def load(self, weights: Float[np.ndarray, " P"]) -> None:
        """Copy `weights` and use them from now on."""

    def step(self, obs: Any, state: Any = None) -> NetworkOutputs:
        """Return head and values of observations [E, *O], in the network's dtype.

        Images stay bytes. Of a Dict or Tuple space, `obs` is a dict of arrays by the leaf's name. With leading axes
        [..., E, *O], each group of E rows gets the same bits as it would alone.

        `state`: the memory's state before the step, [..., E, S]; None without memory.
        """


class RecurrentInputs(NamedTuple):
    """The states from which S sequences of L steps start, and where episodes start inside them."""

    states: Float[Tensor, "S n"]
    """The states when the segments were collected; zero where an episode starts."""
    starts: Bool[Tensor, "S L"]
    """True at the first step of an episode."""


class LearningNetwork(Protocol):
    """A network in a trainer, with its parameters in one flat vector and their gradients in another."""

    parameters: FlatParameters

    def forward(
        self, obs: Any, recurrent: Any = None
    ) -> tuple[Float[Tensor, "rows H"], Float[Tensor, " rows"], Any]:
        """Return head, values and residuals for `backward`; the next call may overwrite all three.

        Args:
            obs: a tensor [rows, *O], or a dict of tensors by the leaf's name, as a `Batch` holds them.
            recurrent: the `RecurrentInputs` of the sequences that the rows are; None without memory.
        """

    def backward(
        self,
        residuals: Any,
        grad_head: Float[Tensor, "rows H"],
        grad_values: Float[Tensor, " rows"],
    ) -> None:
        """Store the gradient of the loss, given its gradients with respect to head and values; uses `residuals` up."""


class NetworkSpec(ABC):
    """A network as plain data, picklable and comparable, from which each process builds the half it needs.

    `acting_network` and `learning_network` build it.
    """

    spaces: Spaces
    """The spaces that the network reads and acts in, without masks."""
    dtype: str
    """Dtype of parameters and outputs: "float32" or "float64"."""

    @cached_property
    def distribution(self) -> Distribution:
        """The distribution of actions; the head holds its parameters."""
        return distribution_of(self.spaces.actions)

    @property
    @abstractmethod
    def state_size(self) -> int:
        """S, the size of the memory's state for one environment; 0 without memory."""

    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of all parameters, in the order of the flat vector."""

    @abstractmethod
    def module(self, seed: int) -> nn.Module:
        """Build the module on the CPU with weights drawn from `seed`; raise ConfigError if it breaks the contract."""

    @abstractmethod
    def as_json(self) -> dict[str, Any]:
        """Return, as JSON values, everything about the network that the environment's spaces do not determine."""

    @cached_property
    def num_parameters(self) -> int:
        """P, the length of the flat vector."""
        return sum(map(math.prod, self.shapes.values()))

    @final
    def ordered_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """List the parameters of `module` in the order of the flat vector."""
        parameters = dict(module.named_parameters())
        return [parameters[name] for name in self.shapes]

    @final
    def unflatten(self, weights: Shaped[np.ndarray, " P"]) -> dict[str, np.ndarray]:
        """Split the flat vector `weights` into views by name; ValueError if its length is wrong."""
        if weights.shape != (self.num_parameters,):
            raise ValueError(
                f"got {weights.size:,} weights, this network has {self.num_parameters:,}."
            )
        parameters: dict[str, np.ndarray] = {}
        start = 0
        for name, shape in self.shapes.items():
            end = start + math.prod(shape)
            parameters[name] = weights[start:end].reshape(shape)
            start = end
        return parameters

    @final
    def flatten(self, parameters: dict[str, np.ndarray]) -> Float[np.ndarray, " P"]:
        """Join parameters given by name into the flat vector; raise ValueError if names or shapes differ."""
        expected = dict(self.shapes)
        shapes = {name: array.shape for name, array in parameters.items()}
        for name in {**expected, **shapes}:
            if shapes.get(name) != expected.get(name):
                raise ValueError(
                    f"parameter {name} has shape {shapes.get(name)}, this network has {expected.get(name)}"
                )
        return np.concatenate([parameters[name].reshape(-1) for name in expected]).astype(
            self.dtype, copy=False
        )


SB3_POLICIES = ("MlpPolicy", "CnnPolicy", "MultiInputPolicy", "MlpLstmPolicy", "CnnLstmPolicy")


def model_class(model: ModelClass) -> type[nn.Module]:
    """Return the class at the import path `model`, or `model` itself; raise ConfigError if it is no `nn.Module`."""
    from torch import nn

    if model in SB3_POLICIES:
        raise ConfigError(
            f"model={model}: names a policy of Stable-Baselines3; the default network fits the observations. Leave it "
            f"out."
        )
    try:
        kind: Any = imported(model, "Class") if isinstance(model, str) else model
    except ImportError as error:
        raise ConfigError(f"model={import_path(model)}: {error}.") from None
    if isinstance(kind, nn.Module):
        name = type(kind).__name__
        raise ConfigError(
            f"model: is a module {name}(...) that was made already. Pass the class {name}, and its arguments as "
            f"`model_kwargs`: it is made with (spaces, head_size)."
        )
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ConfigError(
            f"model={import_path(model)}: {kind!r} is not a subclass of torch.nn.Module. Pass one."
        )
    return kind
