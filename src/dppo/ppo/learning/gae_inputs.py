"""Rollout: the inputs of advantage estimation, kept to repeat it when the values change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.exchange.records import Segment
from dppo.ppo.learning.advantages import generalized_advantages
from dppo.ppo.networks.recall import Recall

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float, Float64, Int64, Shaped


@dataclass(frozen=True, slots=True)
class Rollout:
    """Everything that advantages are estimated from, kept to repeat the estimate when values change."""

    rewards: Float64[np.ndarray, "T envs"]
    """As they are learnt from: limited and scaled."""
    terminated: Bool[np.ndarray, "T envs"]
    truncated: Bool[np.ndarray, "T envs"]
    valid: Bool[np.ndarray, "T envs"] | None
    """None: all rows are."""
    successors: Shaped[Tensor, " n *O"] | dict[str, Shaped[Tensor, "n ..."]]
    """Normalised observations that followed a row, but are in no row themselves."""
    followed: tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]
    """Step and environment of the row that each of them followed."""
    gamma: float
    gae_lambda: float
    recall: Recall | None = None
    """Of `successors`, each a sequence of one step, for a network with memory."""

    def estimate(
        self, values: Float[np.ndarray, " B"], successors: Float[np.ndarray, " n"], sequence_length: int
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Return advantages and returns by the values of all rows, in their order in the batch, and of `successors`."""
        steps = in_steps(values, sequence_length, self.rewards.shape)
        next_values = np.empty_like(steps)
        next_values[:-1] = steps[1:]
        next_values[self.followed] = successors
        advantages = generalized_advantages(
            self.rewards,
            steps,
            next_values,
            self.terminated,
            self.truncated,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            valid=self.valid,
        )
        returns = advantages + steps
        if self.valid is not None:
            returns = np.where(self.valid, returns, returns.dtype.type(0))
        estimates = [torch.from_numpy(in_sequences(each, sequence_length)) for each in (advantages, returns)]
        return estimates[0], estimates[1]


def followed_by_successors(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Return step and environment, among those of all segments, of the rows that `successors` follow."""
    steps, envs, before = [], [], 0
    for segment in segments:
        t, env = np.nonzero(segment.followed)
        steps.append(t)
        envs.append(env + before)
        before += segment.followed.shape[1]
    return np.concatenate(steps), np.concatenate(envs)


def recall_of_successors(segments: Sequence[Segment]) -> Recall | None:
    """Return the states that successors start from, each a sequence of one step; None without memory."""
    states = [one.successor_states for one in segments if one.successor_states is not None]
    if not states:
        return None
    joined = torch.from_numpy(np.concatenate(states))
    return Recall(joined, torch.zeros((len(joined), 1), dtype=torch.bool))


def in_sequences(
    array: Shaped[np.ndarray, "T envs *rest"], sequence_length: int
) -> Shaped[np.ndarray, " T*envs *rest"]:
    """Cut `array` into sequences of `sequence_length` steps, laid one after the other."""
    if sequence_length > 1:
        array = array.reshape(-1, sequence_length, *array.shape[1:]).swapaxes(1, 2)  # [T / L, envs, L, ...]
        array = array.reshape(-1, sequence_length, *array.shape[3:])
    return np.ascontiguousarray(array.reshape(-1, *array.shape[2:]))


def in_steps(
    rows: Shaped[np.ndarray, " rows"], sequence_length: int, shape: tuple[int, ...]
) -> Shaped[np.ndarray, "T envs"]:
    """Undo `in_sequences`: [T * envs] -> [T, envs], which is `shape`."""
    if sequence_length > 1:
        rows = rows.reshape(-1, shape[1], sequence_length).swapaxes(1, 2)
    return rows.reshape(shape)
