"""Action distributions: functions of the head alone, in NumPy where actors act and in torch where the trainer learns.

Noise comes from outside, so that an action is a pure function of the head and the noise. Written by hand because
`torch.distributions` costs as much as a small network; tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from dppo.spaces import BoxActions, DiscreteActions

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float, Int64, Shaped
    from torch import Tensor

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


class Evaluation(NamedTuple):
    """Scores of actions under a policy, and the derivative of these scores."""

    logprobs: Float[Tensor, " rows"]
    entropies: Float[Tensor, " rows"]
    gradients: Callable[[Tensor, " Tensor | float"], Tensor]
    """Return the loss's gradient by the head [rows, H], given those by `logprobs` [rows] and by `entropies` ([rows],
    or one number for all rows)."""


class Distribution(Protocol):
    """A family of action distributions; the head [..., H] holds every parameter of one of them.

    A new distribution subclasses this and states its formulas; `evaluate` then differentiates `scores` by autograd.
    """

    @property
    def head_size(self) -> int:
        """Return H, the number of parameters."""

    @property
    def free_size(self) -> int:
        """Return the number of parameters that need not depend on the observation: the last ones of the head."""
        return 0

    @property
    def noise_size(self) -> int:
        """Return the number of random numbers that one action is drawn with."""

    @property
    def action_shape(self) -> tuple[int, ...]:
        """Return the shape of one action: () or (size,)."""

    def action_dtype(self, dtype: str) -> str:
        """Return the dtype of actions of a network of `dtype`."""

    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> Float[np.ndarray, "{steps} {rows} _"]:
        """Draw noise for `sample`: `noise_size` numbers for each row of each step."""

    def sample(
        self, head: Float[np.ndarray, "*rows H"], noise: Float[np.ndarray, "*rows N"]
    ) -> Shaped[np.ndarray, " ..."]:
        """Draw actions [*rows, *A] from heads and noise."""

    def mode(self, head: Float[np.ndarray, "*rows H"]) -> Shaped[np.ndarray, " ..."]:
        """Return the likeliest actions [*rows, *A]."""

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Shaped[np.ndarray, " ..."]
    ) -> Float[np.ndarray, "*rows"]:
        """Return log-probabilities of `actions` [*rows, *A] under the heads that drew them."""

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Shaped[Tensor, " rows *A"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Return log-probabilities and entropies as differentiable functions of `head`."""

    def evaluate(self, head: Float[Tensor, "rows H"], actions: Shaped[Tensor, " rows *A"]) -> Evaluation:
        """Score `actions` under `head`; autograd unless overridden."""
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


def distribution_of(actions: DiscreteActions | BoxActions) -> Distribution:
    """Return the distribution over `actions`."""
    return Categorical(actions.n) if isinstance(actions, DiscreteActions) else DiagonalGaussian(actions.size)


