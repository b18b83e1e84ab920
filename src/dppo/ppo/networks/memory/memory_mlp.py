"""The network with memory for a single array of numbers, in NumPy for actors."""

from __future__ import annotations

import numpy as np

from dppo.ppo.networks.default.mlp_numpy import LastLayers, StackedLayers
from dppo.ppo.networks.encoders.encoder_spec import EncoderSpec
from dppo.ppo.networks.memory.cells import numpy_cells
from dppo.ppo.networks.network import Outputs


class NumpyMemoryMLP:
    """`EncoderNetwork` in NumPy, for the reasons of `NumpyMLP`.

    Separate trunks are stacked, so that one product computes two layers, and one step two cells. Each group of E rows
    has a product of its own.
    """

    def __init__(self, spec: EncoderSpec) -> None:
        """Build it for a spec that `acts_in_numpy`."""
        self._spec = spec
        self._dims = len(spec.obs_shape)

    def load(self, weights: np.ndarray) -> None:
        """Copy `weights` [P]."""
        named, layers = self._spec.unflatten(weights), self._spec.layers
        prefixes = [f"{trunk}body.hidden." for trunk in layers.trunks]
        self._hidden = StackedLayers(named, prefixes, len(layers.hidden_sizes), layers.activation == "relu")
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        cells = [{name: named[f"{trunk}memory.{name}"] for name in names} for trunk in layers.trunks]
        self._cells = numpy_cells(layers.memory, cells)
        self._outputs = LastLayers(named, "policy", "value")

    def step(self, obs: np.ndarray, state: np.ndarray | None = None) -> Outputs:
        """Return head, values and state [..., E, S] of `obs` [..., E, *O] and the `state` before."""
        assert state is not None, "a network with memory needs its state"
        rows = obs.shape[: obs.ndim - self._dims]
        before = state.reshape(*rows, len(self._spec.layers.trunks), -1).swapaxes(-2, -3)
        h, after = self._cells.step(self._hidden.outputs(obs, rows), before)
        return Outputs(*self._outputs.of(h), after.swapaxes(-2, -3).reshape(state.shape))
