"""Kept rows: what each row led to, which rows are kept, and that storage does not matter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from plain import Row, World

from dppo import Config
from dppo.config.memory import kept_row_bytes
from dppo.sac.rows import LOGPROBS, KeptRows, LaterRows, rows_of_rank
from dppo.spaces.actions import BoxActions
from dppo.spaces.spaces import Spaces, leaves

VECTOR = np.dtype((np.float32, (3,)))
DICT = np.dtype([("speed", np.float32, ()), ("place", np.float64, (2,))])
OBS = pytest.mark.parametrize("dtype", [VECTOR, DICT], ids=["vector", "dict"])
ALL = 10**6


def kept(world: World, lengths: list[int], limit: int = ALL) -> KeptRows:
    rows = KeptRows(limit, world.dtype)
    for length in lengths:
        rows.append(world.segments(length))
    return rows


def same(a: Any, b: Any) -> bool:
    return bool(np.asarray(a).tobytes() == np.asarray(b).tobytes())


def check(rows: KeptRows, expected: list[Row]) -> None:
    """Compare all transitions with a list of them."""
    places = rows.transitions()
    assert len(places) == len(expected)
    drawn = rows.draw(places)
    assert (drawn.num_steps == 1).all()
    for number, row in enumerate(expected):
        assert same(drawn.obs[number], row.obs)
        assert_array_equal(drawn.actions[number], row.action)
        assert drawn.rewards[0, number] == row.reward
        assert drawn.terminated[number] == row.terminated
        assert row.terminated or same(drawn.successors[number], row.successor)


@OBS
def test_each_row_has_its_true_successor(dtype: np.dtype[Any]) -> None:
    world = World(dtype, ends=0.2, invalid=0.1)
    rows = kept(world, [6] * 5)
    check(rows, world.rows)
    assert len(world.rows) < 6 * 5 * 4  # some are no transitions


def test_each_observation_is_stored_once() -> None:
    world = World(VECTOR, ends=0.0)
    state = kept(world, [6] * 5).state()
    assert len(state["rows.exits"]) == 4  # the successors of the newest step
    truncated = World(VECTOR, ends=0.3)
    segments = [truncated.segments(6) for _ in range(5)]
    ends = sum(
        int((segment.truncated & ~segment.terminated).sum())
        for iteration in segments
        for segment in iteration
    )
    rows = KeptRows(ALL, VECTOR)
    for iteration in segments:
        rows.append(iteration)
    assert ends <= len(rows.state()["rows.exits"]) <= ends + 4


def test_a_segment_that_begins_elsewhere_leaves_the_older_row_its_successor() -> None:
    """As after the loss of an actor whose environments cannot be rebuilt."""
    world = World(VECTOR, ends=0.0)
    rows = kept(world, [3])
    world.now[1] = world.now[1] + 1  # of the second sampler
    rows.append(world.segments(3))
    check(rows, world.rows)
    assert len(rows.state()["rows.exits"]) == 2 + 4


@OBS
def test_the_oldest_steps_leave_first(dtype: np.dtype[Any]) -> None:
    world = World(dtype, ends=0.2)
    rows = kept(world, [6] * 7, limit=4 * 14)
    check(rows, world.rows[-4 * 14 :])
    assert len(rows.state()["rows.valid"]) == 14


def test_an_iteration_is_kept_even_if_it_is_larger_than_the_limit() -> None:
    world = World(VECTOR)
    check(kept(world, [6] * 3, limit=5), world.rows[-4 * 6 :])


@OBS
@pytest.mark.parametrize("limit", [ALL, 4 * 8])
def test_neither_chunks_nor_a_checkpoint_change_what_is_drawn(
    dtype: np.dtype[Any], limit: int
) -> None:
    lengths = [6, 6, 6, 6]
    whole = kept(World(dtype, ends=0.2, invalid=0.1), lengths, limit)
    resumed = World(dtype, ends=0.2, invalid=0.1)
    state = kept(resumed, lengths[:2], limit).state()
    for array in state.values():
        array.flags.writeable = False
    rows = KeptRows(limit, dtype)
    rows.load(state)
    for length in lengths[2:]:
        rows.append(resumed.segments(length))
    assert same(len(rows.transitions()), len(whole.transitions()))
    for n_step in (1, 3):
        drawn = rows.draw(rows.transitions(), n_step)
        expected = whole.draw(whole.transitions(), n_step)
        assert all(same(*columns) for columns in zip(drawn, expected, strict=True))
    expected_state = whole.state()
    assert list(rows.state()) == list(expected_state)
    assert all(same(array, expected_state[name]) for name, array in rows.state().items())


def test_a_smaller_limit_after_a_resume_drops_the_oldest() -> None:
    world = World(VECTOR)
    rows = KeptRows(4 * 8, VECTOR)
    rows.load(kept(world, [6] * 3).state())
    check(rows, world.rows[-4 * 8 :])
    rows.append(world.segments(6))
    check(rows, world.rows[-4 * 8 :])


def test_several_steps_stop_where_the_episode_does() -> None:
    world = World(VECTOR, num_samplers=1, num_envs=1, ends=0.25, invalid=0.15, seed=3)
    n_step = 3
    rows = kept(world, [5] * 6)
    drawn = rows.draw(rows.transitions(), n_step)
    for number in range(len(world.rows)):
        chain = [world.rows[number]]
        for following in world.rows[number + 1 : number + n_step]:
            continues = not chain[-1].terminated and same(chain[-1].successor, following.obs)
            if not continues:
                break
            chain.append(following)
        assert drawn.num_steps[number] == len(chain)
        rewards = [row.reward for row in chain] + [0.0] * (n_step - len(chain))
        assert_array_equal(drawn.rewards[:, number], rewards)
        assert drawn.terminated[number] == chain[-1].terminated
        assert chain[-1].terminated or same(drawn.successors[number], chain[-1].successor)
    assert set(drawn.num_steps) == {1, 2, 3}


def test_rows_of_a_checkpoint_without_log_probabilities_have_the_likelihood_zero() -> None:
    world = World(VECTOR, ends=0.0)
    state = kept(world, [6, 6]).state()
    del state[LOGPROBS]
    rows = KeptRows(ALL, VECTOR)
    rows.load(state)
    rows.append(world.segments(6))
    relative = []

    def extends(step: int, numbers: np.ndarray, later: LaterRows) -> np.ndarray:
        relative.append(np.exp(np.minimum(0.0, -later.logprobs)))
        return np.ones(len(numbers), bool)

    places = rows.transitions()
    rows.draw(places[: 4 * 11], 2, extends)
    assert (relative.pop() == 0).all()
    rows.draw(places[4 * 12 : 4 * 16], 2, extends)
    assert (relative.pop() > 0).all()


@OBS
def test_bytes_of_a_row_are_those_of_the_arrays(dtype: np.dtype[Any]) -> None:
    world = World(dtype, ends=0.0)
    state = kept(world, [50]).state()
    columns = [name for name in state if "exit" not in name]
    stored = sum(state[name].nbytes for name in columns) / len(world.rows)
    assert len(columns) == 5 + len(leaves(dtype))
    actions = BoxActions(np.zeros(2), np.ones(2), bounds="squash")
    config = Config(env_id="CartPole-v1", dtype="float64")
    assert kept_row_bytes(config, Spaces(dtype, actions)) == stored


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_get_the_rows_of_their_samplers(ranks: int) -> None:
    """The rows of all, cut into parts, are those that each rank would keep by itself, also after drops."""
    worlds = [World(VECTOR, num_samplers=1, num_envs=2, seed=number) for number in range(4)]
    rows_of_all = KeptRows(8 * 10, VECTOR)
    share = len(worlds) // ranks
    rows = [KeptRows(8 * 10 // ranks, VECTOR) for _ in range(ranks)]
    assert rows_of_rank(rows_of_all.state(), 0, ranks) == {}
    for _ in range(5):
        segments = [world.segments(3)[0] for world in worlds]
        rows_of_all.append(segments)
        for rank, rows_alone in enumerate(rows):
            rows_alone.append(segments[rank * share : (rank + 1) * share])
    for rank, rows_alone in enumerate(rows):
        expected = rows_alone.state()
        loaded = KeptRows(8 * 10 // ranks, VECTOR)
        loaded.load(rows_of_rank(rows_of_all.state(), rank, ranks))
        assert len(expected["rows.exits"]) > 0
        assert_equal(loaded.state(), expected)
        # what follows is kept as well
        segments = [world.segments(3)[0] for world in worlds[rank * share : (rank + 1) * share]]
        for of_rank in (rows_alone, loaded):
            of_rank.append(segments)
        assert_equal(loaded.state(), rows_alone.state())


def assert_equal(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert {name: array.tobytes() for name, array in state.items()} == {
        name: array.tobytes() for name, array in expected.items()
    }
