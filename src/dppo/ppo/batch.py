"""Batch: the rows that SGD trains on, made from segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.advantages import generalized_advantages
from dppo.ppo.inputs import amounts, raw_inputs, scale_for, stays_raw
from dppo.ppo.normalizer import CLIP, ObsScale
from dppo.ppo.segment import Segment
from dppo.spaces import is_amount

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

    def estimate(
        self, values: Float[np.ndarray, " B"], successors: Float[np.ndarray, " n"], length: int
    ) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
        """Return advantages and returns by the values of all rows, in their order in the batch, and of `successors`."""
        steps = _steps(values, length, self.rewards.shape)
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
        return torch.from_numpy(_sequences(advantages, length)), torch.from_numpy(_sequences(returns, length))


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
    length: int = 1
    """L"""
    rollout: Rollout | None = None
    """Of a batch whose advantages are recomputed before each further epoch."""

    def __len__(self) -> int:
        return len(self.logprobs)

    @property
    def sequences(self) -> int:
        """Return S, the number of sequences."""
        return len(self) // self.length

    def to(self, device: torch.device) -> Batch:
        """Return the batch on `device`; on the CPU, the batch itself."""
        if device.type == "cpu":
            return self
        return self._of_each(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))

    def take(self, index: Int64[Tensor, " n"]) -> Batch:
        """Return a copy of the sequences at `index`."""
        if self.length > 1:
            steps = torch.arange(self.length, device=index.device)
            index = (index.unsqueeze(1) * self.length + steps).flatten()
        return self._of_each(lambda tensor: tensor.index_select(0, index))

    def split(self, sizes: list[int]) -> list[Batch]:
        """Return consecutive pieces with `sizes` sequences each, as views."""
        rows = [size * self.length for size in sizes]
        names = [name for name in COLUMNS if getattr(self, name) is not None]
        parts = zip(*(split_rows(getattr(self, name), rows) for name in names), strict=True)
        return [replace(self, **dict(zip(names, columns, strict=True))) for columns in parts]

    def _of_each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        columns = {name: getattr(self, name) for name in COLUMNS}
        changed: dict[str, Any] = {
            name: {leaf: change(one) for leaf, one in column.items()} if isinstance(column, dict) else change(column)
            for name, column in columns.items()
            if column is not None
        }
        return replace(self, **changed)


COLUMNS = tuple(name for name in Batch.__slots__ if name not in ("length", "rollout"))


def take_rows(column: Tensor | dict[str, Tensor], index: Any) -> Tensor | dict[str, Tensor]:
    """Return a copy of the rows at `index`; of several leaves, a dict."""
    if isinstance(column, dict):
        return {name: leaf.index_select(0, index) for name, leaf in column.items()}
    return column.index_select(0, index)


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


def make_batch(
    segments: Sequence[Segment],
    obs_scale: ObsScale | None,
    reward_scale: float | None,
    *,
    gamma: float,
    gae_lambda: float,
    length: int = 1,
    shape_rewards: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Batch:
    """Merge segments into one batch: normalise, estimate advantages and flatten.

    Rows that are not transitions are kept with weight zero, and their contents are replaced by zeros.

    Args:
        segments: of equal T, in sampler order. The order decides that of the rows, and so of every later sum.
        obs_scale: the scale the segments were collected with; None if observations are not normalised.
        reward_scale: divisor of rewards, which are then clipped to +-10; None if they are not normalised.
        length: L, the steps of a sequence; must divide T.
        shape_rewards: transforms raw rewards before they are normalised; None to leave them as they are.
    """
    merged = {
        name: np.concatenate([getattr(segment, name) for segment in segments], axis=1)  # [T, N * E, ...]
        for name in Segment.__slots__
        if name not in ("successors", "masks") or (name == "masks" and segments[0].masks is not None)
    }
    valid = None if merged["valid"].all() else merged["valid"]
    values, dtype = merged["values"], merged["values"].dtype
    rewards = _learnt(merged["rewards"], shape_rewards, reward_scale)
    advantages = generalized_advantages(
        rewards,
        values,
        merged["next_values"],
        merged["terminated"],
        merged["truncated"],
        gamma=gamma,
        gae_lambda=gae_lambda,
        valid=valid,
    )

    def rows(array: np.ndarray) -> Tensor:
        if valid is not None:
            array = np.where(valid.reshape(*valid.shape, *[1] * (array.ndim - 2)), array, array.dtype.type(0))
        return torch.from_numpy(_sequences(array, length))

    return Batch(
        obs=_inputs(merged["obs"], dtype, obs_scale, rows),
        actions=rows(merged["actions"]),
        logprobs=rows(merged["logprobs"]),
        values=rows(values),
        advantages=rows(advantages),
        returns=rows(advantages + values),
        weights=None if valid is None else rows(valid.astype(dtype)),
        masks=rows(merged["masks"]) if "masks" in merged else None,
        length=length,
        rollout=_rollout(segments, merged | {"rewards": rewards}, obs_scale, gamma, gae_lambda),
    )


def _learnt(
    rewards: np.ndarray, shape: Callable[[np.ndarray], np.ndarray] | None, scale: float | None
) -> Float64[np.ndarray, "T envs"]:
    """Return the rewards to learn from."""
    if shape is not None:
        rewards = shape(rewards)
    return rewards if scale is None else np.clip(rewards / scale, -CLIP, CLIP)


def _rollout(
    segments: Sequence[Segment],
    merged: dict[str, np.ndarray],
    obs_scale: ObsScale | None,
    gamma: float,
    gae_lambda: float,
) -> Rollout | None:
    """Return what advantages can be estimated from again; None if the segments hold no successors.

    Args:
        merged: the columns of all segments [T, N * E, ...], with the rewards to learn from.
    """
    successors = [one.successors for one in segments if one.successors is not None]
    if not successors:
        return None
    rewards, terminated, truncated, valid = (merged[name] for name in ("rewards", "terminated", "truncated", "valid"))
    inputs = _inputs(
        np.concatenate(successors)[None],
        segments[0].values.dtype,
        obs_scale,
        lambda array: torch.from_numpy(np.ascontiguousarray(array[0])),
    )
    followed = _followed(segments)
    return Rollout(rewards, terminated, truncated, None if valid.all() else valid, inputs, followed, gamma, gae_lambda)


def _followed(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Return step and environment, among those of all segments, of the rows that `successors` follow."""
    steps, envs, before = [], [], 0
    for segment in segments:
        t, env = np.nonzero(segment.followed)
        steps.append(t)
        envs.append(env + before)
        before += segment.followed.shape[1]
    return np.concatenate(steps), np.concatenate(envs)


