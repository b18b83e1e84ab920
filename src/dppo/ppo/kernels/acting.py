"""Built-in networks that act in NumPy: two MLPs, or hidden layers with memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from typing_extensions import override

from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.layers import CELL_PARAMETERS
from dppo.ppo.networks.network import ActingNetwork, Outputs


class NumpyMLP(ActingNetwork):
    """An `MLP`, or an `EncoderNetwork` with memory for a single array of numbers, in NumPy.

    For few rows this takes a quarter of torch's time. An actor without torch starts in a fifth of the time and needs a
    third of the memory. Separate trunks are stacked, so that one product computes two layers, and one step two cells.
    """

    def __init__(self, spec: BuiltInSpec, *, estimates_values: bool = True) -> None:
        """Without `estimates_values`, values are zero, and a trunk for them alone is not computed."""
        self._spec = spec
        self._estimates_values = estimates_values or len(spec.layers.trunks) == 1
        self._num_obs_axes = len(spec.spaces.obs.shape)
        self._num_trunks = len(spec.layers.trunks)
        self._is_relu = spec.layers.activation == "relu"

    @override
    def load(self, weights: np.ndarray) -> None:
        parameters = self._spec.unflatten(weights)
        names = self._spec.parameter_names
        trunks = names.hidden if self._estimates_values else names.hidden[:1]

        def stacked(parameter: str) -> np.ndarray:
            """Return a parameter of each trunk: weights [K, inputs, units], biases [K, 1, units]."""
            arrays = [parameters[f"{trunk}.{parameter}"] for trunk in trunks]
            return np.stack([np.atleast_2d(array.T) for array in arrays])

        self._layers = []
        for number in range(len(self._spec.layers.hidden_sizes)):
            weight = stacked(f"{2 * number}.weight")
            bias = stacked(f"{2 * number}.bias")
            self._layers.append((weight, bias))
        self._policy_weight = parameters[f"{names.policy}.weight"].T.copy()
        self._policy_bias = parameters[f"{names.policy}.bias"].copy()
        self._value_weight = parameters[f"{names.value}.weight"][0].copy()
        self._value_bias = parameters[f"{names.value}.bias"].copy()
        self._log_std = parameters["log_std"].copy() if "log_std" in parameters else None
        if names.cells:
            cells = []
            for cell in names.cells:
                cells.append({name: parameters[f"{cell}.{name}"] for name in CELL_PARAMETERS})
            self._cells = NumpyCells(self._spec.layers.memory, cells)

    @override
    def step(self, obs: np.ndarray, state: np.ndarray | None = None) -> Outputs:
        """Return head, values and state [..., E, S] of `obs` [..., E, *O].

        Each group of E rows has a matrix product of its own: larger ones would change the last bits.
        """
        rows = obs.shape[: obs.ndim - self._num_obs_axes]
        # [..., 1, E, inputs], broadcast over the K trunks
        h = obs.reshape(*rows[:-1], 1, rows[-1], -1)
        for weight, bias in self._layers:
            h = h @ weight
            h += bias
            if self._is_relu:
                np.maximum(h, 0, out=h)
            else:
                np.tanh(h, out=h)
        new_state = None
        if state is not None:
            by_trunk = state.reshape(*rows, self._num_trunks, -1).swapaxes(-2, -3)
            h, new_by_trunk = self._cells.step(h, by_trunk)
            new_state = new_by_trunk.swapaxes(-2, -3).reshape(state.shape)
        head = h[..., 0, :, :] @ self._policy_weight
        head += self._policy_bias
        if self._estimates_values:
            values = h[..., -1, :, :] @ self._value_weight
            values += self._value_bias
        else:
            values = np.zeros(head.shape[:-1], head.dtype)
        if self._log_std is None:
            return Outputs(head, values, new_state)
        num_bound = head.shape[-1]
        head_size = num_bound + len(self._log_std)
        whole_head = np.empty((*values.shape, head_size), head.dtype)
        whole_head[..., :num_bound] = head
        whole_head[..., num_bound:] = self._log_std
        return Outputs(whole_head, values, new_state)


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
            return np.stack([np.atleast_2d(array.T) for array in arrays])

        self._by_x = stacked("weight_ih")  # [K, inputs, gates]
        self._by_h = stacked("weight_hh")
        self._bias = stacked("bias_ih")  # [K, 1, gates]
        self._h_bias = stacked("bias_hh")
        self._size = self._by_h.shape[1]
        if kind == "lstm":
            self._bias += self._h_bias
        self.step = self._lstm if kind == "lstm" else self._gru
        """Return outputs [..., K, rows, H] and new states [..., K, rows, S] of inputs [..., K, rows, I] and states."""

    def _lstm(self, inputs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step as `torch.nn.LSTMCell`; the state is h and c side by side."""
        size = self._size
        gates = inputs @ self._by_x
        gates += state[..., :size] @ self._by_h
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
        gates = inputs @ self._by_x
        gates += self._bias
        hidden = state @ self._by_h
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
    by_gate = parameter.reshape(num_gates, -1, *parameter.shape[1:])
    gates = by_gate[gate_order]
    gates[:-1] /= 2
    return gates.reshape(-1, *parameter.shape[1:])
