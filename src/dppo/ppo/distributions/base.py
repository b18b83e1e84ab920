"""The seam of action distributions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float, Shaped
    from torch import Tensor

    Head = Float[np.ndarray, "*rows H"]
    Noise = Float[np.ndarray, "*rows N"]
    DrawnNoise = Float[np.ndarray, "{steps} {rows} _"]
    LogProbs = Float[np.ndarray, "*rows"]
    TorchHead = Float[Tensor, "rows H"]
    Scores = tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]

# logit of a choice that is not allowed: its probability is exactly zero, and nothing is infinite
IMPOSSIBLE = -1e9
OTHER_CHOICE = 0.1  # probability of all other choices together, around one choice
HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class ScoresWithGradient(NamedTuple):
    """Log-probabilities of actions and entropies of their distributions, with the derivative of both."""

    logprobs: Float[Tensor, " rows"]
    entropies: Float[Tensor, " rows"]
    gradient: Callable[[Tensor, " Tensor | float"], Tensor]
    """Return the gradient of the loss with respect to the head [rows, H], given its gradients with respect to
    `logprobs` [rows] and to `entropies` ([rows], or one number for all rows)."""


class Distribution(ABC):
    """A family of action distributions, whose parameters the head [..., H] holds.

    A new distribution subclasses this and writes its formulas.
    """

    def __init__(
        self,
        *,
        head_size: int,
        noise_size: int,
        action_shape: tuple[int, ...],
        integer: bool,
        free_size: int = 0,
    ) -> None:
        """Set the sizes.

        Args:
            head_size: H, the number of parameters.
            noise_size: the number of random numbers needed to sample one action.
            action_shape: shape of one action: () or (size,).
            integer: actions are integers.
            free_size: the number of parameters, last in the head, that need not depend on the observation.
        """
        self.head_size = head_size
        self.noise_size = noise_size
        self.free_size = free_size
        self.action_shape = action_shape
        self.integer = integer

    @property
    def choice_columns(self) -> tuple[int, ...]:
        """Columns of the head that are logits of choices, in the order in which masks list the choices."""
        return ()

    @cached_property
    def _mask_columns(self) -> np.ndarray | None:
        """Column of a mask for each column of the head; a parameter without a choice has the one behind the last.

        None if head and mask have the same columns.
        """
        choices = list(self.choice_columns)
        if choices == list(range(self.head_size)):
            return None
        columns = np.full(self.head_size, len(choices))
        columns[choices] = np.arange(len(choices))
        return columns

    def limited(self, head: Head, masks: np.ndarray) -> Head:
        """Return heads [..., H] in which choices that `masks` [..., M] does not allow are impossible."""
        if self._mask_columns is not None:
            always_allowed = np.ones((*masks.shape[:-1], 1), bool)
            masks = np.concatenate([masks, always_allowed], axis=-1)[..., self._mask_columns]
        return np.where(masks, head, head.dtype.type(IMPOSSIBLE))

    def limited_in_torch(self, head: TorchHead, masks: Tensor) -> TorchHead:
        """Return heads [rows, H] as `limited` does; the gradient of an impossible logit is zero."""
        import torch

        if self._mask_columns is not None:
            always_allowed = torch.ones_like(masks[:, :1])
            columns = torch.as_tensor(self._mask_columns, device=masks.device)
            masks = torch.cat([masks, always_allowed], dim=1).index_select(1, columns)
        return torch.where(masks, head, IMPOSSIBLE)

    def action_dtype(self, dtype: str) -> str:
        """Return the dtype in which actions are stored, for a network of `dtype`."""
        return "int64" if self.integer else dtype

    @abstractmethod
    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> DrawnNoise:
        """Draw the noise for `sample`: [steps, rows, `noise_size`]."""

    @abstractmethod
    def sample(self, head: Head, noise: Noise) -> Shaped[np.ndarray, " ..."]:
        """Compute actions [*rows, *A] from heads and noise."""

    @abstractmethod
    def mode(self, head: Head) -> Shaped[np.ndarray, " ..."]:
        """Choose the most likely actions [*rows, *A]."""

    @abstractmethod
    def log_prob(self, head: Head, actions: Shaped[np.ndarray, " ..."]) -> LogProbs:
        """Return the log-probability of each of `actions` [*rows, *A] under its head."""

    @abstractmethod
    def head_at(self, actions: Shaped[np.ndarray, " ..."], log_std: np.ndarray) -> Head:
        """Return heads [*rows, H] whose most likely actions are `actions` [*rows, *A].

        Args:
            actions: in the dtype of `log_std` if they are not integers.
            log_std: [width], log standard deviations of continuous elements; choices are uncertain by `OTHER_CHOICE`.
        """

    @abstractmethod
    def targets(
        self, head: Head, sampled: Shaped[np.ndarray, " ..."]
    ) -> tuple[Shaped[np.ndarray, " ..."], Shaped[np.ndarray, " ..."]]:
        """Return two actions for each head [*rows, H], to clone the distribution by maximum likelihood.

        The mean log-likelihood of mean + deviation and mean - deviation of a normal variable is, up to a constant,
        minus the KL divergence from it. Of choices: the most likely ones, and those `sampled` [*rows, *A].
        """

    @abstractmethod
    def scores(self, head: TorchHead, actions: Shaped[Tensor, " rows *A"]) -> Scores:
        """Return log-probabilities and entropies, differentiable with respect to `head`."""

    def scores_with_gradient(
        self, head: TorchHead, actions: Shaped[Tensor, " rows *A"]
    ) -> ScoresWithGradient:
        """Return `scores` with their gradient: by autograd, unless a subclass has one from `kernels.scores`."""
        import torch

        with torch.enable_grad():
            leaf = head.detach().requires_grad_()
            logprobs, entropies = self.scores(leaf, actions)

        def gradient(grad_logprobs: Tensor, grad_entropies: Tensor | float) -> Tensor:
            if not isinstance(grad_entropies, torch.Tensor):
                grad_entropies = torch.full_like(entropies, grad_entropies)
            grad_scores = (grad_logprobs, grad_entropies)
            scores = (logprobs, entropies)
            (grad_head,) = torch.autograd.grad(scores, leaf, grad_scores, retain_graph=True)
            return grad_head

        return ScoresWithGradient(logprobs.detach(), entropies.detach(), gradient)
