"""The seam of action distributions; and several independent ones side by side."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

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

    @property
    def choice_columns(self) -> tuple[int, ...]:
        """Return the columns of the head that are logits of choices, in their order: those that masks are for."""
        return ()

    @cached_property
    def _mask_columns(self) -> np.ndarray | None:
        """Return the column of a mask for each column of the head: the one behind the last for those without a choice.

        None if both have the same columns.
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
            always = np.ones((*masks.shape[:-1], 1), bool)
            masks = np.concatenate([masks, always], axis=-1)[..., self._mask_columns]
        return allowed(head, masks)

    def limited_in_torch(self, head: TorchHead, masks: Tensor) -> TorchHead:
        """Return heads [rows, H] as `limited` does; the gradient of an impossible logit is zero."""
        import torch

        if self._mask_columns is not None:
            always = torch.ones_like(masks[:, :1])
            columns = torch.as_tensor(self._mask_columns, device=masks.device)
            masks = torch.cat([masks, always], dim=1).index_select(1, columns)
        return torch.where(masks, head, IMPOSSIBLE)

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


class Joint(Distribution):
    """Independent parts: heads, noise and actions are concatenated, log-probabilities and entropies added.

    The head is [all but the free parameters of each part..., free parameters of each part...]. An action is a vector;
    integer actions are stored as floats if another part is real-valued.
    """

    def __init__(self, parts: tuple[Distribution, ...]) -> None:
        self.parts = parts
        self._widths = [math.prod(part.action_shape) for part in parts]  # columns of each part's action
        super().__init__(
            head_size=sum(part.head_size for part in parts),
            noise_size=sum(part.noise_size for part in parts),
            action_shape=(sum(self._widths),),
            integer=all(part.integer for part in parts),
            free_size=sum(part.free_size for part in parts),
        )

    @property
    @override
    def choice_columns(self) -> tuple[int, ...]:
        widths = [part.head_size - part.free_size for part in self.parts]  # free parameters are behind all of these
        starts = accumulate(widths[:-1], initial=0)
        return tuple(
            start + column for start, part in zip(starts, self.parts, strict=True) for column in part.choice_columns
        )

    @override
    def noise(self, generator: np.random.Generator, steps: int, rows: int, dtype: str) -> Drawn:
        return np.concatenate([part.noise(generator, steps, rows, dtype) for part in self.parts], axis=-1)

    @override
    def sample(self, head: Head, noise: Noise) -> Shaped[np.ndarray, "*rows A"]:
        noises = _columns(noise, [part.noise_size for part in self.parts])
        drawn = zip(self.parts, self.heads(head, np.concatenate), noises, strict=True)
        return self._side_by_side([part.sample(one, own) for part, one, own in drawn], str(head.dtype))

    @override
    def mode(self, head: Head) -> Shaped[np.ndarray, "*rows A"]:
        heads = zip(self.parts, self.heads(head, np.concatenate), strict=True)
        return self._side_by_side([part.mode(one) for part, one in heads], str(head.dtype))

    @override
    def log_prob(self, head: Head, actions: Shaped[np.ndarray, "*rows A"]) -> Numbers:
        total = np.zeros(head.shape[:-1], head.dtype)
        columns = _columns(actions, self._widths)
        for part, one, own in zip(self.parts, self.heads(head, np.concatenate), columns, strict=True):
            shaped = own.reshape(*own.shape[:-1], *part.action_shape)
            total += part.log_prob(one, shaped.astype(part.action_dtype(str(head.dtype)), copy=False))
        return total

    @override
    def scores(self, head: TorchHead, actions: Shaped[Tensor, "rows A"]) -> Scores:
        import torch

        logprobs, entropies = [], []
        columns = _columns(actions, self._widths)
        for part, one, own in zip(self.parts, self.heads(head, torch.cat), columns, strict=True):
            dtype = getattr(torch, part.action_dtype(str(head.dtype).removeprefix("torch.")))
            logprob, entropy = part.scores(one, own.reshape(len(own), *part.action_shape).to(dtype))
            logprobs.append(logprob)
            entropies.append(entropy)
        return torch.stack(logprobs).sum(dim=0), torch.stack(entropies).sum(dim=0)

    def heads(self, head: Any, concatenate: Callable[[tuple[Any, ...], int], Any]) -> list[Any]:
        """Split heads [..., H] into those of the parts; `concatenate` joins arrays or tensors along an axis."""
        bound = _columns(head, [part.head_size - part.free_size for part in self.parts])
        free = _columns(head[..., self.head_size - self.free_size :], [part.free_size for part in self.parts])
        return [
            concatenate((one, other), -1) if part.free_size else one
            for part, one, other in zip(self.parts, bound, free, strict=True)
        ]

    def _side_by_side(self, actions: list[np.ndarray], dtype: str) -> Shaped[np.ndarray, "*rows A"]:
        flat = [own if part.action_shape else own[..., None] for own, part in zip(actions, self.parts, strict=True)]
        return np.concatenate(flat, axis=-1, dtype=self.action_dtype(dtype), casting="unsafe")


def _columns(array: Any, sizes: list[int]) -> list[Any]:
    return [array[..., start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
