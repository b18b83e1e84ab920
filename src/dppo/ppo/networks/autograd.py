"""Autograd: any `torch.nn.Module` as a learning network."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.networks.flat import FlatParameters
from dppo.ppo.networks.recurrent_inputs import RecurrentInputs
from dppo.ppo.networks.torch_state import default_dtype

Inputs = Tensor | dict[str, Tensor]


class Autograd:
    """Train any module: the gradient of the parameters is one vector-Jacobian product by autograd."""

    def __init__(
        self,
        module: nn.Module,
        parameters: Iterable[nn.Parameter],
        zeros_like: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Move the parameters of `module` into one vector.

        Args:
            parameters: all of the module's, in the order of the vector.
            zeros_like: allocates the vector of gradients; None means `torch.zeros_like`.
        """
        self.parameters = FlatParameters(parameters, zeros_like)
        self._module = module
        self._dtype = self.parameters.weights.dtype
        self._reads_bytes = getattr(module, "reads_bytes", False)
        self._lower: torch.dtype | None = None

    def compute_in(self, lower: torch.dtype) -> None:
        """Run the layers in the precision `lower` from now on; weights and outputs keep theirs."""
        self._lower = lower

    def forward(
        self, obs: Inputs, recurrent: RecurrentInputs | None = None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """Return head [rows, H] and values [rows], detached, and both with their graph."""
        with torch.enable_grad(), default_dtype(self._dtype):
            if self._lower is None:
                head, values = self._outputs(obs, recurrent)
            else:
                with torch.autocast(self.parameters.weights.device.type, self._lower):
                    head, values = self._outputs(obs, recurrent)
                head, values = head.to(self._dtype), values.to(self._dtype)
        return head.detach(), values.detach(), (head, values)

    def _outputs(self, obs: Inputs, recurrent: RecurrentInputs | None) -> tuple[Tensor, Tensor]:
        inputs = each_leaf(obs, self._input)
        if recurrent is not None:
            return recurrent.outputs(self._module, inputs)
        head, values = self._module(inputs)
        return head, values

    def _input(self, leaf: Tensor) -> Tensor:
        is_image = leaf.element_size() == 1 and leaf.dim() > 3
        return leaf if is_image and self._reads_bytes else leaf.to(self._dtype)

    def backward(
        self, residuals: tuple[Tensor, Tensor], by_head: Tensor, by_values: Tensor, *, accumulate: bool
    ) -> None:
        """Compute the gradient with autograd, which adds to the views that the module's parameters hold."""
        if not accumulate:
            self.parameters.gradient.zero_()
        with default_dtype(self._dtype):
            torch.autograd.backward(residuals, (by_head, by_values))
