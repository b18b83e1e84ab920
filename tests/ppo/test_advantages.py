"""Advantages against the definition in the paper."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import default_rng
from numpy.testing import assert_allclose, assert_array_equal

from dppo.ppo.learning.advantages import Transitions, generalized_advantages


@dataclass
class Rollout:
    """Arrays [T, E] like those of a sampler: `next_values` continues `values` within an episode."""

    rewards: np.ndarray
    values: np.ndarray
    next_values: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    gamma: float
    gae_lambda: float

    def gae(self, traces: np.ndarray | None = None) -> np.ndarray:
        return generalized_advantages(
            Transitions(self.rewards, self.terminated, self.truncated),
            self.values,
            self.next_values,
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
            traces=traces,
        )

    def bootstrap(self, t: int, e: int) -> float:
        """Return the value of the state after step t; none follows a terminal one."""
        if self.terminated[t, e]:
            return 0.0
        return self.next_values[t, e]

    def ends(self, t: int, e: int) -> bool:
        return self.terminated[t, e] or self.truncated[t, e]


def by_definition(rollout: Rollout) -> np.ndarray:
    """Return the weighted mean of the estimates from 1, 2, ... steps (arXiv:1506.02438, eq. 11 to 16).

    The estimate that looks k steps ahead is r[t] + gamma r[t+1] + ... + gamma^k V(what follows) - V[t], weighted by
    (1 - lambda) lambda^(k-1); the longest one, at the end of the data or of the episode, has the weight that is left.
    """
    gamma = rollout.gamma
    values = rollout.values
    advantages = np.zeros_like(values)

    for t, e in np.ndindex(values.shape):
        estimates = []
        rewards_ahead = 0.0
        for k in range(len(values) - t):
            rewards_ahead += gamma**k * rollout.rewards[t + k, e]
            value_ahead = gamma ** (k + 1) * rollout.bootstrap(t + k, e)
            estimates.append(rewards_ahead + value_ahead - values[t, e])
            if rollout.ends(t + k, e):
                break
        weights = rollout.gae_lambda ** np.arange(len(estimates))
        weights[:-1] *= 1 - rollout.gae_lambda
        advantages[t, e] = weights @ estimates

    return advantages


def random_rollout(
    seed: int, steps: int, envs: int, gamma: float = 0.99, gae_lambda: float = 0.95
) -> Rollout:
    rng = default_rng(seed)
    shape = (steps, envs)
    rewards = rng.normal(size=shape) * 3
    values = rng.normal(size=shape) * 5
    terminated = rng.random(shape) < 0.2
    truncated = rng.random(shape) < 0.2
    last_values = rng.normal(size=(1, envs))
    next_values = np.concatenate([values[1:], last_values])
    # of a final observation; a loud number where it must not be used
    next_values[terminated | truncated] = 777
    return Rollout(rewards, values, next_values, terminated, truncated, gamma, gae_lambda)


SEEDS = st.integers(0, 2**32 - 1)
ROLLOUTS = st.builds(
    random_rollout,
    seed=SEEDS,
    steps=st.integers(1, 9),
    envs=st.integers(1, 3),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
)


@pytest.mark.proves("generalized_advantages")
@given(ROLLOUTS)
def test_equals_the_definition(rollout: Rollout) -> None:
    expected = by_definition(rollout)
    assert_allclose(rollout.gae(), expected, rtol=1e-9, atol=1e-9)


def v_trace(rollout: Rollout, traces: np.ndarray) -> np.ndarray:
    """Return the sums of discounted, weighted errors (arXiv:1802.01561, eq. 1, less the weight of the first step)."""
    gamma = rollout.gamma
    values = rollout.values
    advantages = np.zeros_like(values)

    for t, e in np.ndindex(values.shape):
        factor = 1.0
        for j in range(t, len(values)):
            if j > t:
                factor *= gamma * rollout.gae_lambda * traces[j, e]
            target = rollout.rewards[j, e] + gamma * rollout.bootstrap(j, e)
            error = target - values[j, e]
            advantages[t, e] += factor * error
            if rollout.ends(j, e):
                break

    return advantages


@pytest.mark.proves("generalized_advantages")
@given(ROLLOUTS, SEEDS)
def test_rows_of_older_policies_count_by_their_traces(rollout: Rollout, seed: int) -> None:
    traces = default_rng(seed).random(rollout.values.shape)
    expected = v_trace(rollout, traces)
    assert_allclose(rollout.gae(traces), expected, rtol=1e-9, atol=1e-9)
    on_policy = np.ones_like(traces)
    assert_array_equal(rollout.gae(on_policy), rollout.gae())


@pytest.mark.proves("generalized_advantages")
@pytest.mark.parametrize("cut", range(6))
def test_a_time_limit_is_not_a_death(cut: int) -> None:
    """Endless reward of one is worth 1 / (1 - gamma) everywhere: a limit changes no advantage, wherever it falls."""
    gamma = 0.9
    worth = 1 / (1 - gamma)
    ones = np.ones((6, 1))
    values = worth * ones
    never = np.zeros((6, 1), bool)
    at_cut = never.copy()
    at_cut[cut] = True

    limited = Rollout(ones, values, values, never, at_cut, gamma, 0.95)
    assert_allclose(limited.gae(), 0, atol=1e-12)

    died = Rollout(ones, values, values, at_cut, never, gamma, 0.95)
    advantages = died.gae()
    assert advantages[cut] == pytest.approx(-gamma * worth)
    assert np.all(advantages[: cut + 1] < -1)

    after_death = advantages[cut + 1 :]
    assert_allclose(after_death, 0, atol=1e-12)


def arrays_of(rollout: Rollout) -> list[np.ndarray]:
    values: list[Any] = [getattr(rollout, field.name) for field in fields(rollout)]
    return [value for value in values if isinstance(value, np.ndarray)]


def test_the_dtype_is_that_of_the_values_and_inputs_are_not_modified() -> None:
    exact = random_rollout(4, 20, 2)
    single = replace(
        exact,
        values=exact.values.astype(np.float32),
        next_values=exact.next_values.astype(np.float32),
    )
    copies = [array.copy() for array in arrays_of(single)]
    estimated = single.gae()
    assert estimated.dtype == np.float32
    assert_allclose(estimated, by_definition(exact), rtol=1e-5, atol=1e-4)
    for array, copy in zip(arrays_of(single), copies, strict=True):
        assert_array_equal(array, copy)
