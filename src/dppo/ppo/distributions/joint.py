"""Independent distributions side by side, for actions of several parts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

from dppo.ppo.distributions.base import Distribution

if TYPE_CHECKING:  # actors never import torch; shapes are checked in tests only
    from jaxtyping import Shaped
    from torch import Tensor

    from dppo.ppo.distributions.base import DrawnNoise, Head, LogProbs, Noise, Scores, TorchHead


class Joint(Distribution):
    """Independent parts: heads, noise and actions are concatenated, log-probabilities and entropies added.

    The head is [all but the free parameters of each part..., free parameters of each part...]. An action is a vector;
    integer actions are stored as floats if another part is continuous.
    """

    def __init__(self, parts: tuple[Distribution, ...]) -> None:
        self.parts = parts
        self._bound_sizes = [part.head_size - part.free_size for part in parts]
        self._action_widths = [math.prod(part.action_shape) for part in parts]
        super().__init__(
            head_size=sum(part.head_size for part in parts),
            noise_size=sum(part.noise_size for part in parts),
            action_shape=(sum(self._action_widths),),
            integer=all(part.integer for part in parts),
            free_size=sum(part.free_size for part in parts),
        )

    @property
    @override
    def choice_columns(self) -> tuple[int, ...]:
        columns: list[int] = []
        start = 0
        for part, bound_size in zip(self.parts, self._bound_sizes, strict=True):
            columns += [start + column for column in part.choice_columns]
            start += bound_size
        return tuple(columns)

    @override
    def noise(
        self, generator: np.random.Generator, steps: int, rows: int, dtype: str
    ) -> DrawnNoise:
        return np.concatenate(
            [part.noise(generator, steps, rows, dtype) for part in self.parts], axis=-1
        )

    @override
    def sample(self, head: Head, noise: Noise) -> Shaped[np.ndarray, "*rows A"]:
        heads = self.heads(head, np.concatenate)
        noises = _columns(noise, [part.noise_size for part in self.parts])
        actions = [
            part.sample(part_head, part_noise)
            for part, part_head, part_noise in zip(self.parts, heads, noises, strict=True)
        ]
        return self._side_by_side(actions, str(head.dtype))

    @override
    def mode(self, head: Head) -> Shaped[np.ndarray, "*rows A"]:
        heads = self.heads(head, np.concatenate)
        actions = [part.mode(part_head) for part, part_head in zip(self.parts, heads, strict=True)]
        return self._side_by_side(actions, str(head.dtype))

    @override
    def head_at(self, actions: Shaped[np.ndarray, "*rows A"], log_std: np.ndarray) -> Head:
        bound = []
        free_parts = []
        deviations = _columns(log_std, self._action_widths)
        columns = self._parts_of_actions(actions, str(log_std.dtype))
        for part, part_actions, part_log_std in zip(self.parts, columns, deviations, strict=True):
            part_head = part.head_at(part_actions, part_log_std)
            bound_size = part.head_size - part.free_size
            bound.append(part_head[..., :bound_size])
            free_parts.append(part_head[..., bound_size:])
        return np.concatenate([*bound, *free_parts], axis=-1)

    @override
    def targets(
        self, head: Head, sampled: Shaped[np.ndarray, "*rows A"]
    ) -> tuple[Shaped[np.ndarray, "*rows A"], Shaped[np.ndarray, "*rows A"]]:
        dtype = str(head.dtype)
        heads = self.heads(head, np.concatenate)
        columns = self._parts_of_actions(sampled, dtype)
        pairs = [
            part.targets(part_head, part_sampled)
            for part, part_head, part_sampled in zip(self.parts, heads, columns, strict=True)
        ]
        first, second = zip(*pairs, strict=True)
        return self._side_by_side(list(first), dtype), self._side_by_side(list(second), dtype)

    @override
    def log_prob(self, head: Head, actions: Shaped[np.ndarray, "*rows A"]) -> LogProbs:
        total = np.zeros(head.shape[:-1], head.dtype)
        heads = self.heads(head, np.concatenate)
        columns = self._parts_of_actions(actions, str(head.dtype))
        for part, part_head, part_actions in zip(self.parts, heads, columns, strict=True):
            total += part.log_prob(part_head, part_actions)
        return total

    def _parts_of_actions(
        self, actions: Shaped[np.ndarray, "*rows A"], dtype: str
    ) -> list[np.ndarray]:
        """Return the actions of each part, in the form in which the part takes them with a network of `dtype`."""
        parts = []
        columns = _columns(actions, self._action_widths)
        for part, part_columns in zip(self.parts, columns, strict=True):
            shape = (*part_columns.shape[:-1], *part.action_shape)
            part_actions = part_columns.reshape(shape)
            parts.append(part_actions.astype(part.action_dtype(dtype), copy=False))
        return parts

    @override
    def scores(self, head: TorchHead, actions: Shaped[Tensor, "rows A"]) -> Scores:
        import torch

        logprobs = []
        entropies = []
        head_dtype = str(head.dtype).removeprefix("torch.")
        heads = self.heads(head, torch.cat)
        columns = _columns(actions, self._action_widths)
        for part, part_head, part_columns in zip(self.parts, heads, columns, strict=True):
            shape = (len(part_columns), *part.action_shape)
            dtype = getattr(torch, part.action_dtype(head_dtype))
            part_actions = part_columns.reshape(shape).to(dtype)
            logprob, entropy = part.scores(part_head, part_actions)
            logprobs.append(logprob)
            entropies.append(entropy)
        total_logprobs = torch.stack(logprobs).sum(dim=0)
        total_entropies = torch.stack(entropies).sum(dim=0)
        return total_logprobs, total_entropies

    def heads(self, head: Any, concatenate: Callable[[tuple[Any, ...], int], Any]) -> list[Any]:
        """Split heads [..., H] into those of the parts; `concatenate` joins arrays or tensors along an axis."""
        bound_parts = _columns(head, self._bound_sizes)
        free_parts = _columns(
            head[..., self.head_size - self.free_size :], [part.free_size for part in self.parts]
        )
        heads = []
        for part, bound_columns, free_columns in zip(
            self.parts, bound_parts, free_parts, strict=True
        ):
            if part.free_size:
                heads.append(concatenate((bound_columns, free_columns), -1))
            else:
                heads.append(bound_columns)
        return heads

    def _side_by_side(self, actions: list[np.ndarray], dtype: str) -> Shaped[np.ndarray, "*rows A"]:
        columns = []
        for part, part_actions in zip(self.parts, actions, strict=True):
            is_scalar = not part.action_shape
            columns.append(part_actions[..., None] if is_scalar else part_actions)
        action_dtype = self.action_dtype(dtype)
        return np.concatenate(columns, axis=-1, dtype=action_dtype, casting="unsafe")


def _columns(array: Any, widths: list[int]) -> list[Any]:
    edges = accumulate(widths, initial=0)
    return [array[..., start:end] for start, end in pairwise(edges)]
