"""TorchActing: any `torch.nn.Module` as an acting network."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.network import Outputs
from dppo.ppo.networks.quick import quick
from dppo.ppo.networks.torch_state import default_dtype, exact_on, matmul_precision
from dppo.spaces.spaces import Spaces


class TorchActing:
    """Act with any module, on one thread, so that sums do not depend on the number of threads.

    A step on a few rows takes less time than torch's context managers. They are entered only if an environment in this
    process has changed the global setting in question, and parameters without gradients make `no_grad` unnecessary.
    """

    def __init__(self, module: nn.Module, spaces: Spaces) -> None:
        self._module = quick(module.requires_grad_(False))
        self._parameters = list(self._module.parameters())
        self._dtype = self._parameters[0].dtype
        self._dims = {name: len(leaf.shape) for name, leaf in spaces.leaves().items()}
        self._inputs: dict[str, Tensor] = {}
        self._rows: dict[str, np.ndarray] = {}
        self._state, self._starts = torch.empty(0), torch.empty(0)

    def load(self, weights: np.ndarray) -> None:
        """Copy `weights` [P]."""
        flat, start = torch.from_numpy(weights.copy()), 0  # a copy, because torch warns about read-only arrays
        for parameter in self._parameters:
            end = start + parameter.numel()
            parameter.copy_(flat[start:end].view_as(parameter))
            start = end

    def step(self, obs: np.ndarray | dict[str, np.ndarray], state: np.ndarray | None = None) -> Outputs:
        """Return head and values of `obs` [..., E, *O]: E rows at a time: larger batches would change the last bits."""
        named = obs if isinstance(obs, dict) else {"": obs}
        for name, leaf in named.items():
            if leaf.ndim > self._dims[name] + 1:
                stacked = [{one: view[s] for one, view in named.items()} for s in range(len(leaf))]
                states = [None] * len(leaf) if state is None else state
                return _stacked([self.step(one, own) for one, own in zip(stacked, states, strict=True)])
            if name not in self._rows or leaf.shape != self._rows[name].shape:
                self._fit(name, leaf.shape)
            np.copyto(self._rows[name], leaf)
        inputs: Any = self._inputs.get("", self._inputs)
        if (
            torch.get_default_dtype() is self._dtype
            and torch.get_num_threads() == 1
            and matmul_precision() == "highest"
        ):
            return self._outputs(inputs, state)
        with default_dtype(self._dtype), exact_on(1):
            return self._outputs(inputs, state)

    def _outputs(self, inputs: Any, state: np.ndarray | None) -> Outputs:
        if state is None:
            head, values = self._module(inputs)
            return Outputs(head.numpy(), values.numpy())
        if self._state.shape != state.shape:
            self._state = torch.empty(state.shape, dtype=self._dtype)
            self._starts = torch.zeros((1, len(state)), dtype=torch.bool)
        np.copyto(self._state.numpy(), state)
        steps = each_leaf(inputs, lambda leaf: leaf[None])
        head, values, after = self._module(steps, self._state, self._starts)
        return Outputs(head[0].numpy(), values[0].numpy(), after.numpy().copy())  # may be a view of our own

    def _fit(self, name: str, shape: tuple[int, ...]) -> None:
        """Take memory for the module's input: torch aligns its own memory alike in every process."""
        self._inputs[name] = torch.empty(shape, dtype=self._dtype)
        self._rows[name] = self._inputs[name].numpy()


def _stacked(outputs: list[Outputs]) -> Outputs:
    states = [one.state for one in outputs if one.state is not None]
    heads, values = (np.stack([getattr(one, name) for one in outputs]) for name in ("head", "values"))
    return Outputs(heads, values, np.stack(states) if states else None)
