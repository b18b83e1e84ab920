"""Returns that need no learning: random actions, and each action alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np

from dppo.envs.make import make_env
from dppo.streams import Stream, integer


def mean_returns(env_id: str, episodes: int) -> dict[str, float]:
    """Return the mean returns in the episodes that `dppo eval` plays with seed 0; actions are Discrete."""
    env: Any = make_env(env_id, {})
    generator = np.random.default_rng(0)
    count = env.action_space.n
    means = {
        "random": fmean(
            _play(env, episode, partial(generator.integers, count)) for episode in range(episodes)
        )
    }
    for action in range(count):
        means[f"action {action}"] = fmean(
            _play(env, episode, partial(int, action)) for episode in range(episodes)
        )
    env.close()
    return means


def _play(env: Any, episode: int, choose: Callable[[], Any]) -> float:
    env.reset(seed=integer(0, Stream.EVALUATION, episode))
    episode_return, done = 0.0, False
    while not done:
        _, reward, terminated, truncated, _ = env.step(choose())
        episode_return += float(reward)
        done = terminated or truncated
    return episode_return
