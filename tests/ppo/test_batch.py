"""Batches made from segments: order, normalization, rows with weight zero, sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from meetings import Meeting
from numpy.testing import assert_array_equal

from dppo.config import PPO
from dppo.ppo.exchange.records import Segment
from dppo.ppo.learning.batch import Batch, make_batch
from dppo.ppo.learning.minibatches import aligned_with_ranks
from dppo.ppo.learning.parallel import Parallel

STEPS = 3
ENVS = 2
SHAPE = (STEPS, ENVS)
GAMMA = 0.9


def numbered(sampler: int, dtype: str = "float64", **changes: np.ndarray) -> Segment:
    """Return a segment in which every number identifies sampler, step, environment and element, but for `changes`."""
    steps = np.arange(STEPS)[:, None]
    envs = np.arange(ENVS)
    row = 100.0 * sampler + 10 * steps + envs
    elements = [[0.1, 0.2], [0.3, 0.4]]
    obs = row[..., None, None] + elements
    number = np.arange(STEPS * ENVS).reshape(SHAPE)
    segment = Segment(
        obs=obs.astype(np.float32),
        actions=row.astype(np.int64),
        logprobs=-row.astype(dtype),
        values=(row + 0.5).astype(dtype),
        next_values=(row + 0.25).astype(dtype),
        rewards=row * 3,
        terminated=number % 5 == 1,
        truncated=number % 4 == 2,
        valid=np.ones(SHAPE, bool),
    )
    return replace(segment, **changes)


def batch_of(segments: list[Segment], **arguments: Any) -> Batch:
    ppo = PPO(gamma=GAMMA, gae_lambda=0.8)
    return make_batch(segments, None, None, ppo, **arguments)


def columns_of(value: Any) -> np.ndarray:
    return np.full(SHAPE, value)


NO_SIGNAL: dict[str, Any] = {
    "rewards": columns_of(2.0),
    "terminated": columns_of(False),
    "valid": columns_of(True),
}


class Signal(NamedTuple):
    """A change of one row, settings, and what a batch is expected to say about its rewards."""

    change: dict[str, Any]
    options: dict[str, Any]
    exists: bool
    rewards: tuple[float, float]


SIGNALS = {
    "equal rewards": Signal({}, {}, False, (2, 2)),
    "another reward": Signal({"rewards": 1}, {}, True, (1, 2)),
    "another reward of equal sign": Signal({"rewards": 1}, {"sign_reward": True}, False, (1, 1)),
    "no transition": Signal({"rewards": 1, "valid": False}, {}, False, (2, 2)),
    "a terminal state": Signal({"terminated": True}, {}, True, (2, 2)),
}


@pytest.mark.parametrize("name", SIGNALS)
def test_a_batch_has_signal_if_learned_rewards_differ_or_an_episode_terminates(name: str) -> None:
    signal = SIGNALS[name]
    columns: dict[str, Any] = {}
    for column, values in NO_SIGNAL.items():
        columns[column] = values.copy()
    for column, value in signal.change.items():
        columns[column][1, 1] = value

    segments = [numbered(0, **columns), numbered(1, **columns)]
    ppo = PPO(**signal.options)
    batch = make_batch(segments, None, None, ppo)
    assert batch.has_learning_signal == signal.exists
    assert batch.reward_range == signal.rewards


@pytest.mark.parametrize(
    ("change", "rewards"),
    [
        pytest.param({}, (2, 2), id="equal rewards"),
        pytest.param({"rewards": 3.0}, (2, 3), id="other rewards of a rank"),
        pytest.param({"terminated": True}, (2, 2), id="terminal states of a rank"),
    ],
)
def test_a_batch_has_signal_by_the_rows_of_all_ranks(
    change: dict[str, Any], rewards: tuple[float, float]
) -> None:
    """Rewards of each rank are equal."""

    def rank_batch(parallel: Parallel) -> Batch:
        columns = dict(NO_SIGNAL)
        if parallel.rank == 1:
            for name, value in change.items():
                columns[name] = columns_of(value)
        batch = batch_of([numbered(0, **columns)])
        return aligned_with_ranks(batch, parallel)

    for batch in Meeting(2).all_do(rank_batch):
        assert batch.has_learning_signal == bool(change)
        assert batch.reward_range == rewards
        assert batch.weights is None


def spoilt(segment: Segment, valid: np.ndarray) -> Segment:
    """Put numbers that must not be used into the rows that are not transitions."""
    columns = {}
    for name in ("logprobs", "values", "next_values", "rewards"):
        column = getattr(segment, name)
        columns[name] = np.where(valid, column, np.nan)
    actions = np.where(valid, segment.actions, 10**9)
    return replace(segment, valid=valid, actions=actions, **columns)


def test_rows_that_are_not_transitions_stay_with_weight_zero() -> None:
    """Their contents do not matter, even if they are nan; what they acted on is an observation like any other."""
    segment = numbered(0)
    plain = batch_of([numbered(0)])
    valid = columns_of(True)
    valid[1, 0] = False
    valid[2, 1] = False
    batch = batch_of([spoilt(segment, valid)])
    is_transition = torch.tensor(valid.flatten())
    assert batch.weights is not None
    assert_array_equal(batch.weights, is_transition)

    for name in ("obs", "actions", "logprobs", "values"):
        rows = getattr(batch, name)
        plain_rows = getattr(plain, name)
        assert_array_equal(rows[is_transition], plain_rows[is_transition])

    assert_array_equal(batch.obs, plain.obs)

    for name in ("actions", "logprobs", "values", "advantages", "returns"):
        rows = getattr(batch, name)
        assert not rows[~is_transition].any(), name
    # the recursion ends here, because the successor is not a transition
    reward = segment.rewards[0, 0]
    target = reward + GAMMA * segment.next_values[0, 0]
    delta = target - segment.values[0, 0]
    assert batch.advantages[0] == delta
    assert_array_equal(batch.returns, batch.advantages + batch.values)


def steps_in_sequences(samplers: int) -> Iterator[tuple[int, int, int]]:
    """Yield sampler, environment and step: all steps of an environment come one after the other."""
    yield from product(range(samplers), range(ENVS), range(STEPS))


def test_sequences_are_successive_steps_of_one_environment() -> None:
    valid = columns_of(True)
    valid[2, 0] = False
    segments = [numbered(0), numbered(1, valid=valid)]
    rows = batch_of(segments)
    batch = batch_of(segments, length=STEPS)
    assert rows.sequence_length == 1
    assert rows.sequences == 12
    assert batch.sequence_length == 3
    assert batch.sequences == 4
    assert len(batch) == 12

    names = []
    for sampler, e, t in steps_in_sequences(2):
        names.append(100 * sampler + 10 * t + e)
    invalid = names.index(120)
    names[invalid] = 0
    assert batch.actions.tolist() == names

    places = []
    for sampler, e, t in steps_in_sequences(2):
        places.append(4 * t + 2 * sampler + e)
    for name in ("obs", "actions", "logprobs", "values", "advantages", "returns", "weights"):
        in_sequence = getattr(batch, name)
        by_step = getattr(rows, name)
        assert_array_equal(in_sequence, by_step[places], err_msg=name)
