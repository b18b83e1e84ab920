"""Batch: the rows that SGD trains on, made from segments."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from operator import methodcaller
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dppo.config.parts import PPO
from dppo.ppo.exchange.inputs import each_leaf, network_inputs, scale_for
from dppo.ppo.exchange.records import Segment
from dppo.ppo.exchange.scales import CLIP, ObsScale
from dppo.ppo.exchange.stacks import stack_numbers
from dppo.ppo.learning.advantages import generalized_advantages, shaped_rewards
from dppo.ppo.networks.network import NetworkSpec, RecurrentInputs
from dppo.spaces.spaces import leaves

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float, Int64, Shaped


@dataclass(frozen=True, slots=True)
class GAEInputs:
    """Everything that advantages are estimated from, kept to repeat the estimate when values change."""

    estimate: Callable[..., Float[np.ndarray, "T envs"]]
    """`generalized_advantages`, given the keywords `values` and `next_values` [T, envs]."""
    valid: Bool[np.ndarray, "T envs"]
    successors: Shaped[Tensor, " n *O"] | dict[str, Shaped[Tensor, "n ..."]]
    """Normalized observations that followed a row, but are in no row themselves."""
    followed: tuple[Int64[np.ndarray, " n"], Int64[np.ndarray, " n"]]
    """Step and environment of the row that each of them followed."""
    recurrent: RecurrentInputs | None
    """Of `successors`, each a sequence of one step, for a network with memory."""
    traces: Float[np.ndarray, " B"] | None = None
    """Truncated importance weights of the rows, in their order in the batch; None where all are one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows: S sequences, each of L successive steps of one environment, stored one after the other.

    The first axis of all tensors has length B = S * L. Sequences may be in any order; L is 1 without memory.
    """

    obs: Shaped[Tensor, " B *O"] | dict[str, Shaped[Tensor, "B ..."]]
    """Normalized; images stay bytes. For a Dict or Tuple space: a dict of the leaves by name. Beside `stored`, numbers
    of its rows: [B], or [B, K] for stacks of K."""
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
    clip: Float[Tensor, " B"] | None = None
    """Clipping range of each row's ratio, relative to `clip_coef`; None where it is that of all rows."""
    masks: Bool[Tensor, "B M"] | None = None
    """The choices that were allowed; None if all always are."""
    iterations: int = 1
    """Number of iterations whose segments it holds."""
    terminates: bool = True
    """Whether an episode does."""
    rewards: tuple[float, float] = (math.inf, -math.inf)
    """The least and the largest reward, as they are learned from; infinite without any."""
    sequence_length: int = 1
    """L"""
    recurrent: RecurrentInputs | None = None
    """Of the sequences, for a network with memory."""
    gae_inputs: GAEInputs | None = None
    """Of a batch whose advantages are recomputed before each further epoch."""
    stored: Shaped[Tensor, " n *frame"] | dict[str, Shaped[Tensor, "n ..."]] | None = None
    """Observations or frames that are copied only for the rows that need them, by `formed`."""

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def sequences(self) -> int:
        """Return S, the number of sequences."""
        return len(self) // self.sequence_length

    @property
    def informed(self) -> bool:
        """Return False if all rewards are equal and nothing terminates: no action has been better than another."""
        return self.terminates or self.rewards[0] < self.rewards[1]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; the batch itself if it is there."""
        return self if device.type == self.logprobs.device.type else self._moved(device)

    def _moved(self, device: torch.device) -> Batch:
        def moved(tensor: Tensor) -> Tensor:
            return tensor.pin_memory().to(device, non_blocking=True)

        there = self._of_each(moved)
        return there if self.stored is None else replace(there, stored=each_leaf(self.stored, moved))

    def formed(self) -> Batch:
        """Return the batch with the observations that `obs` numbers; if it holds them, itself."""
        return self if self.stored is None else replace(self, obs=each_leaf(self.stored, self._numbered), stored=None)

    def _numbered(self, leaf: Tensor) -> Any:
        numbers: Any = self.obs
        return leaf.index_select(0, numbers.flatten()).unflatten(0, numbers.shape)

    def take(self, index: Int64[Tensor, " n"]) -> Batch:
        """Return a copy of the sequences at `index`."""
        return self._of_each(methodcaller("index_select", 0, index))

    def split(self, sizes: list[int]) -> list[Batch]:
        """Return consecutive pieces with `sizes` sequences each, as views."""
        places = zip(accumulate(sizes, initial=0), sizes)  # noqa: B905
        return [self._of_each(methodcaller("narrow", 0, start, size)) for start, size in places]

    def pieces(self, rows: int) -> Iterator[Batch]:
        """Yield consecutive pieces of at most `rows` rows, but at least a sequence each, with their observations."""
        most = max(1, rows // self.sequence_length)
        sizes = [min(most, self.sequences - start) for start in range(0, self.sequences, most)]
        return (piece.formed() for piece in self.split(sizes))

    def _of_each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return the batch with each column changed by a function of its sequences [S, ...]."""
        of_rows = change if self.sequence_length == 1 else partial(self._in_sequences, change)
        changed: dict[str, Any] = {
            name: each_leaf(column, of_rows) for name in COLUMNS if (column := getattr(self, name)) is not None
        }
        if self.recurrent is not None:
            changed["recurrent"] = RecurrentInputs(*map(change, self.recurrent))
        return replace(self, **changed)

    def _in_sequences(self, change: Callable[[Tensor], Tensor], column: Tensor) -> Tensor:
        return change(column.unflatten(0, (self.sequences, self.sequence_length))).flatten(0, 1)


