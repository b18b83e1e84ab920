"""The seam of action distributions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float, Shaped
    from torch import Tensor

    Head = Float[np.ndarray, "*rows H"]
    Noise = Float[np.ndarray, "*rows N"]
    Drawn = Float[np.ndarray, "{steps} {rows} _"]
    Numbers = Float[np.ndarray, "*rows"]
    TorchHead = Float[Tensor, "rows H"]
    Scores = tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]

IMPOSSIBLE = -1e9  # logit of a choice that is not allowed: its probability is exactly zero, and nothing is infinite


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


class Distribution(ABC):
    """A family of action distributions, whose parameters the head [..., H] holds.

    A new distribution subclasses this and writes its formulas.
    """

    def __init__(
        self, *, head_size: int, noise_size: int, action_shape: tuple[int, ...], integer: bool, free_size: int = 0
    ) -> None:
        """Set the sizes.

        Args:
            head_size: H, the number of parameters.
            noise_size: the number of random numbers needed to sample one action.
            action_shape: of one action: () or (size,).
            integer: actions are integers.
            free_size: the number of parameters, last in the head, that need not depend on the observation.
        """
        self.head_size, self.noise_size, self.free_size = head_size, noise_size, free_size
        self.action_shape, self.integer = action_shape, integer

    def action_dtype(self, dtype: str) -> str:
        """Return the dtype in which actions are stored, for a network of `dtype`."""
        return "int64" if self.integer else dtype

    @abstractmethod
    def noise(self, generator: np.random.Generator, steps: int, rows: int, dtype: str) -> Drawn:
        """Draw the noise for `sample`: [steps, rows, `noise_size`]."""

    @abstractmethod
    def sample(self, head: Head, noise: Noise) -> Shaped[np.ndarray, " ..."]:
        """Return actions [*rows, *A] computed from heads and noise."""

    @abstractmethod
    def mode(self, head: Head) -> Shaped[np.ndarray, " ..."]:
        """Return the most likely actions [*rows, *A]."""

    @abstractmethod
    def log_prob(self, head: Head, actions: Shaped[np.ndarray, " ..."]) -> Numbers:
        """Return the log-probability of each of `actions` [*rows, *A] under its head."""

    @abstractmethod
    def scores(self, head: TorchHead, actions: Shaped[Tensor, " rows *A"]) -> Scores:
        """Return log-probabilities and entropies, differentiable with respect to `head`."""

    def evaluate(self, head: TorchHead, actions: Shaped[Tensor, " rows *A"]) -> Evaluation:
        """Return the `scores` of `actions` with their gradient: by autograd, unless a subclass writes it by hand."""
        import torch

        with torch.enable_grad():
            leaf = head.detach().requires_grad_()
            scores = self.scores(leaf, actions)

        def gradients(by_logprobs: Float[Tensor, " rows"], by_entropies: Float[Tensor, " rows"] | float) -> TorchHead:
            if not isinstance(by_entropies, torch.Tensor):
                by_entropies = torch.full_like(scores[1], by_entropies)
            return torch.autograd.grad(scores, leaf, (by_logprobs, by_entropies), retain_graph=True)[0]

        return Evaluation(scores[0].detach(), scores[1].detach(), gradients)


def as_column(by_entropies: Float[Tensor, " rows"] | float) -> Float[Tensor, "rows 1"] | float:
    """Return a number unchanged, and a vector [rows] as a column."""
    return by_entropies if isinstance(by_entropies, float | int) else by_entropies.unsqueeze(1)
