"""The built-in networks as plain data; and those that act in NumPy: two MLPs, or hidden layers with memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.simple import distribution_of
from dppo.ppo.networks.layers import Layers
from dppo.ppo.networks.network import ActingNetwork, NetworkSpec, Outputs
from dppo.spaces.spaces import Spaces

if TYPE_CHECKING:
    from torch import nn

GATES = {"gru": 3, "lstm": 4}
PARAMETERS = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")  # of a cell


@dataclass(frozen=True)
class BuiltInSpec(NetworkSpec):
    """Two MLPs for a single array of numbers, one for the policy and one for the value (details 13 and 26).

    `EncoderNetwork` for other observations, and where the layers are shared, are normalized or have memory. The free
    part of the head, `log_std` of a Gaussian, is one parameter vector for all observations.
    """

    spaces: Spaces = field(compare=False, repr=False)
    layers: Layers
    dtype: str

    @property
    @override
    def state_size(self) -> int:
        return self.layers.state_size

    @cached_property
    @override
    def distribution(self) -> Distribution:
        return distribution_of(self.spaces.actions, state_dependent_std=self.layers.state_dependent_std)

    @cached_property
    def acts_in_numpy(self) -> bool:
        """Return whether an actor needs no torch: for two MLPs, or a memory behind plain layers that read numbers."""
        of = self.layers
        return self.spaces.is_vector and not of.layer_norm and (of.memory != "none" or not of.shared)

    @property
    def is_mlp(self) -> bool:
        """Return whether it is two MLPs, whose gradient is written by hand."""
        return self.acts_in_numpy and self.layers.memory == "none"

    @override
    def module(self, seed: int) -> nn.Module:
        from dppo.ppo.networks.parameters import drawn

        return drawn(self._made, seed, self.dtype)

    def _made(self) -> nn.Module:
        from dppo.ppo.networks.encoders import EncoderNetwork

        return EncoderNetwork(self.spaces, self.distribution.head_size, **asdict(self.layers))

    @cached_property
    @override
    def shapes(self) -> dict[str, tuple[int, ...]]:
        if not self.acts_in_numpy:
            import torch

            from dppo.ppo.networks.parameters import shapes_of

            with torch.device("meta"):  # allocates nothing: the layers may be too large
                return shapes_of(self._made())
        layers, free = self.layers, self.distribution.free_size
        sizes = (math.prod(self.spaces.obs.shape), *layers.hidden_sizes)
        last = {"policy": self.distribution.head_size - free, "value": 1}
        log_std: dict[str, tuple[int, ...]] = {"log_std": (free,)} if free else {}
        if self.is_mlp:
            of_policy, of_value = (_linear(name, (*sizes, outputs)) for name, outputs in last.items())
            return of_policy | of_value | log_std
        units, gates, shapes = layers.memory_size, GATES[layers.memory] * layers.memory_size, log_std
        for trunk in layers.trunks:
            shapes |= _linear(f"{trunk}body.hidden", sizes)
        for trunk in layers.trunks:
            shapes |= {f"{trunk}memory.weight_ih": (gates, sizes[-1]), f"{trunk}memory.weight_hh": (gates, units)}
            shapes |= {f"{trunk}memory.{name}": (gates,) for name in ("bias_ih", "bias_hh")}
        for name, outputs in last.items():
            shapes |= {f"{name}.weight": (outputs, units), f"{name}.bias": (outputs,)}
        return shapes

    @override
    def as_json(self) -> dict[str, Any]:
        of = self.layers
        if not self.is_mlp:
            return {"layers": asdict(of), "dtype": self.dtype}
        described = {"hidden_sizes": list(of.hidden_sizes), "activation": of.activation, "dtype": self.dtype}
        return described | {"state_dependent_std": True} if of.state_dependent_std else described


def _linear(name: str, sizes: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of linear layers, numbered as torch does: the activations between them count, too."""
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        shapes |= {f"{name}.{2 * layer}.weight": (outputs, inputs), f"{name}.{2 * layer}.bias": (outputs,)}
    return shapes