NOT_COLUMNS = ("iterations", "terminates", "rewards", "sequence_length", "gae_inputs", "recurrent", "stored")
COLUMNS = tuple(name for name in Batch.__slots__ if name not in NOT_COLUMNS)


def zero_batch(spec: NetworkSpec, sequences: int, sequence_length: int) -> Batch:
    """Return `sequences` sequences of `sequence_length` rows of zeros, to time an update with."""

    def zeros(*shape: int, dtype: str = spec.dtype) -> Tensor:
        return torch.zeros(shape, dtype=getattr(torch, dtype))

    rows, of = sequences * sequence_length, spec.distribution
    actions, zero = zeros(rows, *of.action_shape, dtype=of.action_dtype(spec.dtype)), zeros(rows)
    states = RecurrentInputs(zeros(sequences, spec.state_size), zeros(sequences, sequence_length, dtype="bool"))
    recurrent = states if spec.state_size else None
    seen = np.zeros((1, rows), spec.spaces.obs)
    for name, leaf in leaves(seen).items():
        if name in spec.spaces.categories:  # of which zero need not be one
            leaf[...] = np.reshape(spec.spaces.categories[name].starts, leaf.shape[2:])
    obs = _inputs(seen, np.dtype(spec.dtype), None, _flat_tensor)
    return Batch(obs, actions, zero, zero, zero, zero, sequence_length=sequence_length, recurrent=recurrent)


def row_bytes(spec: NetworkSpec, sequence_length: int) -> int:
    """Return the bytes of a row in a batch."""
    columns: list[Tensor] = []

    def counted(column: Tensor) -> Tensor:
        columns.append(column)
        return column

    zero_batch(spec, 1, sequence_length)._of_each(counted)
    return sum(column.nbytes for column in columns) // sequence_length


