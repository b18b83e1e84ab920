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
from dppo.ppo.learning.advantages import Transitions, generalized_advantages
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


@pytest.mark.parametrize(
    ("changes", "informed"),
    [
        ({}, False),
        ({"rewards": 1}, True),
        ({"terminated": True}, True),
        ({"rewards": 1, "valid": False}, False),
    ],
)
@pytest.mark.parametrize("reward", [0, 2])
def test_a_batch_is_informed_if_rewards_differ_or_an_episode_terminates(
    changes: dict[str, Any], informed: bool, reward: float
) -> None:
    columns: dict[str, Any] = {
        "rewards": np.full((STEPS, ENVS), reward, float),
        "terminated": np.zeros((STEPS, ENVS), bool),
    }
    columns["valid"] = np.ones((STEPS, ENVS), bool)
    for name, value in changes.items():
        columns[name][1, 1] = value
    batch = batch_of([numbered(0, **columns), numbered(1, **columns)])
    assert batch.has_learning_signal == informed
    counted = columns["rewards"][columns["valid"]]
    assert batch.rewards == (counted.min(), counted.max())


def test_ranks_are_informed_by_the_rewards_of_all() -> None:
    """Those of each rank may be equal: zero in one, one in the other."""

    def of_rank(parallel: Parallel) -> tuple[bool, tuple[float, float]]:
        never = np.zeros((STEPS, ENVS), bool)
        reward = float(parallel.rank)
        segment = dataclasses.replace(
            numbered(0), rewards=np.full((STEPS, ENVS), reward), terminated=never
        )
        share = make_batch([segment], None, None, PPO())
        assert (share.has_learning_signal, share.rewards) == (False, (reward, reward))
        whole = aligned_with_ranks(share, parallel)
        return whole.has_learning_signal, whole.rewards

    assert Meeting(2).all_do(of_rank) == [(True, (0.0, 1.0))] * 2


def test_a_batch_is_informed_by_the_rewards_that_are_learned_from() -> None:
    rewards = 0.5 + np.arange(STEPS * ENVS).reshape(STEPS, ENVS)
    nothing = np.zeros((STEPS, ENVS), bool)
    segments = [numbered(0, rewards=rewards, terminated=nothing)]
    informed = [
        make_batch(segments, None, None, PPO(sign_reward=sign)).has_learning_signal
        for sign in (False, True)
    ]
    assert informed == [True, False]


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
    first_row = generalized_advantages(
        Transitions(segment.rewards[:1], segment.terminated[:1], segment.truncated[:1]),
        segment.values[:1],
        segment.next_values[:1],
        gamma=0.9,
        gae_lambda=0.8,
    )
    # the recursion ends here, because the successor is not a transition
    assert batch.advantages[0] == first_row[0, 0]
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
