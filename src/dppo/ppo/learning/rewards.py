"""Shape the rewards that are learned from. Episode returns and metrics stay those of the raw rewards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dppo.config.parts import PPO

if TYPE_CHECKING:  # shapes are checked in tests only
    from jaxtyping import Float


def shaped_rewards(
    rewards: Float[np.ndarray, "*any"], *, sign: bool, limit: float | None, scale: float
) -> Float[np.ndarray, "*any"]:
    """Return the sign of rewards, or rewards within +-`limit`; in either case times `scale`.

    Source: Mnih et al. (2015), "Human-level control through deep reinforcement learning", for the sign.
    """
    if sign:
        rewards = np.sign(rewards)
    elif limit is not None:
        rewards = np.clip(rewards, -limit, limit)
    return rewards * scale


def reward_shaping(ppo: PPO) -> Callable[[np.ndarray], np.ndarray] | None:
    """Return what the settings do to rewards before they are normalized; None: nothing."""
    if not ppo.sign_reward and ppo.clip_reward is None and ppo.scale_reward == 1:
        return None
    return partial(shaped_rewards, sign=ppo.sign_reward, limit=ppo.clip_reward, scale=ppo.scale_reward)