def make_batch(
    segments: Sequence[Segment], obs_scale: ObsScale | None, reward_scale: float | None, ppo: PPO, length: int = 1
) -> Batch:
    """Merge segments into one batch: normalize, estimate advantages and flatten.

    Rows that are not transitions are kept with weight zero and their observations; the rest of them becomes zeros.

    Args:
        segments: of equal T, in sampler order. The order decides that of the rows, and so of every later sum.
        obs_scale: the scale the segments were collected with; None if observations are not normalized.
        reward_scale: divisor of rewards, which are then clipped to +-10; None if they are not normalized.
        length: L, the steps of a sequence; must divide T.
    """
    merged = partial(_merged, segments)
    values, valid, rewards = merged("values"), merged("valid"), shaped_rewards(merged("rewards"), ppo)
    terminated, some = merged("terminated"), rewards[valid]
    dtype, all_valid = values.dtype, bool(valid.all())
    if reward_scale is not None:
        rewards = np.clip(rewards / reward_scale, -CLIP, CLIP)
    estimate = partial(
        generalized_advantages,
        rewards=rewards,
        terminated=terminated,
        truncated=merged("truncated"),
        gamma=ppo.gamma,
        gae_lambda=ppo.gae_lambda,
        valid=None if all_valid else valid,
    )
    advantages = estimate(values=values, next_values=merged("next_values"))

    def rows(array: np.ndarray, *, every: bool = all_valid) -> Tensor:  # else with zeros where there is no transition
        if not every:
            array = np.where(valid.reshape(*valid.shape, *[1] * (array.ndim - 2)), array, array.dtype.type(0))
        return torch.from_numpy(in_sequences(array, length))

    observed = partial(rows, every=True)
    first, seen = segments[0], merged("obs")
    numbers = None if first.stack == 1 else stack_numbers(merged("terminated") | merged("truncated"), first.stack)
    return Batch(
        obs=_inputs(seen, dtype, obs_scale, observed) if numbers is None else observed(numbers),
        actions=rows(merged("actions")),
        logprobs=rows(merged("logprobs")),
        values=rows(values),
        advantages=rows(advantages),
        returns=rows(advantages + values),
        weights=None if all_valid else rows(valid.astype(dtype)),
        masks=None if first.masks is None else rows(merged("masks")),
        terminates=bool(terminated.any()),
        rewards=(float(some.min(initial=math.inf)), float(some.max(initial=-math.inf))),
        sequence_length=length,
        recurrent=None if first.states is None else _recurrent_inputs(segments, length),
        gae_inputs=None if first.successors is None else _gae_inputs(segments, estimate, valid, obs_scale),
        stored=None if numbers is None else _flat_tensor(seen),
    )


def _merged(segments: Sequence[Segment], name: str, axis: int = 1) -> np.ndarray:
    """Return the column [T, N * E, ...] of all segments side by side; along axis 0, one after the other."""
    return np.concatenate([getattr(segment, name) for segment in segments], axis=axis)


def _gae_inputs(
    segments: Sequence[Segment], estimate: Callable[..., np.ndarray], valid: np.ndarray, obs_scale: ObsScale | None
) -> GAEInputs:
    """Return what advantages are estimated from again; successors are in the order of the segments."""
    samplers, steps, envs = np.nonzero(np.stack([segment.followed for segment in segments]))
    followed = steps, samplers * segments[0].valid.shape[1] + envs
    merged = _merged(segments, "successors", axis=0)[None]
    successors = _inputs(merged, segments[0].values.dtype, obs_scale, _flat_tensor)
    recurrent = None
    if segments[0].successor_states is not None:
        states = torch.from_numpy(_merged(segments, "successor_states", axis=0))
        recurrent = RecurrentInputs(states, torch.zeros((len(states), 1), dtype=torch.bool))
    return GAEInputs(estimate, valid, successors, followed, recurrent)


def _recurrent_inputs(segments: Sequence[Segment], sequence_length: int) -> RecurrentInputs:
    done = _merged(segments, "terminated") | _merged(segments, "truncated")
    starts = np.zeros_like(done)  # in the first row, the stored state is that of the episode, or zero
    starts[1:] = done[:-1]
    starts = in_sequences(starts, sequence_length).reshape(-1, sequence_length)
    return RecurrentInputs(_flat_tensor(_merged(segments, "states")), torch.from_numpy(starts))


def _inputs(
    obs: Shaped[np.ndarray, "T envs *O"],
    dtype: np.dtype[Any],
    scale: ObsScale | None,
    rows: Callable[[np.ndarray], Tensor],
) -> Tensor | dict[str, Tensor]:
    """Return the network's input: one tensor, or a copy of each leaf by name."""
    of = np.dtype((obs.dtype, obs.shape[2:]))
    return each_leaf(network_inputs(obs, of, dtype, scale_for(scale, of, dtype)), rows)


def _flat_tensor(array: np.ndarray) -> Tensor:
    return torch.from_numpy(in_sequences(array, 1))


def in_sequences(
    array: Shaped[np.ndarray, "T envs *rest"], sequence_length: int
) -> Shaped[np.ndarray, " T*envs *rest"]:
    """Cut `array` into sequences of `sequence_length` steps, laid one after the other."""
    if sequence_length > 1:
        array = array.reshape(-1, sequence_length, *array.shape[1:]).swapaxes(1, 2)  # [T / L, envs, L, ...]
        array = array.reshape(-1, sequence_length, *array.shape[3:])
    return np.ascontiguousarray(array.reshape(-1, *array.shape[2:]))
