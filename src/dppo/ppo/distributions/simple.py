"""Distributions of each kind of action: choices, and continuous variables as drawn or squashed into bounds."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from dppo.ppo.distributions.base import (
    HALF_LOG_TWO_PI,
    IMPOSSIBLE,
    OTHER_CHOICE,
    Distribution,
    ScoresWithGradient,
)
from dppo.ppo.distributions.joint import Joint
from dppo.spaces.actions import (
    Actions,
    BoxActions,
    DiscreteActions,
    MultiDiscreteActions,
    NestedActions,
)

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Float, Int64
    from torch import Tensor

    from dppo.ppo.distributions.base import DrawnNoise, Head, LogProbs, Noise, Scores, TorchHead

NUM_NODES = 32
"""Nodes of the quadrature: its error is below 0.005 up to a standard deviation of 3."""


def distribution_of(actions: Actions, *, state_dependent_std: bool = False) -> Distribution:
    """Return the distribution over `actions`; the std of continuous actions may depend on the state."""
    if isinstance(actions, DiscreteActions):
        return Categorical(actions.n)
    if isinstance(actions, MultiDiscreteActions):
        return MultiCategorical(actions.counts)
    if isinstance(actions, BoxActions):
        if actions.bounds == "squash":
            return SquashedGaussian(actions.width, state_dependent_std)
        return DiagonalGaussian(actions.width, state_dependent_std)
    assert isinstance(actions, NestedActions)
    return Joint(
        tuple(
            distribution_of(part, state_dependent_std=state_dependent_std) for part in actions.parts
        )
    )


class _Choices(Distribution):
    """Draw choices by the Gumbel-max trick. The head holds their logits and nothing else."""

    @property
    @override
    def choice_columns(self) -> tuple[int, ...]:
        return tuple(range(self.head_size))

    @override
    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> DrawnNoise:
        return generator.gumbel(size=(steps, rows, self.noise_size)).astype(dtype)

    @override
    def sample(self, head: Head, noise: Noise) -> Int64[np.ndarray, " ..."]:
        """Return argmax(logits + gumbel), which is a sample from softmax(logits).

        Source: Maddison, Tarlow, Minka, "A* sampling" (arXiv:1411.0030), section 2.
        """
        return self.mode(head + noise)

    @override
    def targets(
        self, head: Head, sampled: Int64[np.ndarray, " ..."]
    ) -> tuple[Int64[np.ndarray, " ..."], Int64[np.ndarray, " ..."]]:
        return self.mode(head), sampled


class Categorical(_Choices):
    """One of n choices; the head holds n logits (unnormalized log-probabilities)."""

    def __init__(self, n: int) -> None:
        super().__init__(head_size=n, noise_size=n, action_shape=(), integer=True)

    @override
    def head_at(self, actions: Int64[np.ndarray, "*rows"], log_std: np.ndarray) -> Head:
        return _logits_at(actions, self.head_size).astype(log_std.dtype)

    @override
    def mode(self, head: Head) -> Int64[np.ndarray, "*rows"]:
        return head.argmax(axis=-1)

    @override
    def log_prob(self, head: Head, actions: Int64[np.ndarray, "*rows"]) -> LogProbs:
        return _log_softmax(head, actions)

    @override
    def scores(self, head: TorchHead, actions: Int64[Tensor, " rows"]) -> Scores:
        log_probs = head.log_softmax(dim=1)
        action_log_probs = log_probs.gather(1, actions.unsqueeze(1)).squeeze(1)
        entropies = -(log_probs.exp() * log_probs).sum(dim=1)
        return action_log_probs, entropies

    @override
    def scores_with_gradient(
        self, head: TorchHead, actions: Int64[Tensor, " rows"]
    ) -> ScoresWithGradient:
        from dppo.ppo.kernels.scores import categorical_scores

        return categorical_scores(head, actions)


class MultiCategorical(_Choices):
    """k independent choices; the head holds the logits of the first, of the second, and so on.

    All choices are computed at once, as rows of a table [k, widest], in which missing choices have impossible logits.
    """

    def __init__(self, counts: tuple[int, ...]) -> None:
        size = sum(counts)
        super().__init__(head_size=size, noise_size=size, action_shape=(len(counts),), integer=True)
        self.counts = counts
        self._widest = max(counts)
        self._is_choice = np.arange(self._widest) < np.array(counts)[:, None]  # [k, widest]

    @override
    def head_at(self, actions: Int64[np.ndarray, "*rows K"], log_std: np.ndarray) -> Head:
        columns = [
            _logits_at(actions[..., index], count) for index, count in enumerate(self.counts)
        ]
        return np.concatenate(columns, axis=-1).astype(log_std.dtype)

    @override
    def mode(self, head: Head) -> Int64[np.ndarray, "*rows K"]:
        return self._table(head).argmax(axis=-1)

    @override
    def log_prob(self, head: Head, actions: Int64[np.ndarray, "*rows K"]) -> LogProbs:
        return _log_softmax(self._table(head), actions).sum(axis=-1)

    @override
    def scores(self, head: TorchHead, actions: Int64[Tensor, "rows K"]) -> Scores:
        import torch

        is_choice = torch.from_numpy(self._is_choice).to(head.device)
        impossible = head.new_full((len(head), len(self.counts), self._widest), IMPOSSIBLE)
        log_probs = impossible.masked_scatter(is_choice, head).log_softmax(dim=2)
        chosen = log_probs.gather(2, actions.unsqueeze(2)).squeeze(2)
        return chosen.sum(dim=1), -(log_probs.exp() * log_probs).sum(dim=(1, 2))

    def _table(self, head: Head) -> Float[np.ndarray, "*rows K widest"]:
        if len(set(self.counts)) == 1:
            return head.reshape(*head.shape[:-1], -1, self._widest)
        table = np.full((*head.shape[:-1], len(self.counts), self._widest), IMPOSSIBLE, head.dtype)
        table[..., self._is_choice] = head
        return table


def _logits_at(actions: Int64[np.ndarray, "*rows"], count: int) -> Float[np.ndarray, "*rows n"]:
    """Return logits of one of `count` choices, by which all others together have the probability `OTHER_CHOICE`."""
    lead = math.log((1 - OTHER_CHOICE) * max(1, count - 1) / OTHER_CHOICE)
    return np.where(actions[..., None] == np.arange(count), lead, 0.0)


def _log_softmax(
    logits: Float[np.ndarray, "*rows n"], actions: Int64[np.ndarray, "*rows"]
) -> LogProbs:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(shifted, actions[..., None], axis=-1)[..., 0]
    return chosen - np.log(np.exp(shifted).sum(axis=-1))


class _Gaussian(Distribution):
    """Independent normal variables u; the head is [mean, log of the standard deviation] of u.

    Actions are stored as u: not clipped (detail 27), and not squashed, because tanh(u) rounds to 1 for large u.
    """

    def __init__(self, size: int, state_dependent: bool = False) -> None:
        free_size = 0 if state_dependent else size
        super().__init__(
            head_size=2 * size,
            noise_size=size,
            action_shape=(size,),
            integer=False,
            free_size=free_size,
        )
        self.size = size

    @override
    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> DrawnNoise:
        return generator.standard_normal((steps, rows, self.size)).astype(dtype)

    @override
    def sample(self, head: Head, noise: Noise) -> Float[np.ndarray, "*rows A"]:
        return head[..., : self.size] + np.exp(head[..., self.size :]) * noise

    @override
    def head_at(self, actions: Float[np.ndarray, "*rows A"], log_std: np.ndarray) -> Head:
        return np.concatenate([actions, np.broadcast_to(log_std, actions.shape)], axis=-1)

    @override
    def targets(
        self, head: Head, sampled: Float[np.ndarray, "*rows A"]
    ) -> tuple[Float[np.ndarray, "*rows A"], Float[np.ndarray, "*rows A"]]:
        mean = head[..., : self.size]
        std = np.exp(head[..., self.size :])
        return mean + std, mean - std

    @override
    def mode(self, head: Head) -> Float[np.ndarray, "*rows A"]:
        return head[..., : self.size]

    @override
    def log_prob(self, head: Head, actions: Float[np.ndarray, "*rows A"]) -> LogProbs:
        """Return log N(u) = sum(-((u - mean) / std)^2 / 2 - log std - log(2 pi) / 2)."""
        mean = head[..., : self.size]
        log_std = head[..., self.size :]
        standardized = (actions - mean) / np.exp(log_std)
        return (-0.5 * np.square(standardized) - (log_std + HALF_LOG_TWO_PI)).sum(axis=-1)

    @override
    def scores(self, head: TorchHead, actions: Float[Tensor, "rows A"]) -> Scores:
        mean, log_std = head.split(self.size, dim=1)
        z = (actions - mean) / log_std.exp()
        logprobs = (-0.5 * z.square() - (log_std + HALF_LOG_TWO_PI)).sum(dim=1)
        return logprobs, (log_std + (0.5 + HALF_LOG_TWO_PI)).sum(dim=1)


class DiagonalGaussian(_Gaussian):
    """Independent normal variables (detail 25)."""

    @override
    def scores_with_gradient(
        self, head: TorchHead, actions: Float[Tensor, "rows A"]
    ) -> ScoresWithGradient:
        from dppo.ppo.kernels.scores import gaussian_scores

        return gaussian_scores(head, actions)


class SquashedGaussian(_Gaussian):
    """tanh(u) for independent normal variables u: continuous actions within (-1, 1).

    Log-probabilities and entropies are those of tanh(u). The mode is the median, tanh(mean).

    Source: Haarnoja et al., "Soft actor-critic" (arXiv:1801.01290), appendix C.
    """

    @override
    def log_prob(self, head: Head, actions: Float[np.ndarray, "*rows A"]) -> LogProbs:
        """Compute log N(u) - sum(log(1 - tanh(u)^2))."""
        slope = 2 * (math.log(2) - actions - np.logaddexp(0, -2 * actions))  # as in `log_slope`
        return super().log_prob(head, actions) - slope.sum(axis=-1)

    @override
    def scores(self, head: TorchHead, actions: Float[Tensor, "rows A"]) -> Scores:
        """Return the log-density of tanh(u), and its entropy H(u) + E[sum(log(1 - tanh(u)^2))].

        The expectation has no closed form. It is computed by Gauss-Hermite quadrature, so it needs no samples.
        """
        logprobs, entropies = super().scores(head, actions)
        mean, log_std = head.split(self.size, dim=1)
        nodes, weights = (head.new_tensor(values) for values in _quadrature())
        u = mean.unsqueeze(2) + log_std.exp().unsqueeze(2) * nodes
        return logprobs - log_slope(actions).sum(dim=1), entropies + (log_slope(u) @ weights).sum(
            dim=1
        )


def log_slope(u: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2) without rounding to minus infinity: 2 (log 2 - u - softplus(-2u))."""
    from torch.nn.functional import softplus

    return 2 * (math.log(2) - u - softplus(-2 * u))


@cache
def _quadrature() -> tuple[list[float], list[float]]:
    """Return nodes and weights with which sum(weights * f(nodes)) is the mean of f over a standard normal variable."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NUM_NODES)
    return nodes.tolist(), (weights / weights.sum()).tolist()
