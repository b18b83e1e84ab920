"""From segments to the rows that SGD sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.advantages import generalized_advantages
from dppo.ppo.normalizer import CLIP, Statistics, normalize
from dppo.ppo.segment import Segment


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows, in any order; all tensors have B as their first axis."""

    obs: Tensor
    """[B, O] flattened and normalised."""
    actions: Tensor
    """[B, *A]"""
    logprobs: Tensor
    """[B] of the policy that collected."""
    values: Tensor
    """[B] of the policy that collected."""
    advantages: Tensor
    """[B]"""
    returns: Tensor
    """[B] targets of the value: TD(lambda), advantage + old value (detail 5)."""

    def __len__(self) -> int:
        return len(self.logprobs)

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`; the same tensors where they are there already."""
        if device.type == "cpu":
            return self
        return Batch(*(getattr(self, name).pin_memory().to(device, non_blocking=True) for name in self.__slots__))

    def rows(self, index: Tensor) -> Batch:
        """The rows at `index` [n], copied."""
        return Batch(*(getattr(self, name).index_select(0, index) for name in self.__slots__))

    def split(self, sizes: list[int]) -> list[Batch]:
        """Consecutive pieces of the given sizes, as views."""
        parts = [getattr(self, name).split(sizes) for name in self.__slots__]
        return [Batch(*fields) for fields in zip(*parts, strict=True)]


def make_batch(segments: Sequence[Segment], statistics: Statistics, *, gamma: float, gae_lambda: float) -> Batch:
    """Lay segments side by side, normalise, estimate advantages, flatten.

    Args:
        segments: of equal T, in sampler order: the order of the rows, and with it every later sum, depends on it.
        statistics: of observations, those that the segments were collected with; of returns, the newest.
    """
    merged = {
        name: np.concatenate([getattr(segment, name) for segment in segments], axis=1)  # [T, N * E, ...]
        for name in Segment.__slots__
    }
    rewards = merged["rewards"]
    if statistics.returns is not None:
        rewards = np.clip(rewards / statistics.reward_scale(), -CLIP, CLIP)
    advantages = generalized_advantages(
        rewards,
        merged["values"],
        merged["next_values"],
        merged["terminated"],
        merged["truncated"],
        gamma=gamma,
        gae_lambda=gae_lambda,
    )
    dtype = merged["values"].dtype
    obs = merged["obs"].astype(dtype, copy=False)
    if statistics.obs is not None:
        mean, std = statistics.obs.mean_and_std()
        obs = normalize(obs, mean.astype(dtype), std.astype(dtype))
    steps, envs = advantages.shape
    valid = merged["valid"].reshape(-1)

    def flat(array: np.ndarray) -> Tensor:
        rows = array.reshape(steps * envs, *array.shape[2:])
        return torch.from_numpy(np.ascontiguousarray(rows if valid.all() else rows[valid]))

    return Batch(
        obs=flat(obs.reshape(steps, envs, -1)),
        actions=flat(merged["actions"]),
        logprobs=flat(merged["logprobs"]),
        values=flat(merged["values"]),
        advantages=flat(advantages),
        returns=flat(advantages + merged["values"]),
    )
