"""Replay buffer: what each row led to, which rows are kept, and that storage does not matter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from plain import Row, World

from dppo import Config
from dppo.config.memory import replay_row_bytes
from dppo.ppo.exchange.records import Segment
from dppo.sac.replay_buffer import LOGPROBS, DrawnRows, LaterRows, ReplayBuffer, rows_of_rank
from dppo.spaces.actions import BoxActions
from dppo.spaces.spaces import Spaces, leaves

VECTOR = np.dtype((np.float32, (3,)))
SPEED = ("speed", np.float32, ())
PLACE = ("place", np.float64, (2,))
DICT = np.dtype([SPEED, PLACE])
OBS = pytest.mark.parametrize(
    "dtype", [pytest.param(VECTOR, id="vector"), pytest.param(DICT, id="dict")]
)
ALL = 10**6


def kept(world: World, lengths: list[int], limit: int = ALL) -> ReplayBuffer:
    rows = ReplayBuffer(limit, world.dtype)
    for length in lengths:
        rows.append(world.segments(length))
    return rows


def same(a: Any, b: Any) -> bool:
    bytes_of_a = np.asarray(a).tobytes()
    bytes_of_b = np.asarray(b).tobytes()
    return bytes_of_a == bytes_of_b


def check(rows: ReplayBuffer, expected: list[Row]) -> None:
    """Compare all transitions with a list of them."""
    places = rows.transitions()
    assert len(places) == len(expected)

    drawn = rows.draw(places)
    assert (drawn.num_steps == 1).all()
    for number, row in enumerate(expected):
        assert same(drawn.obs[number], row.obs)
        assert_array_equal(drawn.actions[number], row.action)
        assert drawn.rewards[0, number] == row.reward
        check_end(drawn, number, row)


def check_end(drawn: DrawnRows, number: int, last: Row) -> None:
    """A terminal state has no successor that matters."""
    assert drawn.terminated[number] == last.terminated
    if not last.terminated:
        assert same(drawn.successors[number], last.successor)


@OBS
def test_each_row_has_its_true_successor(dtype: np.dtype[Any]) -> None:
    world = World(dtype, ends=0.2, invalid=0.1)
    rows = kept(world, [6] * 5)
    check(rows, world.rows)
    assert len(world.rows) < 6 * 5 * 4  # some are no transitions


def num_exits(rows: ReplayBuffer) -> int:
    """Return the number of successors that no other row holds."""
    return len(rows.state()["rows.exits"])


def test_each_observation_is_stored_once() -> None:
    rows = kept(World(VECTOR, ends=0.0), [6] * 5)
    assert num_exits(rows) == 4  # the successors of the newest step

    world = World(VECTOR, ends=0.3)
    rows = ReplayBuffer(ALL, VECTOR)
    limits = 0
    for _ in range(5):
        segments = world.segments(6)
        rows.append(segments)
        for segment in segments:
            is_limit = segment.truncated & ~segment.terminated
            limits += int(is_limit.sum())

    assert limits <= num_exits(rows) <= limits + 4


def test_a_segment_that_begins_elsewhere_leaves_the_older_row_its_successor() -> None:
    """As after the loss of an actor whose environments cannot be rebuilt."""
    world = World(VECTOR, ends=0.0)
    rows = kept(world, [3])
    second_now = world.now[1]
    world.now[1] = second_now + 1
    rows.append(world.segments(3))
    check(rows, world.rows)
    assert num_exits(rows) == 2 + 4


@OBS
def test_the_oldest_steps_leave_first(dtype: np.dtype[Any]) -> None:
    world = World(dtype, ends=0.2)
    steps = 14
    limit = 4 * steps
    rows = kept(world, [6] * 7, limit)
    newest = world.rows[-limit:]
    check(rows, newest)
    assert len(rows.state()["rows.valid"]) == steps


def test_an_iteration_is_kept_even_if_it_is_larger_than_the_limit() -> None:
    world = World(VECTOR)
    rows = kept(world, [6] * 3, limit=5)
    last_iteration = world.rows[-4 * 6 :]
    check(rows, last_iteration)


@OBS
@pytest.mark.parametrize("has_controller", [False, True])
@pytest.mark.parametrize("limit", [ALL, 4 * 8])
def test_neither_chunks_nor_a_checkpoint_change_what_is_drawn(
    dtype: np.dtype[Any], limit: int, has_controller: bool
) -> None:
    same_world = World(dtype, ends=0.2, invalid=0.1, has_controller=has_controller)
    whole = kept(same_world, [6] * 4, limit)
    world = World(dtype, ends=0.2, invalid=0.1, has_controller=has_controller)
    state = kept(world, [6, 6], limit).state()
    for array in state.values():
        array.flags.writeable = False
    resumed = ReplayBuffer(limit, dtype)
    resumed.load(state)
    for _ in range(2):
        resumed.append(world.segments(6))

    places = resumed.transitions()
    expected_places = whole.transitions()
    assert len(places) == len(expected_places)

    for n_step in (1, 3):
        drawn = resumed.draw(places, n_step)
        expected = whole.draw(expected_places, n_step)
        assert (drawn.intended is not None) == has_controller
        for column, expected_column in zip(drawn, expected, strict=True):
            assert same(column, expected_column)

    assert list(resumed.state()) == list(whole.state())
    assert_equal(resumed.state(), whole.state())


def test_actions_of_a_controller_are_kept_while_all_rows_have_them() -> None:
    world = World(VECTOR, has_controller=True)
    rows = kept(world, [6, 6])
    intended = rows.draw(rows.transitions()).intended
    assert same(intended, [row.intended for row in world.rows])
    snapshot = rows.snapshot()

    world.has_controller = False
    rows.append(world.segments(6))
    assert rows.draw(rows.transitions()).intended is None
    assert "rows.intended" not in rows.state()

    rows.restore(snapshot)
    world.has_controller = True
    rows.append(world.segments(6))
    assert rows.draw(rows.transitions()).intended is None


def test_a_smaller_limit_after_a_resume_drops_the_oldest() -> None:
    world = World(VECTOR)
    state = kept(world, [6] * 3).state()
    limit = 4 * 8
    rows = ReplayBuffer(limit, VECTOR)
    rows.load(state)
    check(rows, world.rows[-limit:])
    places_of_exits = rows.state()["rows.exits"]
    assert places_of_exits.min() >= 0

    rows.append(world.segments(6))
    check(rows, world.rows[-limit:])


def steps_ahead(rows: list[Row], n_step: int) -> list[Row]:
    """Return the first row and those that continue its episode, at most `n_step` of them."""
    chain = rows[:1]
    for following in rows[1:n_step]:
        last = chain[-1]
        if last.terminated or not same(last.successor, following.obs):
            break
        chain.append(following)
    return chain


def test_several_steps_stop_where_the_episode_does() -> None:
    world = World(VECTOR, num_samplers=1, num_envs=1, ends=0.25, invalid=0.15, seed=3)
    n_step = 3
    rows = kept(world, [5] * 6)
    drawn = rows.draw(rows.transitions(), n_step)

    for number in range(len(world.rows)):
        chain = steps_ahead(world.rows[number:], n_step)
        length = len(chain)
        assert drawn.num_steps[number] == length
        rewards = [row.reward for row in chain]
        assert_array_equal(drawn.rewards[:length, number], rewards)
        assert not drawn.rewards[length:, number].any()
        check_end(drawn, number, chain[-1])

    assert set(drawn.num_steps) == {1, 2, 3}


def test_rows_of_a_checkpoint_without_log_probabilities_have_the_likelihood_zero() -> None:
    world = World(VECTOR, ends=0.0)
    state = kept(world, [6, 6]).state()
    del state[LOGPROBS]
    rows = ReplayBuffer(ALL, VECTOR)
    rows.load(state)
    rows.append(world.segments(6))
    places = rows.transitions()

    def likelihoods(drawn: np.ndarray) -> np.ndarray:
        """Return the likelihoods of the second steps, relative to a policy that is certain of them."""
        relative = []

        def extends(step: int, numbers: np.ndarray, later: LaterRows) -> np.ndarray:
            log_ratio = np.minimum(0.0, -later.logprobs)
            relative.append(np.exp(log_ratio))
            return np.ones(len(numbers), bool)

        rows.draw(drawn, 2, extends)
        return relative.pop()

    steps_before = 4 * 12
    checkpoint_likelihoods = likelihoods(places[: 4 * 11])
    assert (checkpoint_likelihoods == 0).all()

    later_likelihoods = likelihoods(places[steps_before : steps_before + 4 * 4])
    assert (later_likelihoods > 0).all()


@OBS
def test_bytes_of_a_row_are_those_of_the_arrays(dtype: np.dtype[Any]) -> None:
    world = World(dtype, ends=0.0)
    state = kept(world, [50]).state()
    columns = []
    for name, array in state.items():
        if "exit" not in name:
            columns.append(array)
    assert len(columns) == 5 + len(leaves(dtype))

    stored = sum(column.nbytes for column in columns)
    low = np.zeros(2)
    high = np.ones(2)
    actions = BoxActions(low, high, bounds="squash")
    spaces = Spaces(dtype, actions)
    config = Config(env_id="CartPole-v1", dtype="float64")
    expected = replay_row_bytes(config, spaces)
    assert stored / len(world.rows) == expected


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_get_the_rows_of_their_samplers(ranks: int) -> None:
    """The rows of all, cut into parts, are those that each rank would keep by itself, also after drops."""
    worlds = []
    for number in range(4):
        world = World(VECTOR, num_samplers=1, seed=number, has_controller=True)
        worlds.append(world)
    limit = 8 * 10
    limit_of_rank = limit // ranks
    num_samplers = len(worlds) // ranks
    rows_of_all = ReplayBuffer(limit, VECTOR)
    rows = []
    for _ in range(ranks):
        rows.append(ReplayBuffer(limit_of_rank, VECTOR))
    assert rows_of_rank(rows_of_all.state(), 0, ranks) == {}

    def segments_of(chosen: Sequence[World]) -> list[Segment]:
        segments = []
        for world in chosen:
            segments += world.segments(3)
        return segments

    def share(samplers: Sequence[Any], rank: int) -> Sequence[Any]:
        start = rank * num_samplers
        return samplers[start : start + num_samplers]

    for _ in range(5):
        segments = segments_of(worlds)
        rows_of_all.append(segments)
        for rank, rows_alone in enumerate(rows):
            rows_alone.append(share(segments, rank))

    for rank, rows_alone in enumerate(rows):
        assert num_exits(rows_alone) > 0
        state = rows_of_rank(rows_of_all.state(), rank, ranks)
        loaded = ReplayBuffer(limit_of_rank, VECTOR)
        loaded.load(state)
        assert_equal(loaded.state(), rows_alone.state())
        # what follows is kept as well
        later = segments_of(share(worlds, rank))
        rows_alone.append(later)
        loaded.append(later)
        assert_equal(loaded.state(), rows_alone.state())


def assert_equal(state: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert state.keys() == expected.keys()
    for name, array in state.items():
        assert array.tobytes() == expected[name].tobytes(), name
