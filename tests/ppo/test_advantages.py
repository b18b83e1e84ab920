"""Advantages against the definition in the paper."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dppo.ppo.learning.advantages import Transitions, generalized_advantages


def gae(*rollout: np.ndarray, valid: np.ndarray | None = None, **options: Any) -> np.ndarray:
    """Return the advantages of the arrays of `random_rollout`."""
    rewards, values, next_values, terminated, truncated = rollout
    return generalized_advantages(
        Transitions(rewards, terminated, truncated, valid), values, next_values, **options
    )


def by_definition(*rollout: np.ndarray, gamma: float, gae_lambda: float) -> np.ndarray:
    """Return the weighted mean of the estimates from 1, 2, ... steps (arXiv:1506.02438, eq. 11 to 16).

    The estimate that looks k steps ahead is r[t] + gamma r[t+1] + ... + gamma^k V(what follows) - V[t], weighted by
    (1 - lambda) lambda^(k-1); the longest one, at the end of the data or of the episode, has the weight that is left.
    """
    rewards, values, next_values, terminated, truncated = rollout
    advantages = np.zeros_like(values)
    for t, e in np.ndindex(values.shape):
        estimates = []
        rewards_ahead = 0.0
        for k in range(len(values) - t):
            rewards_ahead += gamma**k * rewards[t + k, e]
            bootstrap = 0.0 if terminated[t + k, e] else gamma ** (k + 1) * next_values[t + k, e]
            estimates.append(rewards_ahead + bootstrap - values[t, e])
            if terminated[t + k, e] or truncated[t + k, e]:
                break
        weights = gae_lambda ** np.arange(len(estimates))
        weights[:-1] *= 1 - gae_lambda
        advantages[t, e] = weights @ estimates
    return advantages


def random_rollout(seed: int, steps: int, envs: int) -> list[np.ndarray]:
    """Return arrays like those of a sampler: `next_values` continues `values` within an episode."""
    rng = np.random.default_rng(seed)
    rewards = rng.normal(size=(steps, envs)) * 3
    values = rng.normal(size=(steps, envs)) * 5
    terminated = rng.random((steps, envs)) < 0.2
    truncated = rng.random((steps, envs)) < 0.2
    next_values = np.concatenate([values[1:], rng.normal(size=(1, envs))])
    next_values[terminated | truncated] = (
        777  # of a final observation; a loud number where it must not be used
    )
    return [rewards, values, next_values, terminated, truncated]


ROLLOUTS = {
    "seed": st.integers(0, 2**32 - 1),
    "steps": st.integers(1, 9),
    "envs": st.integers(1, 3),
    "gamma": st.floats(0, 1),
    "gae_lambda": st.floats(0, 1),
}


@pytest.mark.proves("generalized_advantages")
@given(**ROLLOUTS)
def test_equals_the_definition(
    seed: int, steps: int, envs: int, gamma: float, gae_lambda: float
) -> None:
    rollout = random_rollout(seed, steps, envs)
    expected = by_definition(*rollout, gamma=gamma, gae_lambda=gae_lambda)
    estimated = gae(*rollout, gamma=gamma, gae_lambda=gae_lambda)
    np.testing.assert_allclose(estimated, expected, rtol=1e-9, atol=1e-9)


def v_trace(
    *rollout: np.ndarray, gamma: float, gae_lambda: float, traces: np.ndarray
) -> np.ndarray:
    """Return the sums of discounted, weighted errors (arXiv:1802.01561, eq. 1, less the weight of the first step)."""
    rewards, values, next_values, terminated, truncated = rollout
    advantages = np.zeros_like(values)
    for t, e in np.ndindex(values.shape):
        factor = 1.0
        for j in range(t, len(values)):
            if j > t:
                factor *= gamma * gae_lambda * traces[j, e]
            advantages[t, e] += factor * (rewards[j, e] - values[j, e])
            advantages[t, e] += 0.0 if terminated[j, e] else factor * gamma * next_values[j, e]
            if terminated[j, e] or truncated[j, e]:
                break
    return advantages


@pytest.mark.proves("generalized_advantages")
@given(**ROLLOUTS)
def test_rows_of_older_policies_count_by_their_traces(
    seed: int, steps: int, envs: int, gamma: float, gae_lambda: float
) -> None:
    rollout = random_rollout(seed, steps, envs)
    rates: dict[str, Any] = {"gamma": gamma, "gae_lambda": gae_lambda}
    traces = np.random.default_rng(seed).random((steps, envs))
    expected = v_trace(*rollout, **rates, traces=traces)
    estimated = gae(*rollout, **rates, traces=traces)
    np.testing.assert_allclose(estimated, expected, rtol=1e-9, atol=1e-9)
    on_policy = gae(*rollout, **rates, traces=np.ones((steps, envs)))
    np.testing.assert_array_equal(on_policy, gae(*rollout, **rates))


@pytest.mark.proves("generalized_advantages")
@pytest.mark.parametrize("cut", range(6))
def test_a_time_limit_is_not_a_death(cut: int) -> None:
    """Endless reward of one is worth 1 / (1 - gamma) everywhere: a limit changes no advantage, wherever it falls."""
    gamma = 0.9
    steps = 6
    ones = np.ones((steps, 1))
    worth = np.full((steps, 1), 1 / (1 - 0.9))
    never = np.zeros((steps, 1), bool)
    at = (np.arange(steps) == cut)[:, None]
    limited = gae(ones, worth, worth, never, at, gamma=gamma, gae_lambda=0.95)
    np.testing.assert_allclose(limited, 0, atol=1e-12)
    died = gae(ones, worth, worth, at, never, gamma=gamma, gae_lambda=0.95)
    assert died[cut] == pytest.approx(-gamma / (1 - gamma))
    assert np.all(died[: cut + 1] < -1)
    np.testing.assert_allclose(died[cut + 1 :], 0, atol=1e-12)


def test_the_dtype_is_that_of_the_values_and_inputs_are_not_modified() -> None:
    rewards, values, next_values, *ends = random_rollout(4, 20, 2)
    arrays = [rewards, values.astype(np.float32), next_values.astype(np.float32), *ends]
    copies = [array.copy() for array in arrays]
    estimated = gae(*arrays, gamma=0.99, gae_lambda=0.95)
    assert estimated.dtype == np.float32
    exact = by_definition(rewards, values, next_values, *ends, gamma=0.99, gae_lambda=0.95)
    np.testing.assert_allclose(estimated, exact, rtol=1e-5, atol=1e-4)
    for array, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(array, copy)
