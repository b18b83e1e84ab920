"""Several independent distributions, side by side; and the distribution that fits given actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from dppo.ppo.distributions.base import Distribution
from dppo.ppo.distributions.simple import Categorical, DiagonalGaussian, MultiCategorical, SquashedGaussian
from dppo.spaces.actions import Actions, BoxActions, DiscreteActions, MultiDiscreteActions, NestedActions

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Shaped
    from torch import Tensor

    from dppo.ppo.distributions.base import Drawn, Head, Noise, Numbers, Scores, TorchHead


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
        heads = self.heads(head, np.concatenate)
        return self._side_by_side(
            [part.mode(one) for part, one in zip(self.parts, heads, strict=True)], str(head.dtype)
        )

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


def distribution_of(actions: Actions, *, state_dependent_std: bool = False) -> Distribution:
    """Return the distribution over `actions`; the std of real-valued ones may depend on the state."""
    if isinstance(actions, DiscreteActions):
        return Categorical(actions.n)
    if isinstance(actions, MultiDiscreteActions):
        return MultiCategorical(actions.counts)
    if isinstance(actions, BoxActions):
        kind = SquashedGaussian if actions.bounds == "squash" else DiagonalGaussian
        return kind(actions.width, state_dependent_std)
    assert isinstance(actions, NestedActions)
    return Joint(tuple(distribution_of(part, state_dependent_std=state_dependent_std) for part in actions.parts))
