"""Generalised advantage estimation."""

from __future__ import annotations

import numpy as np


def generalized_advantages(
    rewards: np.ndarray,
    values: np.ndarray,
    next_values: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    *,
    gamma: float,
    gae_lambda: float,
) -> np.ndarray:
    """How much better than expected each action turned out.

        delta[t] = rewards[t] + gamma * next_values[t] * (not terminated[t]) - values[t]
        adv[t]   = delta[t] + gamma * lambda * (not (terminated[t] or truncated[t])) * adv[t+1]

    `next_values[t]` is the value of the true successor of step t, also at a time limit, so that neither a time
    limit nor the end of the segment needs a special case, and neither is mistaken for a death.

    Source: Schulman et al., arXiv:1506.02438, eq. 16; PPO, arXiv:1707.06347, eq. 11 and 12. Time limits: Pardo et
    al., arXiv:1712.00378.
    Args: six arrays of the same shape [T, ...]. Returns: [T, ...] in the dtype of `values`.
    """
    dtype = values.dtype
    deltas = rewards.astype(dtype) + dtype.type(gamma) * next_values * ~terminated - values
    discounts = dtype.type(gamma * gae_lambda) * ~(terminated | truncated)
    advantages = np.empty_like(values)
    following = np.zeros_like(values[0])
    for t in range(len(values) - 1, -1, -1):
        following = deltas[t] + discounts[t] * following
        advantages[t] = following
    return advantages
