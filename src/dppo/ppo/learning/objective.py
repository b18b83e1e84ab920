"""The seam of losses: another loss is one class like `ClippedLoss`, and its name in `LOSSES`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from dppo.config.parts.ppo import LOSSES, ResolvedPPO
from dppo.ppo.learning.batch import Batch

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float

# a ratio of 5e8 is clipped as any other, and products and squares of it stay finite
MAX_LOG_RATIO = 20.0


class Outputs(NamedTuple):
    """The outputs of the network for the rows of a batch."""

    log_ratio: Float[Tensor, " rows"]
    """New minus old log-probability, at most 20; zero for rows that are not transitions."""
    entropies: Float[Tensor, " rows"]
    """Entropies of the action distributions."""
    values: Float[Tensor, " rows"]


class Gradients(NamedTuple):
    """The gradients of a loss with respect to `Outputs`."""

    log_ratio: Float[Tensor, " rows"]
    entropies: Float[Tensor, " rows"] | float
    """A single number if the gradient is the same for all rows."""
    values: Float[Tensor, " rows"]


class Objective(Protocol):
    """A loss to minimize, made from the settings of an update."""

    def loss(self, outputs: Outputs, batch: Batch) -> tuple[Gradients, dict[str, Tensor]]:
        """Return the gradients of the loss, times `batch.share`, and its parts, for the metrics.

        Means are over transitions: `weighted_mean(..., batch.weights)`. Called with autograd turned off.
        """


def objective_class(name: str) -> Callable[[ResolvedPPO], Objective]:
    module, _, attribute = LOSSES[name].partition(":")
    loss: Callable[[ResolvedPPO], Objective] = getattr(import_module(module), attribute)
    return loss


def differentiable(outputs: Outputs) -> Outputs:
    return Outputs(*(output.detach().requires_grad_() for output in outputs))


def gradients_by_autograd(loss: Float[Tensor, ""], outputs: Outputs, batch: Batch) -> Gradients:
    """Return the gradients of `loss`, which was computed from `differentiable` outputs."""
    return Gradients(*torch.autograd.grad(loss, outputs, torch.full_like(loss, batch.share)))
