"""Batch: the rows that SGD trains on, made from segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.exchange.inputs import each_leaf, normalized, scale_for, stays_unprocessed, unprocessed_inputs
from dppo.ppo.exchange.normalizer import CLIP, ObsScale
from dppo.ppo.exchange.records import Segment
from dppo.ppo.learning.advantages import generalized_advantages
from dppo.ppo.learning.gae_inputs import Rollout, followed_by_successors, in_sequences, recall_of_successors
from dppo.ppo.networks.building import zero_inputs
from dppo.ppo.networks.network import NetworkSpec
from dppo.ppo.networks.recall import Recall
from dppo.spaces.spaces import is_continuous

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float, Int64, Shaped


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows: S sequences, each of L successive steps of one environment, stored one after the other.

    The first axis of all tensors has length B = S * L. Sequences may be in any order; L is 1 without memory.
    """

    obs: Shaped[Tensor, " B *O"] | dict[str, Shaped[Tensor, "B ..."]]
    """Normalised; images stay bytes. For a Dict or Tuple space: a dict of the leaves by name."""
    actions: Shaped[Tensor, " B *A"]
    logprobs: Float[Tensor, " B"]
    """Log-probabilities under the policy that ratios are measured from: the one that collected the segments or, with
    policy lag, the one to update."""
    values: Float[Tensor, " B"]
    """Values under the policy that collected the segments."""
    advantages: Float[Tensor, " B"]
    returns: Float[Tensor, " B"]
    """Targets of the value function, TD(lambda): advantage + old value (detail 5)."""
    weights: Float[Tensor, " B"] | None = None
    """One for each transition and zero for rows that are not; None if all rows are. In a minibatch they are scaled so
    that the mean over the rows of all ranks is the mean over their transitions."""
    importance: Float[Tensor, " B"] | None = None
    """Probability of the action under the policy to update over that under the policy that collected; None where these
    are the same policy."""
    masks: Bool[Tensor, "B M"] | None = None
    """The choices that were allowed; None if all always are."""
    sequence_length: int = 1
    """L"""
    recall: Recall | None = None
    """Of the sequences, for a network with memory."""
    rollout: Rollout | None = None
    """Of a batch whose advantages are recomputed before each further epoch."""

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def sequences(self) -> int:
        """Return S, the number of sequences."""
        return len(self) // self.sequence_length

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; on the CPU, the batch itself."""
        if device.type == "cpu":
            return self

        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        return replace(self._of_each(moved), recall=None if self.recall is None else self.recall.of_each(moved))

    def take(self, index: Int64[Tensor, " n"]) -> Batch:
        """Return a copy of the sequences at `index`."""
        recall = None if self.recall is None else self.recall.of_each(lambda tensor: tensor.index_select(0, index))
        if self.sequence_length > 1:
            steps = torch.arange(self.sequence_length, device=index.device)
            index = (index.unsqueeze(1) * self.sequence_length + steps).flatten()
        return replace(self._of_each(lambda tensor: tensor.index_select(0, index)), recall=recall)

    def split(self, sizes: list[int]) -> list[Batch]:
        """Return consecutive pieces with `sizes` sequences each, as views."""
        rows = [size * self.sequence_length for size in sizes]
        names = [name for name in COLUMNS if getattr(self, name) is not None]
        parts = zip(*(split_rows(getattr(self, name), rows) for name in names), strict=True)
        recalls = [None] * len(sizes) if self.recall is None else self.recall.split(sizes)
        return [
            replace(self, recall=recall, **dict(zip(names, columns, strict=True)))
            for columns, recall in zip(parts, recalls, strict=True)
        ]

    def pieces(self, rows: int) -> list[Batch]:
        """Return consecutive pieces of at most `rows` rows, but at least a sequence each, as views."""
        most = max(1, rows // self.sequence_length)
        return self.split([min(most, self.sequences - start) for start in range(0, self.sequences, most)])

    def _of_each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        columns = {name: getattr(self, name) for name in COLUMNS}
        changed: dict[str, Any] = {
            name: each_leaf(column, change) for name, column in columns.items() if column is not None
        }
        return replace(self, **changed)


COLUMNS = tuple(name for name in Batch.__slots__ if name not in ("sequence_length", "rollout", "recall"))


def num_bytes(column: Tensor | dict[str, Tensor]) -> int:
    """Return the memory that a column of a batch takes."""
    leaves = column.values() if isinstance(column, dict) else (column,)
    return sum(leaf.numel() * leaf.element_size() for leaf in leaves)


def split_rows(column: Tensor | dict[str, Tensor], rows: list[int]) -> Sequence[Any]:
    """Return consecutive pieces of so many rows, as views; of several leaves, each a dict."""
    if not isinstance(column, dict):
        pieces: tuple[Tensor, ...] = column.split(rows)
        return pieces
    parts = zip(*(split_rows(leaf, rows) for leaf in column.values()), strict=True)
    return [dict(zip(column, part, strict=True)) for part in parts]


def zero_batch(spec: NetworkSpec, sequences: int, sequence_length: int) -> Batch:
    """Return `sequences` sequences of `sequence_length` rows of zeros, to time an update with."""
    rows, distribution, dtype = sequences * sequence_length, spec.distribution, getattr(torch, spec.dtype)
    actions = torch.zeros(
        (rows, *distribution.action_shape), dtype=getattr(torch, distribution.action_dtype(spec.dtype))
    )
    zeros = torch.zeros(rows, dtype=dtype)
    recall = None
    if spec.state_size:
        states = torch.zeros((sequences, spec.state_size), dtype=dtype)
        recall = Recall(states, torch.zeros((sequences, sequence_length), dtype=torch.bool))
    obs = zero_inputs(spec, rows)
    return Batch(obs, actions, zeros, zeros, zeros, zeros, sequence_length=sequence_length, recall=recall)


def make_batch(
    segments: Sequence[Segment],
    obs_scale: ObsScale | None,
    reward_scale: float | None,
    *,
    gamma: float,
    gae_lambda: float,
    sequence_length: int = 1,
    shape_rewards: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Batch:
    """Merge segments into one batch: normalise, estimate advantages and flatten.

    Rows that are not transitions are kept with weight zero, and their contents are replaced by zeros.

    Args:
        segments: of equal T, in sampler order. The order decides that of the rows, and so of every later sum.
        obs_scale: the scale the segments were collected with; None if observations are not normalised.
        reward_scale: divisor of rewards, which are then clipped to +-10; None if they are not normalised.
        sequence_length: L, the steps of a sequence; must divide T.
        shape_rewards: transforms raw rewards before they are normalised; None to leave them as they are.
    """
    merged = {
        name: np.concatenate([getattr(segment, name) for segment in segments], axis=1)  # [T, N * E, ...]
        for name in Segment.__slots__
        if name not in ("successors", "states", "successor_states") and getattr(segments[0], name) is not None
    }
    keeps_successors, has_memory = segments[0].successors is not None, segments[0].states is not None
    valid = None if merged["valid"].all() else merged["valid"]
    values, dtype = merged["values"], merged["values"].dtype
    rewards = merged["rewards"] if shape_rewards is None else shape_rewards(merged["rewards"])
    if reward_scale is not None:
        rewards = np.clip(rewards / reward_scale, -CLIP, CLIP)
    after = [merged[name] for name in ("next_values", "terminated", "truncated")]
    advantages = generalized_advantages(rewards, values, *after, gamma=gamma, gae_lambda=gae_lambda, valid=valid)

    def rows(array: np.ndarray) -> Tensor:
        if valid is not None:
            array = np.where(valid.reshape(*valid.shape, *[1] * (array.ndim - 2)), array, array.dtype.type(0))
        return torch.from_numpy(in_sequences(array, sequence_length))

    return Batch(
        obs=_inputs(merged["obs"], dtype, obs_scale, rows),
        actions=rows(merged["actions"]),
        logprobs=rows(merged["logprobs"]),
        values=rows(values),
        advantages=rows(advantages),
        returns=rows(advantages + values),
        weights=None if valid is None else rows(valid.astype(dtype)),
        masks=rows(merged["masks"]) if "masks" in merged else None,
        sequence_length=sequence_length,
        rollout=_rollout(segments, merged, rewards, obs_scale, gamma, gae_lambda) if keeps_successors else None,
        recall=_recall(segments, merged["terminated"] | merged["truncated"], sequence_length) if has_memory else None,
    )


def _rollout(
    segments: Sequence[Segment],
    merged: dict[str, np.ndarray],
    rewards: np.ndarray,
    obs_scale: ObsScale | None,
    gamma: float,
    gae_lambda: float,
) -> Rollout:
    """Return what advantages are estimated from again, when values change.

    Args:
        merged: the columns of all segments [T, N * E, ...].
        rewards: [T, N * E] as they are learned from.
    """
    successors = np.concatenate([one.successors for one in segments if one.successors is not None])[None]
    return Rollout(
        rewards,
        merged["terminated"],
        merged["truncated"],
        None if merged["valid"].all() else merged["valid"],
        _inputs(successors, merged["values"].dtype, obs_scale, lambda one: torch.from_numpy(in_sequences(one, 1))),
        followed_by_successors(segments),
        gamma,
        gae_lambda,
        recall=recall_of_successors(segments),
    )


def _recall(segments: Sequence[Segment], done: Bool[np.ndarray, "T envs"], sequence_length: int) -> Recall:
    """Return the recurrent states that the sequences of a batch start from.

    Args:
        done: the episode ended in this row, so that the next row starts another one.
    """
    starts = np.zeros_like(done)  # in the first row, the stored state is that of the episode, or zero
    starts[1:] = done[:-1]
    rows = in_sequences(np.concatenate([one.states for one in segments if one.states is not None], axis=1), 1)
    starts = in_sequences(starts, sequence_length).reshape(-1, sequence_length)
    return Recall(torch.from_numpy(rows), torch.from_numpy(starts))


def _inputs(
    obs: Shaped[np.ndarray, "T envs *O"],
    dtype: np.dtype[Any],
    scale: ObsScale | None,
    rows: Callable[[np.ndarray], Tensor],
) -> Tensor | dict[str, Tensor]:
    """Return the network's input: one tensor, or a copy of each leaf by name."""
    scale = scale_for(scale, obs.dtype, dtype)
    if stays_unprocessed(np.dtype((obs.dtype, obs.shape[2:]))):
        stored = unprocessed_inputs(obs, dtype, scale)
        inputs: Tensor | dict[str, Tensor]
        inputs = each_leaf(stored, lambda leaf: rows(leaf.astype(dtype) if is_continuous(leaf.dtype) else leaf))
        return inputs
    return rows(normalized(obs, dtype, scale))