@dataclass(frozen=True, slots=True)
class Categorical(Distribution):
    """One of n choices; the head holds n unnormalised log-probabilities."""

    n: int

    @property
    def head_size(self) -> int:
        return self.n

    @property
    def noise_size(self) -> int:
        return self.n

    @property
    def action_shape(self) -> tuple[int, ...]:
        return ()

    def action_dtype(self, dtype: str) -> str:
        return "int64"

    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> Float[np.ndarray, "{steps} {rows} _"]:
        """Draw Gumbel noise."""
        return generator.gumbel(size=(steps, rows, self.n)).astype(dtype)

    def sample(
        self, head: Float[np.ndarray, "*rows H"], noise: Float[np.ndarray, "*rows N"]
    ) -> Int64[np.ndarray, "*rows"]:
        """Return argmax(logits + gumbel), a draw from softmax(logits).

        Source: Maddison, Tarlow, Minka, "A* sampling" (arXiv:1411.0030), section 2.
        """
        chosen: np.ndarray = (head + noise).argmax(axis=-1)
        return chosen

    def mode(self, head: Float[np.ndarray, "*rows H"]) -> Int64[np.ndarray, "*rows"]:
        likeliest: np.ndarray = head.argmax(axis=-1)
        return likeliest

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Int64[np.ndarray, "*rows"]
    ) -> Float[np.ndarray, "*rows"]:
        """Return log softmax(head)[actions]."""
        shifted = head - head.max(axis=-1, keepdims=True)
        chosen = np.take_along_axis(shifted, actions[..., None], axis=-1)[..., 0]
        result: np.ndarray = chosen - np.log(np.exp(shifted).sum(axis=-1))
        return result

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Int64[Tensor, " rows"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        log_probs = head.log_softmax(dim=1)
        return log_probs.gather(1, actions.unsqueeze(1)).squeeze(1), -(log_probs.exp() * log_probs).sum(dim=1)

    def evaluate(self, head: Float[Tensor, "rows H"], actions: Int64[Tensor, " rows"]) -> Evaluation:
        """Score `actions`; differentiated by hand.

        d log pi(a) / d logits = onehot(a) - p        dH / d logits = -p (log p + H)
        """
        log_probs = head.log_softmax(dim=1)
        probs = log_probs.exp()
        column = actions.unsqueeze(1)
        entropies = -(probs * log_probs).sum(dim=1)

        def gradients(
            by_logprobs: Float[Tensor, " rows"], by_entropies: Float[Tensor, " rows"] | float
        ) -> Float[Tensor, "rows H"]:
            by_head = (
                (log_probs + entropies.unsqueeze(1))
                .mul_(_column(by_entropies))
                .add_(by_logprobs.unsqueeze(1))
                .mul_(probs)
                .neg_()
            )
            return by_head.scatter_add_(1, column, by_logprobs.unsqueeze(1))

        return Evaluation(log_probs.gather(1, column).squeeze(1), entropies, gradients)


@dataclass(frozen=True, slots=True)
class DiagonalGaussian(Distribution):
    """Independent normal variables (detail 25); the head is [mean, log of the standard deviation]."""

    size: int

    @property
    def head_size(self) -> int:
        return 2 * self.size

    @property
    def free_size(self) -> int:
        return self.size

    @property
    def noise_size(self) -> int:
        return self.size

    @property
    def action_shape(self) -> tuple[int, ...]:
        return (self.size,)

    def action_dtype(self, dtype: str) -> str:
        return dtype

    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> Float[np.ndarray, "{steps} {rows} _"]:
        """Draw standard normal noise."""
        return generator.standard_normal((steps, rows, self.size)).astype(dtype)

    def sample(
        self, head: Float[np.ndarray, "*rows H"], noise: Float[np.ndarray, "*rows N"]
    ) -> Float[np.ndarray, "*rows A"]:
        """Return mean + std * noise; not clipped (detail 27)."""
        drawn: np.ndarray = head[..., : self.size] + np.exp(head[..., self.size :]) * noise
        return drawn

    def mode(self, head: Float[np.ndarray, "*rows H"]) -> Float[np.ndarray, "*rows A"]:
        return head[..., : self.size]

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Float[np.ndarray, "*rows A"]
    ) -> Float[np.ndarray, "*rows"]:
        """Return sum(-((a - mean) / std)^2 / 2 - log std - log(2 pi) / 2)."""
        mean, log_std = head[..., : self.size], head[..., self.size :]
        standardised = (actions - mean) / np.exp(log_std)
        result: np.ndarray = (-0.5 * np.square(standardised) - (log_std + HALF_LOG_TWO_PI)).sum(axis=-1)
        return result

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Float[Tensor, "rows A"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        mean, log_std = head[:, : self.size], head[:, self.size :]
        z = (actions - mean) / log_std.exp()
        logprobs = (-0.5 * z.square() - (log_std + HALF_LOG_TWO_PI)).sum(dim=1)
        return logprobs, (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(dim=1)

    def evaluate(self, head: Float[Tensor, "rows H"], actions: Float[Tensor, "rows A"]) -> Evaluation:
        """Score `actions`; differentiated by hand.

        z = (a - mean) / std        d log pi / d mean = z / std        d log pi / d log std = z^2 - 1
        H = sum(log std) + const    dH / d log std = 1
        """
        import torch

        mean, log_std = head[:, : self.size], head[:, self.size :]
        std = log_std.exp()
        z = (actions - mean).div_(std)
        squared = z.square()
        logprobs = squared.mul(-0.5).sub_(log_std + HALF_LOG_TWO_PI).sum(dim=1)
        entropies = (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(dim=1)

        def gradients(
            by_logprobs: Float[Tensor, " rows"], by_entropies: Float[Tensor, " rows"] | float
        ) -> Float[Tensor, "rows H"]:
            weight = by_logprobs.unsqueeze(1)
            by_head = head.new_empty(head.shape)
            torch.mul(weight, z, out=by_head[:, : self.size]).div_(std)
            torch.sub(squared, 1, out=by_head[:, self.size :]).mul_(weight).add_(_column(by_entropies))
            return by_head

        return Evaluation(logprobs, entropies, gradients)


@dataclass(frozen=True, slots=True)
class Joint(Distribution):
    """Independent parts: heads, noise and actions lie side by side, log-probabilities and entropies are added.

    The head is [parameters of each part but the free ones..., free parameters of each part...]. An action is a vector;
    beside real numbers, whole ones are stored as such.
    """

    parts: tuple[Distribution, ...]

    @property
    def head_size(self) -> int:
        return sum(part.head_size for part in self.parts)

    @property
    def free_size(self) -> int:
        return sum(part.free_size for part in self.parts)

    @property
    def noise_size(self) -> int:
        return sum(part.noise_size for part in self.parts)

    @property
    def action_shape(self) -> tuple[int, ...]:
        return (sum(self._widths()),)

    def action_dtype(self, dtype: str) -> str:
        return "int64" if all(part.action_dtype(dtype) == "int64" for part in self.parts) else dtype

    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> Float[np.ndarray, "{steps} {rows} _"]:
        """Draw the noise of one part after the other."""
        return np.concatenate([part.noise(generator, steps, rows, dtype) for part in self.parts], axis=-1)

    def sample(
        self, head: Float[np.ndarray, "*rows H"], noise: Float[np.ndarray, "*rows N"]
    ) -> Shaped[np.ndarray, "*rows A"]:
        noises = _columns(noise, [part.noise_size for part in self.parts])
        drawn = zip(self.parts, self._heads(head, np.concatenate), noises, strict=True)
        return self._side_by_side([part.sample(one, own) for part, one, own in drawn], str(head.dtype))

    def mode(self, head: Float[np.ndarray, "*rows H"]) -> Shaped[np.ndarray, "*rows A"]:
        heads = self._heads(head, np.concatenate)
        return self._side_by_side(
            [part.mode(one) for part, one in zip(self.parts, heads, strict=True)], str(head.dtype)
        )

    def log_prob(
        self, head: Float[np.ndarray, "*rows H"], actions: Shaped[np.ndarray, "*rows A"]
    ) -> Float[np.ndarray, "*rows"]:
        total = np.zeros(head.shape[:-1], head.dtype)
        columns = _columns(actions, self._widths())
        for part, one, own in zip(self.parts, self._heads(head, np.concatenate), columns, strict=True):
            own = own.reshape(*own.shape[:-1], *part.action_shape).astype(
                part.action_dtype(str(head.dtype)), copy=False
            )
            total += part.log_prob(one, own)
        return total

    def scores(
        self, head: Float[Tensor, "rows H"], actions: Shaped[Tensor, "rows A"]
    ) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"]]:
        import torch

        logprobs, entropies = [], []
        columns = _columns(actions, self._widths())
        for part, one, own in zip(self.parts, self._heads(head, torch.cat), columns, strict=True):
            dtype = getattr(torch, part.action_dtype(str(head.dtype).removeprefix("torch.")))
            logprob, entropy = part.scores(one, own.reshape(len(own), *part.action_shape).to(dtype))
            logprobs.append(logprob)
            entropies.append(entropy)
        return torch.stack(logprobs).sum(dim=0), torch.stack(entropies).sum(dim=0)

    def _widths(self) -> list[int]:
        """Return the columns that the action of each part takes."""
        return [math.prod(part.action_shape) for part in self.parts]

    def _heads(self, head: Any, concatenate: Callable[[tuple[Any, ...], int], Any]) -> list[Any]:
        """Return the head of each part, of NumPy arrays or tensors."""
        bound = _columns(head, [part.head_size - part.free_size for part in self.parts])
        free = _columns(head[..., self.head_size - self.free_size :], [part.free_size for part in self.parts])
        return [
            concatenate((one, other), -1) if part.free_size else one
            for part, one, other in zip(self.parts, bound, free, strict=True)
        ]

    def _side_by_side(self, actions: list[np.ndarray], dtype: str) -> Shaped[np.ndarray, "*rows A"]:
        """Return actions [*rows, A] of the parts in one array."""
        columns = zip(actions, self.parts, strict=True)
        flat = [own if part.action_shape else own[..., None] for own, part in columns]
        return np.concatenate(flat, axis=-1, dtype=self.action_dtype(dtype), casting="unsafe")


def _column(by_entropies: Float[Tensor, " rows"] | float) -> Float[Tensor, "rows 1"] | float:
    """Return one number for every row as it is, and one for each row as a column."""
    return by_entropies if isinstance(by_entropies, float | int) else by_entropies.unsqueeze(1)


def _columns(array: Any, sizes: list[int]) -> list[Any]:
    """Cut the last axis into pieces of these sizes, as views."""
    return [array[..., start:end] for start, end in pairwise(accumulate(sizes, initial=0))]