def _inputs(
    obs: Shaped[np.ndarray, "T envs *O"],
    dtype: np.dtype[Any],
    scale: ObsScale | None,
    rows: Callable[[np.ndarray], Tensor],
) -> Tensor | dict[str, Tensor]:
    """Return the network's input: one tensor, or a copy of each leaf by name."""
    scale = scale_for(scale, obs.dtype, dtype)
    if stays_raw(np.dtype((obs.dtype, obs.shape[2:]))):
        inputs = raw_inputs(obs, dtype, scale)
        if isinstance(inputs, dict):
            return {name: rows(leaf.astype(dtype) if is_amount(leaf.dtype) else leaf) for name, leaf in inputs.items()}
        return rows(inputs)
    return rows(amounts(obs, dtype, scale))


def _sequences(array: Shaped[np.ndarray, "T envs *rest"], length: int) -> Shaped[np.ndarray, " T*envs *rest"]:
    """Cut `array` into sequences of `length` steps, laid one after the other."""
    if length > 1:
        array = array.reshape(-1, length, *array.shape[1:]).swapaxes(1, 2)  # [T / L, envs, L, ...]
        array = array.reshape(-1, length, *array.shape[3:])
    return np.ascontiguousarray(array.reshape(-1, *array.shape[2:]))


def _steps(rows: Shaped[np.ndarray, " rows"], length: int, shape: tuple[int, ...]) -> Shaped[np.ndarray, "T envs"]:
    """Undo `_sequences`: [T * envs] -> [T, envs], which is `shape`."""
    if length > 1:
        rows = rows.reshape(-1, shape[1], length).swapaxes(1, 2)
    return rows.reshape(shape)
