"""The network with memory for a single array of numbers, in NumPy for actors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from dppo.ppo.networks.default.mlp import LastLayers, StackedLayers
from dppo.ppo.networks.encoders.encoder_spec import EncoderSpec
from dppo.ppo.networks.network import ActingNetwork, Outputs

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float

PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


class NumpyMemoryMLP(ActingNetwork):
    """`EncoderNetwork` in NumPy, for the reasons of `NumpyMLP`.

    Separate trunks are stacked, so that one product of E rows computes two layers, and one step two cells.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._dims = len(spec.obs_shape)

    @override
    def load(self, weights: np.ndarray) -> None:
        named, layers = self._spec.unflatten(weights), self._spec.layers
        prefixes = [f"{trunk}body.hidden." for trunk in layers.trunks]
        self._hidden = StackedLayers(named, prefixes, 2 * len(layers.hidden_sizes), layers.activation)
        cells = [{name: named[f"{trunk}memory.{name}"] for name in PARAMETERS} for trunk in layers.trunks]
        self._cells = NUMPY_CELLS[layers.memory](cells)
        self._outputs = LastLayers(named, "policy", "value")

    @override
    def step(self, obs: np.ndarray, state: np.ndarray | None = None) -> Outputs:
        """Return head, values and state [..., E, S] of `obs` [..., E, *O] and the `state` before."""
        assert state is not None, "a network with memory needs its state"
        rows = obs.shape[: obs.ndim - self._dims]
        before = state.reshape(*rows, len(self._spec.layers.trunks), -1).swapaxes(-2, -3)
        h, after = self._cells.step(self._hidden.outputs(obs, rows), before)
        return Outputs(*self._outputs.of(h), after.swapaxes(-2, -3).reshape(state.shape))


class NumpyCells(ABC):
    """K cells side by side, each with its own inputs and weights.

    Each group of rows has a matrix product of its own, so that leading axes do not change a single bit. As sigmoid(x) =
    tanh(x / 2) / 2 + 1 / 2, one tanh serves all gates: those of a sigmoid come first and have halved weights.
    """

    gates: tuple[int, ...]
    """The gates, by their numbers in torch; all but the last go through a sigmoid."""

    def __init__(self, parameters: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Copy the parameters of each cell, which are given by torch's names."""

        def ordered(gates: np.ndarray) -> np.ndarray:
            gates = gates.reshape(len(self.gates), -1, *gates.shape[1:])[list(self.gates)]
            gates[:-1] /= 2
            return gates.reshape(-1, *gates.shape[2:])

        self._by_x, self._by_h, self._bias, self._h_bias = (  # [K, inputs, gates], for biases [K, 1, gates]
            np.stack([np.atleast_2d(ordered(one[name]).T) for one in parameters]) for name in PARAMETERS
        )
        self._size = self._by_h.shape[1]

    @abstractmethod
    def step(
        self, inputs: Float[np.ndarray, "*samplers K rows I"], state: Float[np.ndarray, "*samplers K rows S"]
    ) -> tuple[Float[np.ndarray, "*samplers K rows H"], Float[np.ndarray, "*samplers K rows S"]]:
        """Return outputs and new states after one step; `state` is not changed."""


class NumpyLSTM(NumpyCells):
    """`torch.nn.LSTMCell`; the state is h and c side by side."""

    gates = 0, 1, 3, 2  # i, f, o, g

    def __init__(self, parameters: Sequence[Mapping[str, np.ndarray]]) -> None:
        super().__init__(parameters)
        self._bias += self._h_bias

    @override
    def step(self, inputs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self._size
        gates = inputs @ self._by_x
        gates += state[..., :size] @ self._by_h
        gates += self._bias
        np.tanh(gates, out=gates)
        sigmoids = gates[..., : 3 * size]
        sigmoids *= 0.5
        sigmoids += 0.5
        after = np.empty((*gates.shape[:-1], 2 * size), gates.dtype)
        h, c = after[..., :size], after[..., size:]
        np.multiply(gates[..., size : 2 * size], state[..., size:], out=c)
        c += gates[..., :size] * gates[..., 3 * size :]
        np.multiply(gates[..., 2 * size : 3 * size], np.tanh(c), out=h)
        return h, after


class NumpyGRU(NumpyCells):
    """`torch.nn.GRUCell`; the state is h."""

    gates = 0, 1, 2  # r, z, n

    @override
    def step(self, inputs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        size = self._size
        gates = inputs @ self._by_x
        gates += self._bias
        hidden = state @ self._by_h
        hidden += self._h_bias
        sigmoids, n = gates[..., : 2 * size], gates[..., 2 * size :]
        sigmoids += hidden[..., : 2 * size]
        np.tanh(sigmoids, out=sigmoids)
        sigmoids *= 0.5
        sigmoids += 0.5
        n += gates[..., :size] * hidden[..., 2 * size :]
        h = np.tanh(n)
        h += gates[..., size : 2 * size] * (state - h)
        return h, h


NUMPY_CELLS: dict[str, type[NumpyCells]] = {"gru": NumpyGRU, "lstm": NumpyLSTM}
