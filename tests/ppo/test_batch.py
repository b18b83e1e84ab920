"""Batches made from segments: order, normalization, rows with weight zero, sequences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from meetings import Meeting

from dppo.config import PPO
from dppo.ppo.exchange.records import Segment
from dppo.ppo.learning.batch import Batch, make_batch
from dppo.ppo.learning.minibatches import aligned_with_ranks
from dppo.ppo.learning.parallel import Parallel

STEPS = 3
ENVS = 2


def numbered(sampler: int, dtype: str = "float64", **changes: np.ndarray) -> Segment:
    """Return a segment in which every number identifies sampler, step, environment and element, but for `changes`."""
    row = 100.0 * sampler + 10 * np.arange(STEPS)[:, None] + np.arange(ENVS)
    segment = Segment(
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
    return dataclasses.replace(segment, **changes)


def batch_of(segments: list[Segment], **arguments: Any) -> Batch:
    return make_batch(segments, None, None, PPO(gamma=0.9, gae_lambda=0.8), **arguments)


NO_SIGNAL: dict[str, Any] = {
    "rewards": np.full((STEPS, ENVS), 2.0),
    "terminated": np.zeros((STEPS, ENVS), bool),
    "valid": np.ones((STEPS, ENVS), bool),
}


@pytest.mark.parametrize(
    ("changes", "options", "signal", "rewards"),
    [
        ({}, {}, False, (2, 2)),
        ({"rewards": 1}, {}, True, (1, 2)),
        ({"rewards": 1}, {"sign_reward": True}, False, (1, 1)),
        ({"rewards": 1, "valid": False}, {}, False, (2, 2)),
        ({"terminated": True}, {}, True, (2, 2)),
    ],
)
def test_a_batch_has_signal_if_learned_rewards_differ_or_an_episode_terminates(
    changes: dict[str, Any], options: dict[str, Any], signal: bool, rewards: tuple[float, float]
) -> None:
    columns: dict[str, Any] = {name: column.copy() for name, column in NO_SIGNAL.items()}
    for name, value in changes.items():
        columns[name][1, 1] = value
    segments = [numbered(0, **columns), numbered(1, **columns)]
    batch = make_batch(segments, None, None, PPO(**options))
    assert batch.has_learning_signal == signal
    assert batch.rewards == rewards


@pytest.mark.parametrize(
    ("change", "rewards"),
    [({}, (2, 2)), ({"rewards": 3.0}, (2, 3)), ({"terminated": True}, (2, 2))],
)
def test_a_batch_has_signal_by_the_rows_of_all_ranks(
    change: dict[str, Any], rewards: tuple[float, float]
) -> None:
    """Rewards of each rank are equal."""

    def of_rank(parallel: Parallel) -> Batch:
        columns = dict(NO_SIGNAL)
        if parallel.rank == 1:
            columns |= {name: np.full((STEPS, ENVS), value) for name, value in change.items()}
        return aligned_with_ranks(batch_of([numbered(0, **columns)]), parallel)

    for batch in Meeting(2).all_do(of_rank):
        assert (batch.has_learning_signal, batch.rewards) == (bool(change), rewards)
        assert batch.weights is None


def test_rows_that_are_not_transitions_stay_with_weight_zero() -> None:
    """Their contents do not matter, even if they are nan; what they acted on is an observation like any other."""
    segment = numbered(0)
    plain = batch_of([numbered(0)])
    valid = segment.valid.copy()
    valid[1, 0] = valid[2, 1] = False
    changes: dict[str, np.ndarray] = {"valid": valid}
    for name in ("logprobs", "values", "next_values", "rewards"):
        changes[name] = getattr(segment, name).copy()
        changes[name][~valid] = np.nan
    changes["actions"] = np.where(valid, segment.actions, 10**9)
    batch = batch_of([dataclasses.replace(segment, **changes)])
    kept = torch.tensor(valid.reshape(-1))
    assert batch.weights is not None
    np.testing.assert_array_equal(batch.weights, kept)
    for name in ("obs", "actions", "logprobs", "values"):
        np.testing.assert_array_equal(getattr(batch, name)[kept], getattr(plain, name)[kept])
    np.testing.assert_array_equal(batch.obs, plain.obs)
    for name in ("actions", "logprobs", "values", "advantages", "returns"):
        assert not getattr(batch, name)[~kept].any(), name
    # the recursion ends here, because the successor is not a transition
    delta = segment.rewards[0, 0] + 0.9 * segment.next_values[0, 0] - segment.values[0, 0]
    assert batch.advantages[0] == delta
    np.testing.assert_array_equal(batch.returns, batch.advantages + batch.values)


def test_sequences_are_successive_steps_of_one_environment() -> None:
    segments = [numbered(0), numbered(1)]
    valid = segments[1].valid.copy()
    valid[2, 0] = False
    segments[1] = dataclasses.replace(segments[1], valid=valid)
    rows = batch_of(segments)
    batch = batch_of(segments, length=STEPS)
    assert (rows.sequence_length, rows.sequences) == (1, 12)
    assert (batch.sequence_length, batch.sequences, len(batch)) == (3, 4, 12)
    names = [100 * s + 10 * t + e for s in range(2) for e in range(ENVS) for t in range(STEPS)]
    names[names.index(120)] = 0
    assert batch.actions.tolist() == names
    places = [t * 4 + s * 2 + e for s in range(2) for e in range(ENVS) for t in range(STEPS)]
    for name in ("obs", "actions", "logprobs", "values", "advantages", "returns", "weights"):
        np.testing.assert_array_equal(
            getattr(batch, name), getattr(rows, name)[places], err_msg=name
        )
