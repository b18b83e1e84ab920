"""Built-in networks that act in NumPy: two MLPs, or hidden layers with memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.layers import CELL_PARAMETERS
from dppo.ppo.networks.network import ActingNetwork, NetworkOutputs


class NumpyMLP(ActingNetwork):
    """An `MLP` in NumPy, or the layers around the memory of `NumpyMemory`.

    For few rows this takes a quarter of torch's time. An actor without torch starts in a fifth of the time and needs a
    third of the memory. Separate trunks are stacked, so that one product computes two layers.
    """

    def __init__(self, spec: BuiltInSpec, *, estimates_values: bool = True) -> None:
        """Without `estimates_values`, values are zero, and a trunk for them alone is not computed."""
        self._estimates_values = estimates_values or len(spec.layers.trunks) == 1
        self._num_obs_axes = len(spec.spaces.obs.shape)
        is_relu = spec.layers.activation == "relu"
        self._activation: Any = _relu if is_relu else np.tanh
        names = spec.parameter_names
        trunks = names.hidden if self._estimates_values else names.hidden[:1]
        # places of the parameters in the flat vector of weights
        places = spec.unflatten(np.arange(spec.num_parameters))

        def stacked(parameter: str) -> np.ndarray:
            """Return the places of a parameter of each trunk: weights [K, inputs, units], biases [K, 1, units]."""
            arrays = [places[f"{trunk}.{parameter}"].T for trunk in trunks]
            return np.stack([np.atleast_2d(array) for array in arrays])

        self._layer_places = []
        for number in range(len(spec.layers.hidden_sizes)):
            layer = 2 * number  # an activation follows each layer
            self._layer_places.append((stacked(f"{layer}.weight"), stacked(f"{layer}.bias")))
        self._head_places = (
            places[f"{names.policy}.weight"].T.copy(),
            places[f"{names.policy}.bias"],
            places[f"{names.value}.weight"][0],
            places[f"{names.value}.bias"],
        )
        self._log_std_places = places.get("log_std")
        self._log_std: np.ndarray | None = None

    @override
    def load(self, weights: np.ndarray) -> None:
        self._layers = []
        for weight, bias in self._layer_places:
            self._layers.append((weights[weight], weights[bias]))
        self._heads = [weights[place] for place in self._head_places]
        if self._log_std_places is not None:
            self._log_std = weights[self._log_std_places]

    @override
    def step(self, obs: np.ndarray, state: np.ndarray | None = None) -> NetworkOutputs:
        """Return head and values of `obs` [..., E, *O].

        Each group of E rows has a matrix product of its own: larger ones would change the last bits.
        """
        head, values = self.outputs(self.hidden(obs))
        return NetworkOutputs(head, values)

    def hidden(self, obs: np.ndarray) -> np.ndarray:
        """Return the outputs [..., K, E, units] of the hidden layers of each trunk."""
        rows = obs.shape[: obs.ndim - self._num_obs_axes]
        # [..., 1, E, inputs], broadcast over the K trunks
        h = obs.reshape(*rows[:-1], 1, rows[-1], -1)
        for weight, bias in self._layers:
            h = h @ weight
            h += bias
            self._activation(h, out=h)
        return h

    def outputs(self, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return head [..., E, H] and values [..., E] of the outputs of the layers before."""
        policy_weight, policy_bias, value_weight, value_bias = self._heads
        head = h[..., 0, :, :] @ policy_weight
        head += policy_bias
        if self._estimates_values:
            values = h[..., -1, :, :] @ value_weight
            values += value_bias
        else:
            values = np.zeros(head.shape[:-1], head.dtype)
        if self._log_std is not None:
            head = _with_columns(head, self._log_std)
        return head, values


def _relu(x: np.ndarray, out: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0, out=out)


