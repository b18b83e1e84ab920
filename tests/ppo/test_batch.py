"""From segments to rows: order, normalisation, and what is left out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from dppo.ppo.advantages import generalized_advantages
from dppo.ppo.batch import make_batch
from dppo.ppo.normalizer import Moments, Statistics
from dppo.ppo.segment import Segment

STEPS, ENVS = 3, 2


def numbered(sampler: int, dtype: str = "float64") -> Segment:
    """A segment in which every number tells sampler, step, environment and element."""
    row = 100.0 * sampler + 10 * np.arange(STEPS)[:, None] + np.arange(ENVS)
    return Segment(
        obs=(row[..., None, None] + [[0.1, 0.2], [0.3, 0.4]]).astype(np.float32),
        actions=row.astype(np.int64),
        logprobs=-row.astype(dtype),
        values=(row + 0.5).astype(dtype),
        next_values=(row + 0.25).astype(dtype),
        rewards=row * 3,
        terminated=np.arange(STEPS * ENVS).reshape(STEPS, ENVS) % 5 == 1,
        truncated=np.arange(STEPS * ENVS).reshape(STEPS, ENVS) % 4 == 2,
        valid=np.ones((STEPS, ENVS), bool),
    )


def test_rows_go_by_step_then_sampler_then_environment() -> None:
    batch = make_batch([numbered(0), numbered(1)], Statistics(), gamma=0.9, gae_lambda=0.8)
    names = [100 * s + 10 * t + e for t in range(STEPS) for s in range(2) for e in range(ENVS)]
    assert len(batch) == len(names)
    assert batch.actions.tolist() == names
    assert batch.logprobs.tolist() == [-name for name in names]
    assert batch.values.tolist() == [name + 0.5 for name in names]
    np.testing.assert_allclose(
        batch.obs, [[name + 0.1, name + 0.2, name + 0.3, name + 0.4] for name in names], rtol=1e-6
    )


def test_advantages_are_those_of_each_segment_alone() -> None:
    segments = [numbered(0), numbered(1)]
    batch = make_batch(segments, Statistics(), gamma=0.9, gae_lambda=0.8)
    alone = [
        generalized_advantages(
            one.rewards, one.values, one.next_values, one.terminated, one.truncated, gamma=0.9, gae_lambda=0.8
        )
        for one in segments
    ]
    np.testing.assert_array_equal(batch.advantages, np.concatenate(alone, axis=1).reshape(-1))
    np.testing.assert_array_equal(batch.returns, batch.advantages + batch.values)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_statistics_scale_rewards_and_standardise_observations(dtype: str) -> None:
    segment = numbered(0, dtype)
    mean, std = np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[2.0, 3.0], [0.5, 1e3]])
    statistics = Statistics(Moments(4.0, mean, std**2 * 4), Moments(2.0, np.float64(0), np.float64(32)))
    batch = make_batch([segment], statistics, gamma=0.9, gae_lambda=0.8)
    expected = np.clip((segment.obs.reshape(-1, 4) - mean.ravel()) / std.ravel(), -10, 10)
    np.testing.assert_allclose(batch.obs, expected, rtol=1e-4)
    assert float(batch.obs.max()) == 10
    scaled = dataclasses.replace(segment, rewards=np.clip(segment.rewards / 4, -10, 10))
    plain = make_batch([scaled], Statistics(), gamma=0.9, gae_lambda=0.8)
    np.testing.assert_allclose(batch.advantages, plain.advantages, rtol=1e-5, atol=1e-5)
    assert {str(getattr(batch, name).numpy().dtype) for name in ("obs", "advantages", "returns", "values")} == {dtype}


def test_rows_that_are_no_transitions_are_left_out() -> None:
    segment = numbered(0)
    valid = segment.valid.copy()
    valid[1, 0] = valid[2, 1] = False
    batch = make_batch([dataclasses.replace(segment, valid=valid)], Statistics(), gamma=0.9, gae_lambda=0.8)
    assert batch.actions.tolist() == [0, 1, 11, 20]
    assert {len(getattr(batch, field.name)) for field in dataclasses.fields(batch)} == {4}


def test_segments_are_only_read() -> None:
    """Arrays that come from Ray cannot be written."""
    segment = numbered(0)
    for field in dataclasses.fields(segment):
        getattr(segment, field.name).flags.writeable = False
    statistics = Statistics(
        Moments(4.0, np.zeros((2, 2)), np.ones((2, 2))), Moments(2.0, np.float64(0), np.float64(32))
    )
    batch = make_batch([segment], statistics, gamma=0.9, gae_lambda=0.8)
    batch.values.zero_()
    assert segment.values.min() == 0.5
