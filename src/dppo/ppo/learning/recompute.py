"""Batches measured again by the network as it is now: their advantages, or the ratios of an older policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dppo.ppo.exchange.inputs import each_leaf
from dppo.ppo.exchange.scales import ValueScale
from dppo.ppo.learning.batch import Batch, in_sequences
from dppo.ppo.learning.model import PPOModel
from dppo.ppo.networks.network import RecurrentInputs

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float

MOST_IMPORTANCE = 2.0


def with_new_advantages(batch: Batch, model: PPOModel, rows: int, scale: ValueScale | None = None) -> Batch:
    """Return the batch with advantages and returns by the values of `model`; the old values stay.

    Source: Andrychowicz et al., arXiv:2006.05990, section 3.5.

    With memory, sequences and successors start from the states that were stored with them, as in training.

    `rows`: most to pass to `model` at once. `scale`: the unit of its values and of the returns; None: that of rewards.
    """
    _, advantages, returns = estimates(batch, model, rows, scale)
    return replace(batch, advantages=advantages, returns=returns if scale is None else scale.standardize(returns))


def estimates(
    batch: Batch, model: PPOModel, rows: int, scale: ValueScale | None
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"], Float[Tensor, " B"]]:
    """Return values by `model`, and advantages and returns by these, in units of rewards."""
    inputs, device, length = batch.gae_inputs, batch.logprobs.device, batch.sequence_length
    assert inputs is not None, "the batch keeps nothing to estimate advantages from"

    def successors_from(start: int) -> Tensor:
        def part(leaf: Tensor) -> Tensor:
            return leaf[start : start + rows].to(device)

        recurrent = None if inputs.recurrent is None else RecurrentInputs(*map(part, inputs.recurrent))
        return model.values(each_leaf(inputs.successors, part), recurrent)

    def in_steps(column: np.ndarray) -> np.ndarray:  # [T, envs]
        if length > 1:  # undo `in_sequences`
            column = column.reshape(-1, inputs.valid.shape[1], length).swapaxes(1, 2)
        return column.reshape(inputs.valid.shape)

    values = torch.cat([model.values(piece.obs, piece.recurrent) for piece in batch.pieces(rows)])
    successors = torch.cat([successors_from(start) for start in range(0, len(inputs.followed[0]), rows)])
    if scale is not None:
        values, successors = scale.restore(values), scale.restore(successors)
    steps, traces = in_steps(values.numpy(force=True)), None if inputs.traces is None else in_steps(inputs.traces)
    next_values = np.empty_like(steps)
    next_values[:-1] = steps[1:]
    next_values[inputs.followed] = successors.numpy(force=True)
    gae = inputs.estimate(values=steps, next_values=next_values, traces=traces)
    targets = np.where(inputs.valid, (gae if traces is None else traces * gae) + steps, steps.dtype.type(0))
    advantages, returns = (torch.from_numpy(in_sequences(one, length)).to(device) for one in (gae, targets))
    return values, advantages, returns


def from_current_policy(batch: Batch, model: PPOModel, rows: int) -> Batch:
    """Return the batch with ratios measured from the current policy, and weights that correct for the older one.

        L = mean(max(-w A r, -w A clip(r, 1 - c, 1 + c)))        r = pi / pi_now        w = min(pi_now / pi_old, 2)

    With ratios to `pi_old`, an update away from `pi_now`, most of the clipping range would be spent from the start.

    Source: Hilton, Cobbe, Schulman, arXiv:2110.00641 (the decoupled objective).
    Deviation: w is limited to 2, because where an update moves the policy far, a few rows would outweigh the rest.

    `model`: `pi_now`. `rows`: most to pass to it at once.
    """
    now = model.log_probs(batch.pieces(rows))
    if batch.weights is not None:  # rows that are not transitions hold zeros, which no policy has chosen
        now = torch.where(batch.weights > 0, now, batch.logprobs)
    return replace(batch, logprobs=now, importance=(now - batch.logprobs).exp().clamp(max=MOST_IMPORTANCE))
