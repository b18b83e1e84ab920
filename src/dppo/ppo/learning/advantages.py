"""The rewards that are learned from, and generalized advantage estimation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Bool, Float


class RewardShape(Protocol):
    """The settings of the rewards that are learned from."""

    @property
    def sign_reward(self) -> bool: ...
    @property
    def clip_reward(self) -> float | None: ...
    @property
    def scale_reward(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Transitions:
    """The consequences of the actions of T steps, from which advantages are estimated."""

    rewards: Float[np.ndarray, " T *E"]
    """Rewards as they are learned from: shaped and scaled."""
    terminated: Bool[np.ndarray, " T *E"]
    truncated: Bool[np.ndarray, " T *E"]
    valid: Bool[np.ndarray, " T *E"] | None = None
    """False for a row that is not a transition; None if all rows are."""


def generalized_advantages(
    transitions: Transitions,
    values: Float[np.ndarray, " T *E"],
    next_values: Float[np.ndarray, " T *E"],
    *,
    gamma: float,
    gae_lambda: float,
    traces: Float[np.ndarray, " T *E"] | None = None,
) -> Float[np.ndarray, " T *E"]:
    """Estimate the advantage of each action by GAE.

        delta[t] = rewards[t] + gamma * next_values[t] * (not terminated[t]) - values[t]
        adv[t]   = delta[t] + gamma * lambda * (not (terminated[t] or truncated[t])) * traces[t+1] * adv[t+1]

    `next_values[t]` is the value of the true successor of step t, also at a time limit. So neither a time limit nor the
    end of the segment needs a special case, and neither is treated as a terminal state.

    A row that is not `valid` is not a transition. Its advantage is zero, and it ends the recursion for the row before
    it, as a time limit does: that row bootstraps from its `next_values` alone. What an invalid row holds has no effect.

    Source: Schulman et al., arXiv:1506.02438, eq. 16; PPO, arXiv:1707.06347, eq. 11 and 12. Time limits: Pardo et
    al., arXiv:1712.00378. Traces (c of V-trace; None: all one): Espeholt et al., arXiv:1802.01561, eq. 1.
    Returns: advantages in the dtype of `values`.
    """
    dtype = values.dtype
    terminated = transitions.terminated
    deltas = (
        transitions.rewards.astype(dtype) + dtype.type(gamma) * next_values * ~terminated - values
    )
    discounts = dtype.type(gamma * gae_lambda) * ~(terminated | transitions.truncated)
    if transitions.valid is not None:
        deltas = np.where(transitions.valid, deltas, dtype.type(0))
        discounts = discounts * transitions.valid
    if traces is not None:
        discounts[:-1] *= traces[1:]
    advantages = np.empty_like(values)
    following = np.zeros_like(values[0])
    for t in range(len(values) - 1, -1, -1):
        following = deltas[t] + discounts[t] * following
        advantages[t] = following
    return advantages


def shaped_rewards(
    rewards: Float[np.ndarray, "*any"], shape: RewardShape
) -> Float[np.ndarray, "*any"]:
    """Return the sign of rewards, or rewards within +-`clip_reward`; in either case times `scale_reward`.

    Only learning uses them: episode returns and metrics stay those of the raw rewards.

    Source: Mnih et al. (2015), "Human-level control through deep reinforcement learning", for the sign.
    """
    if shape.sign_reward:
        rewards = np.sign(rewards)
    elif shape.clip_reward is not None:
        rewards = np.clip(rewards, -shape.clip_reward, shape.clip_reward)
    return rewards * shape.scale_reward
