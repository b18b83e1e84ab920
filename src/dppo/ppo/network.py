"""The seam between PPO and networks: any implementation of these protocols acts and learns.

The loss and the distribution stop at the network's outputs and give the gradients by these. A network turns them into
the gradient by its parameters, with autograd or by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dppo.ppo.distributions import Distribution

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float
    from torch import Tensor

    from dppo.ppo.flat import FlatParameters


class Outputs(NamedTuple):
    """Outputs of an acting network."""

    head: Float[np.ndarray, "*rows H"]
    """Every parameter of the action distribution."""
    values: Float[np.ndarray, "*rows"]


class ActingNetwork(Protocol):
    """A network in an actor: NumPy in, NumPy out, one thread."""

    def load(self, weights: Float[np.ndarray, " P"]) -> None:
        """Copy `weights`; act under them from now on."""

    def step(self, obs: Any) -> Outputs:
        """Return head and values of observations [E, *O], in the network's dtype.

        Images come as bytes, and observations of several leaves as a dict of arrays by the leaf's name.

        With leading axes [..., E, *O], each E rows give the same bits as they give alone.
        """


class LearningNetwork(Protocol):
    """A network in a trainer: parameters in one flat vector, gradients in another."""

    @property
    def parameters(self) -> FlatParameters:
        """Return the flat vectors."""

    def forward(self, obs: Any) -> tuple[Float[Tensor, "rows H"], Float[Tensor, " rows"], Any]:
        """Return head, values and what `backward` needs; the next call may overwrite all three.

        Args:
            obs: of a minibatch: a tensor [rows, *O], or a dict of them by the leaf's name.
        """

    def backward(
        self, residuals: Any, by_head: Float[Tensor, "rows H"], by_values: Float[Tensor, " rows"], *, accumulate: bool
    ) -> None:
        """Turn the loss's gradients by head and values into the gradient by the parameters.

        It replaces the gradient of before, or is added to it. `residuals` is used up.
        """


class NetworkSpec(Protocol):
    """A network as plain data: picklable and comparable. Each process builds its half from it."""

    obs_shape: tuple[int, ...]
    """Shape of one observation."""
    distribution: Distribution
    """The distribution whose parameters the head holds."""
    dtype: str
    """Of parameters and outputs: "float32" or "float64"."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return names and shapes of all parameters, in the order in which they lie in the flat vector."""

    def acting(self) -> ActingNetwork:
        """Build the network for an actor."""

    def learning(
        self, seed: int, *, device: str = "cpu", zeros_like: Callable[[Tensor], Tensor] | None = None
    ) -> LearningNetwork:
        """Build the network for a trainer, with initial weights drawn from `seed` alone; imports torch.

        Args:
            zeros_like: makes the vector of gradients; several learners want theirs in shared memory.
        """

    def as_json(self) -> dict[str, Any]:
        """Return, as JSON values, all of the network that does not follow from the environment's spaces."""

    def zeros(self, rows: int) -> Tensor | dict[str, Tensor]:
        """Return observations of zeros, as a batch holds them; imports torch."""
        import torch

        return torch.zeros((rows, *self.obs_shape), dtype=getattr(torch, self.dtype))

    # ------------------------------------------------------------------ the same for every network

    @property
    def num_parameters(self) -> int:
        """Return P, the length of the flat vector."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def unflatten(self, weights: Float[np.ndarray, " P"]) -> dict[str, np.ndarray]:
        """Return views of the flat vector `weights`, by name.

        Raises:
            ValueError: `weights` has another length than this network's.
        """
        if weights.shape != (self.num_parameters,):
            raise ValueError(f"{weights.size:,} weights given to a network of {self.num_parameters:,}.")
        named, start = {}, 0
        for name, shape in self.shapes().items():
            end = start + math.prod(shape)
            named[name] = weights[start:end].reshape(shape)
            start = end
        return named

    def flatten(self, named: dict[str, np.ndarray]) -> Float[np.ndarray, " P"]:
        """Return the flat vector of parameters given by name.

        Raises:
            ValueError: one is missing, left over, or of another shape than in this network.
        """
        expected = dict(self.shapes())
        found = {name: array.shape for name, array in named.items()}
        if found != expected:
            name = next(name for name in {**expected, **found} if expected.get(name) != found.get(name))
            raise ValueError(f"parameter {name} has shape {found.get(name)}, this network has {expected.get(name)}")
        return np.concatenate([named[name].reshape(-1) for name in expected]).astype(self.dtype, copy=False)