class NumpyMLP(ActingNetwork):
    """Two MLPs, or `EncoderNetwork` with memory for a single array of numbers, in NumPy.

    For few rows this takes a quarter of torch's time. An actor without torch starts in a fifth of the time and needs a
    third of the memory. Separate trunks are stacked, so that one product computes two layers, and one step two cells.
    """

    def __init__(self, spec: BuiltInSpec) -> None:
        self._spec, self._dims = spec, len(spec.spaces.obs.shape)
        self._relu = spec.layers.activation == "relu"

    @override
    def load(self, weights: np.ndarray) -> None:
        named, layers, mlp = self._spec.unflatten(weights), self._spec.layers, self._spec.is_mlp
        hidden = ["policy", "value"] if mlp else [f"{trunk}body.hidden" for trunk in layers.trunks]
        end = 2 * len(layers.hidden_sizes)
        policy, value = (f"policy.{end}", f"value.{end}") if mlp else ("policy", "value")

        def stacked(name: str) -> np.ndarray:
            return np.stack([np.atleast_2d(named[f"{trunk}.{name}"].T) for trunk in hidden])

        numbers = range(0, end, 2)  # weights [K, inputs, units], biases [K, 1, units]
        self._layers = [(stacked(f"{number}.weight"), stacked(f"{number}.bias")) for number in numbers]
        self._policy = named[f"{policy}.weight"].T.copy(), named[f"{policy}.bias"].copy()
        self._value = named[f"{value}.weight"][0].copy(), named[f"{value}.bias"].copy()
        self._log_std = named["log_std"].copy() if "log_std" in named else None
        if layers.memory != "none":
            cells = [{name: named[f"{trunk}memory.{name}"] for name in PARAMETERS} for trunk in layers.trunks]
            self._cells = NumpyCells(layers.memory, cells)

    @override
    def step(self, obs: np.ndarray, state: np.ndarray | None = None) -> Outputs:
        """Return head, values and state [..., E, S] of `obs` [..., E, *O].

        Each group of E rows has a matrix product of its own: larger ones would change the last bits.
        """
        rows, after = obs.shape[: obs.ndim - self._dims], None
        h = obs.reshape(*rows[:-1], 1, rows[-1], -1)  # [..., 1, E, inputs], broadcast over the K trunks
        for weight, bias in self._layers:
            h = h @ weight
            h += bias
            h = np.maximum(h, 0, out=h) if self._relu else np.tanh(h, out=h)
        if state is not None:
            before = state.reshape(*rows, len(self._spec.layers.trunks), -1).swapaxes(-2, -3)
            h, after = self._cells.step(h, before)
            after = after.swapaxes(-2, -3).reshape(state.shape)
        of_policy, of_value = (h[0], h[-1]) if h.ndim == 3 else (h[..., 0, :, :], h[..., -1, :, :])
        head = of_policy @ self._policy[0]
        head += self._policy[1]
        values = of_value @ self._value[0]
        values += self._value[1]
        if self._log_std is None:
            return Outputs(head, values, after)
        whole = np.empty((*values.shape, head.shape[-1] + len(self._log_std)), head.dtype)
        whole[..., : head.shape[-1]] = head
        whole[..., head.shape[-1] :] = self._log_std
        return Outputs(whole, values, after)


class NumpyCells:
    """K cells side by side, each with its own inputs and weights.

    Each group of rows has a matrix product of its own, so that leading axes do not change a single bit. As sigmoid(x) =
    tanh(x / 2) / 2 + 1 / 2, one tanh serves all gates: those of a sigmoid come first and have halved weights.
    """

    def __init__(self, kind: str, parameters: Sequence[Mapping[str, np.ndarray]]) -> None:
        """Copy the parameters of each cell, a gru or an lstm, which are given by torch's names."""
        gates = [0, 1, 3, 2] if kind == "lstm" else [0, 1, 2]  # by their numbers in torch: i, f, o, g; or r, z, n

        def ordered(found: np.ndarray) -> np.ndarray:
            found = found.reshape(len(gates), -1, *found.shape[1:])[gates]
            found[:-1] /= 2  # all but the last go through a sigmoid
            return found.reshape(-1, *found.shape[2:])

        self._by_x, self._by_h, self._bias, self._h_bias = (  # [K, inputs, gates], for biases [K, 1, gates]
            np.stack([np.atleast_2d(ordered(one[name]).T) for one in parameters]) for name in PARAMETERS
        )
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
        after = np.empty((*gates.shape[:-1], 2 * size), gates.dtype)
        h, c = after[..., :size], after[..., size:]
        np.multiply(gates[..., size : 2 * size], state[..., size:], out=c)
        c += gates[..., :size] * gates[..., 3 * size :]
        np.multiply(gates[..., 2 * size : 3 * size], np.tanh(c), out=h)
        return h, after

    def _gru(self, inputs: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Step as `torch.nn.GRUCell`; the state is h."""
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
