"""Batch: the rows that SGD trains on, made from segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter, methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dppo.config.parts import PPO
from dppo.ppo.exchange.inputs import each_leaf, reader_of
from dppo.ppo.exchange.records import Segment
from dppo.ppo.exchange.scales import CLIP, ObsScale
from dppo.ppo.exchange.stacks import stack_numbers
from dppo.ppo.learning.advantages import Transitions, generalized_advantages, shaped_rewards
from dppo.ppo.networks.network import NetworkSpec, RecurrentInputs
from dppo.spaces.spaces import leaves

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float, Int64, Shaped


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows: S sequences, each of L successive steps of one environment, stored one after the other.

    The first axis of all tensors except `table` has length B = S * L. Sequences may be in any order; L is 1 without
    memory. Observations stay in one table, so that each minibatch copies only its own.
    """

    table: Shaped[Tensor, " n *frame"] | dict[str, Shaped[Tensor, "n ..."]]
    """Observations, or single frames of stacks. Normalized; images stay bytes. For a Dict or Tuple space: a dict of the
    leaves by name."""
    index: Int64[Tensor, " B"] | Int64[Tensor, "B K"]
    """The place of each row's observation in the table; of stacks, of the K frames."""
    actions: Shaped[Tensor, " B *A"]
    logprobs: Float[Tensor, " B"]
    """Log-probabilities under the policy that ratios are measured from: the policy that collected the segments or, with
    policy lag or reuse, the policy to update."""
    values: Float[Tensor, " B"]
    """Values under the policy that collected the segments or, with reuse, the policy to update."""
    advantages: Float[Tensor, " B"]
    returns: Float[Tensor, " B"]
    """Targets of the value function, TD(lambda): advantage + old value (detail 5)."""
    weights: Float[Tensor, " B"] | None = None
    """1 for each transition and 0 for other rows; None if all rows are transitions. In a minibatch, the weights are
    scaled so that the mean over the rows of all ranks is the mean over their transitions."""
    importance: Float[Tensor, " B"] | None = None
    """Probability of the action under the policy to update over that under the policy that collected; None where these
    are the same policy."""
    masks: Bool[Tensor, "B M"] | None = None
    """The choices that were allowed; None if all always are."""
    clone_logprobs: Float[Tensor, " B"] | None = None
    """Log-probabilities under the clone of a controller; None without one."""
    clone_coef: float = 0.0
    """Weight of the distance from that clone."""
    iterations: int = 1
    """Number of iterations whose segments the batch holds."""
    terminates: bool = True
    """True if any episode in the batch terminates."""
    reward_range: tuple[float, float] = (math.inf, -math.inf)
    """The least and the largest reward, as they are learned from; infinite without any."""
    share: float = 1.0
    """The part of a minibatch that these rows are, by which a loss multiplies its gradients."""
    sequence_length: int = 1
    """L"""
    recurrent: RecurrentInputs | None = None
    """Recurrent inputs of the sequences, for a network with memory."""

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def sequences(self) -> int:
        """S, the number of sequences."""
        return len(self) // self.sequence_length

    @property
    def obs(self) -> Any:
        """The observations [B, *O] of the rows, or a dict of their leaves, copied from the table at each access."""
        return each_leaf(self.table, self._rows_of)

    def _rows_of(self, leaf: Tensor) -> Tensor:
        if self.index.ndim == 1:
            return leaf.index_select(0, self.index)
        rows = leaf.index_select(0, self.index.flatten())
        return rows.view(*self.index.shape, *leaf.shape[1:])

    @property
    def has_learning_signal(self) -> bool:
        """Return False if all rewards are equal and nothing terminates: no action has been better than another."""
        return self.terminates or self.reward_range[0] < self.reward_range[1]

    def to(self, device: torch.device) -> Batch:
        """Move the batch to `device`; return the batch itself if it is there."""
        if device.type == self.logprobs.device.type:
            return self
        return self._moved(device)

    def _moved(self, device: torch.device) -> Batch:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        return replace(self._changed(moved, moved), table=each_leaf(self.table, moved))

    def take(self, index: Int64[Tensor, " n"]) -> Batch:
        """Copy the sequences at `index`."""
        choose = methodcaller("index_select", 0, index)
        choose_rows = choose if self.sequence_length == 1 else partial(self._in_sequences, choose)
        return self._changed(choose_rows, choose)

    def split(self, sizes: list[int]) -> list[Batch]:
        """Split into consecutive views of `sizes` sequences each."""
        length = self.sequence_length
        parts = []
        start = 0
        for size in sizes:
            end = start + size
            rows = itemgetter(slice(start * length, end * length))
            parts.append(self._changed(rows, itemgetter(slice(start, end))))
            start = end
        return parts

    def pieces(self, rows: int) -> Iterator[Batch]:
        """Yield consecutive pieces of at most `rows` rows, but at least a sequence each."""
        largest = max(1, rows // self.sequence_length)
        sizes = [
            min(largest, self.sequences - start) for start in range(0, self.sequences, largest)
        ]
        for piece in self.split(sizes):
            yield replace(piece, share=len(piece) / len(self))

    def _changed(
        self, change_rows: Callable[[Tensor], Tensor], change: Callable[[Tensor], Tensor]
    ) -> Batch:
        """Return the batch with `change_rows` of each column [B, ...], and `change` of recurrent inputs [S, ...]."""
        changed: dict[str, Any] = {"index": change_rows(self.index)}
        for name in COLUMNS:
            column = getattr(self, name)
            if column is not None:
                changed[name] = change_rows(column)
        if self.recurrent is not None:
            changed["recurrent"] = RecurrentInputs(*map(change, self.recurrent))
        return replace(self, **changed)

    def _in_sequences(self, change: Callable[[Tensor], Tensor], column: Tensor) -> Tensor:
        return change(column.unflatten(0, (self.sequences, self.sequence_length))).flatten(0, 1)


COLUMNS = (
    "actions",
    "logprobs",
    "values",
    "advantages",
    "returns",
    "weights",
    "importance",
    "masks",
    "clone_logprobs",
)


def zero_batch(spec: NetworkSpec, sequences: int, sequence_length: int) -> Batch:
    """Return `sequences` sequences of `sequence_length` rows of zeros, to time an update with."""

    def zeros(*shape: int, dtype: str = spec.dtype) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    rows = sequences * sequence_length
    obs = np.zeros((1, rows), spec.spaces.obs)
    for name, leaf in leaves(obs).items():
        if name in spec.spaces.categories:  # zero need not be a category
            leaf[...] = np.reshape(spec.spaces.categories[name].starts, leaf.shape[2:])
    recurrent = None
    if spec.state_size:
        starts = zeros(sequences, sequence_length, dtype="bool")
        recurrent = RecurrentInputs(zeros(sequences, spec.state_size), starts)
    distribution = spec.distribution
    column = zeros(rows)
    return Batch(
        table=_inputs(obs, np.dtype(spec.dtype), None),
        index=torch.arange(rows),
        actions=zeros(
            rows, *distribution.action_shape, dtype=distribution.action_dtype(spec.dtype)
        ),
        logprobs=column,
        values=column,
        advantages=column,
        returns=column,
        sequence_length=sequence_length,
        recurrent=recurrent,
    )


def row_bytes(spec: NetworkSpec, sequence_length: int) -> int:
    sizes: list[int] = []

    def measured(column: Tensor) -> Tensor:
        sizes.append(column.nbytes)
        return column

    batch = zero_batch(spec, 1, sequence_length)
    batch._changed(measured, measured)
    each_leaf(batch.table, measured)
    return sum(sizes) // sequence_length


def make_batch(
    segments: Sequence[Segment],
    obs_scale: ObsScale | None,
    reward_scale: float | None,
    ppo: PPO,
    length: int = 1,
) -> Batch:
    """Merge segments into one batch: normalize, estimate advantages and flatten.

    Rows that are not transitions are kept with weight zero and their observations; the rest of them becomes zeros.

    Args:
        segments: of equal T, in sampler order, which decides the order of the rows and of every later sum.
        obs_scale: the scale the segments were collected with; None if observations are not normalized.
        reward_scale: divisor of rewards, which are then clipped to +-10; None if they are not normalized.
        length: L, the steps of a sequence; must divide T.
    """
    first = segments[0]
    values = merged(segments, "values")
    valid = merged(segments, "valid")
    transitions = transitions_of(segments, reward_scale, ppo)
    advantages = generalized_advantages(
        transitions,
        values,
        merged(segments, "next_values"),
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
    )
    learned_rewards = shaped_rewards(merged(segments, "rewards"), ppo)[valid]

    rows = partial(as_rows, sequence_length=length)
    obs = merged(segments, "obs")
    table: Any
    if first.stack == 1:
        table = _inputs(obs, values.dtype, obs_scale)
        index = np.arange(valid.size).reshape(valid.shape)
    else:
        table = as_rows(obs)
        index = stack_numbers(transitions.terminated | transitions.truncated, first.stack)
    batch = Batch(
        table=table,
        index=rows(index),
        actions=rows(merged(segments, "actions")),
        logprobs=rows(merged(segments, "logprobs")),
        values=rows(values),
        advantages=rows(advantages),
        returns=rows(advantages + values),
        masks=None if first.masks is None else rows(merged(segments, "masks")),
        terminates=bool(transitions.terminated.any()),
        reward_range=(
            float(learned_rewards.min(initial=math.inf)),
            float(learned_rewards.max(initial=-math.inf)),
        ),
        sequence_length=length,
        recurrent=None if first.states is None else recurrent_inputs(segments, length),
    )
    if transitions.valid is None:
        return batch
    return _weighted(batch, rows(valid))


def _weighted(batch: Batch, valid: Tensor) -> Batch:
    """Return the batch with weights that leave out rows that are not transitions, and with zeros in their columns."""
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        column = getattr(batch, name)
        if column is not None:
            is_valid = valid.view(-1, *[1] * (column.ndim - 1))
            columns[name] = torch.where(is_valid, column, torch.zeros_like(column))
    return replace(batch, weights=valid.to(batch.values.dtype), **columns)


def transitions_of(
    segments: Sequence[Segment], reward_scale: float | None, ppo: PPO
) -> Transitions:
    """Return what followed the actions of segments side by side, with rewards as they are learned from."""
    rewards = shaped_rewards(merged(segments, "rewards"), ppo)
    if reward_scale is not None:
        rewards = np.clip(rewards / reward_scale, -CLIP, CLIP)
    valid = merged(segments, "valid")
    return Transitions(
        rewards,
        merged(segments, "terminated"),
        merged(segments, "truncated"),
        None if valid.all() else valid,
    )


def merged(segments: Sequence[Segment], name: str, axis: int = 1) -> np.ndarray:
    """Return the column [T, N * E, ...] of all segments side by side; along axis 0, one after the other."""
    return np.concatenate([getattr(segment, name) for segment in segments], axis=axis)


def successor_inputs(
    segments: Sequence[Segment], obs_scale: ObsScale | None
) -> tuple[int, Any, RecurrentInputs | None]:
    """Return the number of successors of all segments, and these as inputs of a network: sequences of one step."""
    successors = merged(segments, "successors", axis=0)
    inputs = _inputs(successors[None], segments[0].values.dtype, obs_scale)
    recurrent = None
    if segments[0].successor_states is not None:
        states = torch.from_numpy(merged(segments, "successor_states", axis=0))
        recurrent = RecurrentInputs(states, torch.zeros((len(states), 1), dtype=torch.bool))
    return len(successors), inputs, recurrent


def recurrent_inputs(segments: Sequence[Segment], sequence_length: int) -> RecurrentInputs:
    """Return the states at the start of all sequences, and the steps before which they are reset."""
    done = merged(segments, "terminated") | merged(segments, "truncated")
    # in the first row, the stored state belongs to the episode, or is zero
    starts = np.zeros_like(done)
    starts[1:] = done[:-1]
    starts = in_sequences(starts, sequence_length).reshape(-1, sequence_length)
    return RecurrentInputs(as_rows(merged(segments, "states")), torch.from_numpy(starts))


def _inputs(
    obs: Shaped[np.ndarray, "T envs *O"], dtype: np.dtype[Any], scale: ObsScale | None
) -> Tensor | dict[str, Tensor]:
    """Return the network's input for each row [T * envs]: one tensor, or a copy of each leaf by name."""
    reader = reader_of(np.dtype((obs.dtype, obs.shape[2:])), dtype)
    reader.load(scale)
    return each_leaf(reader.read(obs), as_rows)


def as_rows(array: np.ndarray, sequence_length: int = 1) -> Tensor:
    """Return an array [T, envs, ...] as a tensor of its rows [T * envs, ...], in the order of `in_sequences`."""
    return torch.from_numpy(in_sequences(array, sequence_length))


def in_sequences(
    array: Shaped[np.ndarray, "T envs *rest"], sequence_length: int
) -> Shaped[np.ndarray, " T*envs *rest"]:
    """Cut `array` into sequences of `sequence_length` steps, laid one after the other."""
    if sequence_length > 1:
        # [T / L, envs, L, ...]
        array = array.reshape(-1, sequence_length, *array.shape[1:]).swapaxes(1, 2)
        array = array.reshape(-1, sequence_length, *array.shape[3:])
    return np.ascontiguousarray(array.reshape(-1, *array.shape[2:]))