def _with_columns(head: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Append the same `columns` to each row of `head` [..., H]."""
    width = head.shape[-1]
    shape = (*head.shape[:-1], width + len(columns))
    joined = np.empty(shape, head.dtype)
    joined[..., :width] = head
    joined[..., width:] = columns
    return joined


class NumpyMemory(ActingNetwork):
    """An `EncoderNetwork` with memory for a single array of numbers, in NumPy: one step computes all cells."""

    def __init__(self, spec: BuiltInSpec, *, estimates_values: bool = True) -> None:
        """Build the layers around the memory, as `NumpyMLP`."""
        self._spec = spec
        self._mlp = NumpyMLP(spec, estimates_values=estimates_values)
        self._num_trunks = len(spec.layers.trunks)

    @override
    def load(self, weights: np.ndarray) -> None:
        self._mlp.load(weights)
        parameters = self._spec.unflatten(weights)
        cells = [
            {name: parameters[f"{cell}.{name}"] for name in CELL_PARAMETERS}
            for cell in self._spec.parameter_names.cells
        ]
        self._cells = NumpyCells(self._spec.layers.memory, cells)

    @override
    def step(self, obs: np.ndarray, state: np.ndarray | None = None) -> NetworkOutputs:
        """Compute head, values and state [..., E, S] of `obs` [..., E, *O]."""
        assert state is not None, "a network with memory needs its state"
        by_trunk = state.reshape(*state.shape[:-1], self._num_trunks, -1)
        inputs = self._mlp.hidden(obs)
        h, new_by_trunk = self._cells.step(inputs, by_trunk.swapaxes(-2, -3))
        head, values = self._mlp.outputs(h)
        new_state = new_by_trunk.swapaxes(-2, -3).reshape(state.shape)
        return NetworkOutputs(head, values, new_state)


class NumpyCells:
    """K cells side by side, each with its own inputs and weights.

    Each group of rows has a matrix product of its own, so that leading axes do not change a single bit. As sigmoid(x) =
    tanh(x / 2) / 2 + 1 / 2, one tanh serves all gates: the gates that go through a sigmoid come first, and have halved
    weights.
    """

    def __init__(self, kind: str, cells: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Copy the parameters of each cell, a gru or an lstm, by torch's names."""
        gate_order = [0, 1, 2]  # r, z, n
        if kind == "lstm":
            gate_order = [0, 1, 3, 2]  # torch's order is i, f, g, o

        def stacked(name: str) -> np.ndarray:
            arrays = [_reordered(cell[name], gate_order) for cell in cells]
            transposed = [np.atleast_2d(array.T) for array in arrays]
            return np.stack(transposed)

        self._input_weight = stacked("weight_ih")  # [K, inputs, gates]
        self._h_weight = stacked("weight_hh")
        self._bias = stacked("bias_ih")  # [K, 1, gates]
        self._h_bias = stacked("bias_hh")
        self._size = self._h_weight.shape[1]
        if kind == "lstm":
            self._bias += self._h_bias
        self.step = self._lstm if kind == "lstm" else self._gru
        """Return outputs [..., K, rows, H] and new states [..., K, rows, S] of inputs [..., K, rows, I] and states."""

    def _lstm(self, inputs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step as `torch.nn.LSTMCell`; the state is h and c side by side."""
        size = self._size
        gates = inputs @ self._input_weight
        gates += state[..., :size] @ self._h_weight
        gates += self._bias
        np.tanh(gates, out=gates)
        sigmoids = gates[..., : 3 * size]
        sigmoids *= 0.5
        sigmoids += 0.5
        i = gates[..., :size]
        f = gates[..., size : 2 * size]
        o = gates[..., 2 * size : 3 * size]
        g = gates[..., 3 * size :]
        new_state = np.empty((*gates.shape[:-1], 2 * size), gates.dtype)
        h = new_state[..., :size]
        c = new_state[..., size:]
        np.multiply(f, state[..., size:], out=c)
        c += i * g
        np.multiply(o, np.tanh(c), out=h)
        return h, new_state

    def _gru(self, inputs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step as `torch.nn.GRUCell`; the state is h."""
        size = self._size
        gates = inputs @ self._input_weight
        gates += self._bias
        hidden = state @ self._h_weight
        hidden += self._h_bias
        sigmoids = gates[..., : 2 * size]
        sigmoids += hidden[..., : 2 * size]
        np.tanh(sigmoids, out=sigmoids)
        sigmoids *= 0.5
        sigmoids += 0.5
        r = gates[..., :size]
        z = gates[..., size : 2 * size]
        n = gates[..., 2 * size :]
        n += r * hidden[..., 2 * size :]
        h = np.tanh(n)
        h += z * (state - h)
        return h, h


def _reordered(parameter: np.ndarray, gate_order: list[int]) -> np.ndarray:
    """Return a copy with its gates in this order; all but the last gate go through a sigmoid and are halved."""
    num_gates = len(gate_order)
    inputs = parameter.shape[1:]
    by_gate = parameter.reshape(num_gates, -1, *inputs)
    gates = by_gate[gate_order]
    gates[:-1] /= 2
    return gates.reshape(-1, *inputs)
