"""FlatParameters: all parameters of a network in one vector, and all gradients in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class FlatParameters:
    """Parameters of a module as views of one vector, with their gradients as views of another.

    For any network, the norm of the gradient, its clipping, the optimiser's step, a snapshot, and the sum over learners
    are then one operation each, on one tensor.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], zeros_like: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Move `parameters` into one vector.

        Args:
            parameters: all of the module's, in the order of the vector.
            zeros_like: allocates the vector of gradients; None means `torch.zeros_like`.
        """
        parameters = list(parameters)
        self.weights = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
        self.gradient = (zeros_like or torch.zeros_like)(self.weights.detach())
        self.weights.grad = self.gradient
        start = 0
        for parameter in parameters:
            end = start + parameter.numel()
            parameter.data = self.weights.data[start:end].view_as(parameter)
            parameter.grad = self.gradient[start:end].view_as(parameter)
            start = end
