"""All parameters of a network in one vector, and all gradients in another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class FlatParameters:
    """The parameters of a module, which become views of one vector, and their gradients, views of another.

    The gradient's norm, its clipping, the optimiser's step, a snapshot, and the sum over several learners are then each
    one operation on one tensor, whatever the network.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], zeros_like: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Args:
        parameters: all of them, in the order in which they are to lie in the vector.
        zeros_like: makes the vector of gradients; `torch.zeros_like` where None.
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
