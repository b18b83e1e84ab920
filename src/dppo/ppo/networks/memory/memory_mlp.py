"""The network with memory for a single array of numbers, in NumPy for actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np
from typing_extensions import override

from dppo.ppo.networks.default.mlp_numpy import LastLayers, StackedLayers
from dppo.ppo.networks.encoders.encoder_spec import EncoderSpec
from dppo.ppo.networks.network import ActingNetwork, Outputs

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float


class NumpyMemoryMLP(ActingNetwork):
    """`EncoderNetwork` in NumPy, for the reasons of `NumpyMLP`.

    Separate trunks are stacked, so that one product computes two layers, and one step two cells. Each group of E rows
    has a product of its own.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        self._spec = spec
        self._dims = len(spec.obs_shape)

    @override
    def load(self, weights: np.ndarray) -> None:
        named, layers = self._spec.unflatten(weights), self._spec.layers
        prefixes = [f"{trunk}body.hidden." for trunk in layers.trunks]
        self._hidden = StackedLayers(named, prefixes, 2 * len(layers.hidden_sizes), layers.activation)
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cells = [{name: named[f"{trunk}memory.{name}"] for name in names} for trunk in layers.trunks]
        self._cells = numpy_cells(layers.memory, cells)
        self._outputs = LastLayers(named, "policy", "value")

    @override
    def step(self, obs: np.ndarray, state: np.ndarray | None = None) -> Outputs:
        """Return head, values and state [..., E, S] of `obs` [..., E, *O] and the `state` before."""
        assert state is not None, "a network with memory needs its state"
        rows = obs.shape[: obs.ndim - self._dims]
        before = state.reshape(*rows, len(self._spec.layers.trunks), -1).swapaxes(-2, -3)
        h, after = self._cells.step(self._hidden.outputs(obs, rows), before)
        return Outputs(*self._outputs.of(h), after.swapaxes(-2, -3).reshape(state.shape))


class NumpyCells(Protocol):
    """One step of K cells side by side, each with its own inputs and weights.

    Each group of rows has a matrix product of its own, so that leading axes do not change a single bit. The gates that
    go through a sigmoid come first and have halved weights: sigmoid(x) = tanh(x / 2) / 2 + 1 / 2, so that one call of
    tanh serves all gates.
    """

    def step(
        self, inputs: Float[np.ndarray, "*samplers K rows I"], state: Float[np.ndarray, "*samplers K rows S"]
    ) -> tuple[Float[np.ndarray, "*samplers K rows H"], Float[np.ndarray, "*samplers K rows S"]]:
        """Return outputs and new states; `state` is not changed."""


def numpy_cells(kind: str, parameters: Sequence[Mapping[str, np.ndarray]]) -> NumpyCells:
    """Return copies of K cells of a kind, by the parameters of each under torch's names."""
    return NumpyGRU(parameters) if kind == "gru" else NumpyLSTM(parameters)


class NumpyLSTM(NumpyCells):
    """`torch.nn.LSTMCell`; the state is h and c side by side."""

    def __init__(self, parameters: Sequence[Mapping[str, np.ndarray]]) -> None:
        self._by_x = _stacked(parameters, "weight_ih", _lstm_order)
        self._by_h = _stacked(parameters, "weight_hh", _lstm_order)
        self._bias = np.stack([_lstm_order(one["bias_ih"] + one["bias_hh"])[None] for one in parameters])
        self._size = self._by_h.shape[1]

    @override
    def step(self, inputs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return h [..., K, rows, H] and the new states [..., K, rows, 2 H]."""
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

    def __init__(self, parameters: Sequence[Mapping[str, np.ndarray]]) -> None:
        self._by_x = _stacked(parameters, "weight_ih", _gru_order)
        self._by_h = _stacked(parameters, "weight_hh", _gru_order)
        self._bias, self._h_bias = (
            np.stack([_gru_order(one[name])[None] for one in parameters]) for name in ("bias_ih", "bias_hh")
        )
        self._size = self._by_h.shape[1]

    @override
    def step(self, inputs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return h [..., K, rows, H], twice: it is also the new state."""
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


def _stacked(
    parameters: Sequence[Mapping[str, np.ndarray]], name: str, order: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Return the weights of all cells, [K, inputs, gates]."""
    return np.stack([order(one[name]).T for one in parameters])


def _lstm_order(gates: np.ndarray) -> np.ndarray:
    """Return torch's gates i, f, g, o [4 H, ...] as i, f, o, g, the sigmoids' halved."""
    i, f, g, o = np.split(gates, 4)
    return np.concatenate([i / 2, f / 2, o / 2, g])


def _gru_order(gates: np.ndarray) -> np.ndarray:
    """Return torch's gates r, z, n [3 H, ...], the sigmoids' halved."""
    r, z, n = np.split(gates, 3)
    return np.concatenate([r / 2, z / 2, n])
