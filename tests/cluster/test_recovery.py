"""What it takes to lose an actor and nothing else: the ledger and the budget."""

from __future__ import annotations

import numpy as np
import pytest
from builders import assert_same_bytes

from dppo.cluster.recovery import ReplayLedger, RestartBudget
from dppo.ppo.segment import SamplerCarry, SegmentReport


def report(sampler: int, episodes: list[int], actions: list[list[int]]) -> SegmentReport:
    """A report that says no more than the ledger has to know; every field of its carry tells it from others."""
    rows = len(episodes)
    carry = SamplerCarry(
        episodes=np.array(episodes, np.int64),
        episode_returns=np.arange(rows) + sum(episodes) + 0.5,
        episode_lengths=np.arange(rows) + 10 * sampler,
        discounted_returns=np.arange(rows) - 0.25,
        checksums=np.arange(rows, dtype=np.uint32) + np.uint32(2**32 - 5),
    )
    pieces = tuple(np.array(piece, np.int64) for piece in actions)
    return SegmentReport(sampler, 0, 0, rows, carry, pieces)


def actions_of(ledger: ReplayLedger, sampler: int) -> list[list[int]]:
    rebuild = ledger.rebuild(sampler)
    assert rebuild is not None
    return [actions.tolist() for actions in rebuild.actions]


def test_a_sampler_that_never_made_a_segment_is_begun_as_new() -> None:
    ledger = ReplayLedger(2, replay=True)
    ledger.record(report(0, [0], [[1]]))
    assert ledger.rebuild(1) is None


def test_actions_gather_while_an_episode_goes_on_and_begin_again_with_the_next() -> None:
    ledger = ReplayLedger(1, replay=True)
    ledger.record(report(0, [0, 0], [[1, 2], [3, 4]]))
    assert actions_of(ledger, 0) == [[1, 2], [3, 4]]
    ledger.record(report(0, [0, 1], [[5, 6], [7]]))  # the second one ended, one step ago
    assert actions_of(ledger, 0) == [[1, 2, 5, 6], [7]]
    ledger.record(report(0, [3, 1], [[], [8, 9]]))  # the first one ended with the last row
    assert actions_of(ledger, 0) == [[], [7, 8, 9]]
    ledger.record(report(0, [3, 1], [[1, 1], [2, 2]]))
    assert actions_of(ledger, 0) == [[1, 1], [7, 8, 9, 2, 2]]


def test_a_rebuild_has_the_last_carry() -> None:
    ledger, last = ReplayLedger(1, replay=True), report(0, [4, 2], [[1], [1]])
    ledger.record(report(0, [3, 2], [[1], [1]]))
    ledger.record(last)
    rebuild = ledger.rebuild(0)
    assert rebuild is not None
    assert_same_bytes(rebuild.carry, last.carry)


def test_samplers_do_not_mix() -> None:
    ledger = ReplayLedger(3, replay=True)
    ledger.record(report(2, [0], [[2]]))
    ledger.record(report(0, [0], [[0]]))
    ledger.record(report(2, [0], [[22]]))
    assert actions_of(ledger, 0) == [[0]]
    assert actions_of(ledger, 2) == [[2, 22]]
    assert ledger.rebuild(1) is None


def test_without_replay_episodes_are_given_up_and_the_carry_is_kept() -> None:
    ledger, last = ReplayLedger(1, replay=False), report(0, [4], [[1]])
    ledger.record(last)
    rebuild = ledger.rebuild(0)
    assert rebuild is not None
    assert rebuild.actions == ()
    assert_same_bytes(rebuild.carry, last.carry)


@pytest.mark.parametrize("replay", [True, False])
def test_a_loaded_ledger_goes_on_as_the_one_that_was_saved(replay: bool) -> None:
    ledger, loaded = ReplayLedger(3, replay=replay), ReplayLedger(3, replay=replay)
    for one in (report(0, [0, 0], [[1, 2], [3]]), report(2, [1, 5], [[], [9]]), report(0, [0, 1], [[4], []])):
        ledger.record(one)
    arrays = ledger.arrays()
    for array in arrays.values():
        array.flags.writeable = False  # as a checkpoint may give them
    loaded.load(arrays)
    for sampler in range(3):
        assert_same_bytes(loaded.rebuild(sampler), ledger.rebuild(sampler))
    for both in (ledger, loaded):
        both.record(report(0, [0, 2], [[5, 6], [7]]))
        both.record(report(1, [0, 0], [[1], [1]]))
    for sampler in range(3):
        assert_same_bytes(loaded.rebuild(sampler), ledger.rebuild(sampler))
    assert sorted(loaded.arrays()) == sorted(ledger.arrays())


def test_an_empty_ledger_saves_and_loads_as_nothing() -> None:
    ledger = ReplayLedger(2, replay=True)
    assert ledger.arrays() == {}
    ledger.load({})
    assert ledger.rebuild(0) is None


# ------------------------------------------------------------------------------------------- budget


def test_delays_double_up_to_half_a_minute_and_the_budget_ends() -> None:
    budget = RestartBudget(9)
    assert [budget.spend(0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert budget.spend(0) is None
    assert budget.spend(0) is None


def test_a_segment_that_comes_makes_up_for_every_loss_before_it() -> None:
    budget = RestartBudget(2)
    assert [budget.spend(0), budget.spend(0), budget.spend(0)] == [0, 1, None]
    budget.delivered(0)
    assert [budget.spend(0), budget.spend(0), budget.spend(0)] == [0, 1, None]


def test_actors_have_budgets_of_their_own() -> None:
    budget = RestartBudget(1)
    assert [budget.spend(0), budget.spend(1), budget.spend(0)] == [0, 0, None]
    budget.delivered(1)
    assert [budget.spend(1), budget.spend(0)] == [0, None]


def test_no_restarts_means_none() -> None:
    assert RestartBudget(0).spend(3) is None
