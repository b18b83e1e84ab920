"""The protocol of action distributions, with a gradient by autograd for those that do not write their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float, Shaped
    from torch import Tensor

IMPOSSIBLE = (
    -1e9
)  # the logit of a choice that must not be taken: its probability is exactly zero, and nothing is infinite


def allowed(head: np.ndarray, masks: np.ndarray) -> np.ndarray:
    """Return logits [..., H] of which those that `masks` [..., H] does not allow are impossible."""
    return np.where(masks, head, head.dtype.type(IMPOSSIBLE))


class Evaluation(NamedTuple):
    """Log-probabilities of actions and entropies of their distributions, with the derivative of both."""

    logprobs: Float[Tensor, " rows"]
    entropies: Float[Tensor, " rows"]
    gradients: Callable[[Tensor, " Tensor | float"], Tensor]
    """Return the gradient of the loss with respect to the head [rows, H], given its gradients with respect to
    `logprobs` [rows] and to `entropies` ([rows], or one number for all rows)."""


class Distribution(Protocol):
    """A family of action distributions, whose parameters the head [..., H] holds.

    A new distribution subclasses this and writes its formulas; `evaluate` then differentiates `scores` with autograd.
    """

    @property
    def head_size(self) -> int:
        """Return H, the number of parameters."""

    @property
    def free_size(self) -> int:
        """Return the number of parameters, last in the head, that need not depend on the observation."""
        return 0

    @property
    def noise_size(self) -> int:
        """Return the number of random numbers needed to sample one action."""

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Return the shape of one action: () or (size,)."""

    def action_dtype(self, dtype: str) -> str:
        """Return the dtype in which actions are stored, for a network of `dtype`."""

    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> Float[np.ndarray, "{steps} {rows} _"]:
        """Draw the noise for `sample`: [steps, rows, `noise_size`]."""

    def sample(
        self, head: Float[np.ndarray, "*rows H"], noise: Float[np.ndarray, "*rows N"]
    ) -> Shaped[np.ndarray, " ..."]:
        """Return actions [*rows, *A] computed from heads and noise."""

    def mode(self, head: Float[np.ndarray, "*rows H"]) -> Shaped[np.ndarray, " ..."]:
        """Return the most likely actions [*rows, *A]."""

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Shaped[np.ndarray, " ..."]
    ) -> Float[np.ndarray, "*rows"]:
        """Return the log-probability of each of `actions` [*rows, *A] under its head."""

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Shaped[Tensor, " rows *A"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Return log-probabilities and entropies, differentiable with respect to `head`."""

    def evaluate(self, head: Float[Tensor, "rows H"], actions: Shaped[Tensor, " rows *A"]) -> Evaluation:
        """Score `actions` under `head`, with a gradient by autograd; override it to write the gradient by hand."""
        import torch

        with torch.enable_grad():
            leaf = head.detach().requires_grad_()
            scores = self.scores(leaf, actions)

        def gradients(
            by_logprobs: Float[Tensor, " rows"], by_entropies: Float[Tensor, " rows"] | float
        ) -> Float[Tensor, "rows H"]:
            if not isinstance(by_entropies, torch.Tensor):
                by_entropies = torch.full_like(scores[1], by_entropies)
            return torch.autograd.grad(scores, leaf, (by_logprobs, by_entropies), retain_graph=True)[0]

        return Evaluation(scores[0].detach(), scores[1].detach(), gradients)


def as_column(by_entropies: Float[Tensor, " rows"] | float) -> Float[Tensor, "rows 1"] | float:
    """Return a number unchanged, and a vector [rows] as a column."""
    return by_entropies if isinstance(by_entropies, float | int) else by_entropies.unsqueeze(1)
