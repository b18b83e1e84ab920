"""Recovery from lost actors: the replay ledger, the restart budget, and Ray's errors in one line."""

from __future__ import annotations

import numpy as np
import pytest
from builders import assert_same_bytes, make_config
from ray.exceptions import ActorUnavailableError

from dppo.engine.ledger import ReplayLedger
from dppo.engine.restarts import delay_before
from dppo.errors import EnvironmentFault
from dppo.hosts.plans import sampler_plan
from dppo.ppo.exchange.questions import Question
from dppo.ppo.exchange.records import PolicySnapshot, Rebuild, SamplerCarry, SegmentReport
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.failures import cause_of_death
from dppo.transports.ray.pickling import pack


def report(
    sampler: int, index: int, episodes: list[int], actions: list[list[int]]
) -> SegmentReport:
    """Return a report for the ledger; each field of its carry differs from those of other reports."""
    rows = len(episodes)
    carry = SamplerCarry(
        episodes=np.array(episodes, np.int64),
        episode_returns=np.arange(rows) + sum(episodes) + 0.5,
        episode_lengths=np.arange(rows) + 10 * sampler,
        discounted_returns=np.arange(rows) - 0.25,
        checksums=np.arange(rows, dtype=np.uint32) + np.uint32(2**32 - 5),
    )
    pieces = tuple(np.array(piece, np.int64) for piece in actions)
    return SegmentReport(sampler, index, 0, rows, carry, pieces)


def actions_of(ledger: ReplayLedger, sampler: int, index: int) -> list[list[int]]:
    rebuild = ledger.rebuild(sampler, index)
    assert rebuild is not None
    return [actions.tolist() for actions in rebuild.actions]


def test_actions_accumulate_during_an_episode_and_restart_with_the_next() -> None:
    ledger = ReplayLedger(1, replay=True)
    ledger.record(report(0, 0, [0, 0], [[1, 2], [3, 4]]))
    assert actions_of(ledger, 0, 1) == [[1, 2], [3, 4]]
    ledger.record(report(0, 1, [0, 1], [[5, 6], [7]]))  # the second episode ended one step ago
    assert actions_of(ledger, 0, 2) == [[1, 2, 5, 6], [7]]
    ledger.record(report(0, 2, [3, 1], [[], [8, 9]]))  # the first episode ended with the last row
    assert actions_of(ledger, 0, 3) == [[], [7, 8, 9]]
    ledger.record(report(0, 3, [3, 1], [[1, 1], [2, 2]]))
    assert actions_of(ledger, 0, 4) == [[1, 1], [7, 8, 9, 2, 2]]


def test_only_the_last_two_segments_can_be_collected_again() -> None:
    """During the update on one segment the next is in flight, and either may be lost."""
    ledger = ReplayLedger(1, replay=True)
    for index in range(4):
        ledger.record(report(0, index, [0], [[index]]))
    assert actions_of(ledger, 0, 4) == [[0, 1, 2, 3]]
    assert actions_of(ledger, 0, 3) == [[0, 1, 2]]
    with pytest.raises(
        AssertionError, match="segment 2 of sampler 0 can no longer be collected again"
    ):
        ledger.rebuild(0, 2)


def test_a_segment_that_is_collected_again_replaces_the_first() -> None:
    ledger = ReplayLedger(1, replay=True)
    for index in range(3):
        ledger.record(report(0, index, [0], [[index]]))
    ledger.record(report(0, 2, [7], [[9]]))  # its environment is not deterministic given its seed
    assert actions_of(ledger, 0, 3) == [[9]]
    assert actions_of(ledger, 0, 2) == [[0, 1]]
    ledger.record(report(0, 3, [7], [[10]]))
    assert actions_of(ledger, 0, 4) == [[9, 10]]


@pytest.mark.parametrize("replay", [True, False])
def test_samplers_are_recorded_separately_with_their_last_carry(replay: bool) -> None:
    ledger = ReplayLedger(3, replay=replay)
    last = report(2, 1, [4, 2], [[1], [1]])
    assert ledger.arrays(0) == {}
    ledger.load({}, 0)
    for segment_report in (report(2, 0, [3, 2], [[1], [1]]), report(0, 0, [0], [[0]]), last):
        ledger.record(segment_report)
    assert ledger.rebuild(0, 0) is ledger.rebuild(1, 0) is None, "they start from scratch"
    rebuild = ledger.rebuild(2, 2)
    assert rebuild is not None
    assert_same_bytes(rebuild.carry, last.carry)
    assert [actions.tolist() for actions in rebuild.actions] == ([[1], [1, 1]] if replay else [])
    assert actions_of(ledger, 0, 1) == ([[0]] if replay else [])


@pytest.mark.parametrize("replay", [True, False])
@pytest.mark.parametrize("back", [0, 1], ids=["the next segment", "the one before it"])
def test_a_loaded_ledger_continues_like_the_saved_one(replay: bool, back: int) -> None:
    ledger = ReplayLedger(2, replay=replay)
    loaded = ReplayLedger(2, replay=replay)
    made = [
        (report(0, 0, [0, 0], [[1, 2], [3]]), report(1, 0, [1, 5], [[], [9]])),
        (report(0, 1, [0, 1], [[4], []]), report(1, 1, [1, 5], [[7], [8]])),
        (report(0, 2, [0, 2], [[5, 6], [7]]), report(1, 2, [2, 5], [[1], [1]])),
        (report(0, 3, [0, 2], [[5], [8]]), report(1, 3, [2, 5], [[2], [2]])),
    ]
    for pair in made[:3]:
        for segment_report in pair:
            ledger.record(segment_report)
    index = 3 - back
    arrays = ledger.arrays(index)
    for array in arrays.values():
        array.flags.writeable = False  # as arrays from a checkpoint may be
    loaded.load(arrays, index)
    for sampler in range(2):
        assert_same_bytes(loaded.rebuild(sampler, index), ledger.rebuild(sampler, index))
    for pair in made[index:]:
        for some_ledger in (ledger, loaded):
            for segment_report in pair:
                some_ledger.record(segment_report)
    for sampler in range(2):
        assert_same_bytes(loaded.rebuild(sampler, 4), ledger.rebuild(sampler, 4))
    assert sorted(loaded.arrays(4)) == sorted(ledger.arrays(4))


def test_delays_double_up_to_half_a_minute() -> None:
    assert [delay_before(replacement) for replacement in range(1, 10)] == [
        0,
        1,
        2,
        4,
        8,
        16,
        30,
        30,
        30,
    ]


UNEXPECTED = """The actor died unexpectedly before finishing this task.
\tclass_name: PPOActor
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: Worker \
unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) ... (2) ..."""


def test_the_paragraph_about_an_unexpected_exit_becomes_a_short_reason() -> None:
    assert cause_of_death(RuntimeError(UNEXPECTED)) == (
        "died: its process crashed, exited or was killed (out of memory?)"
    )


def test_other_reasons_are_those_of_ray() -> None:
    error = RuntimeError("The actor died.\nThe node is dead: 10.0.0.1\nsee the logs")
    assert cause_of_death(error) == "died: The node is dead: 10.0.0.1"
    unavailable = ActorUnavailableError(
        "RpcError: RPC error: recvmsg:Connection reset by peer rpc_code: 14.", b"1" * 16
    )
    assert (
        cause_of_death(unavailable) == "cannot be reached: its connection to this process was lost"
    )


@pytest.mark.proves("is killed by Ray for lack of memory")
def test_a_process_that_ray_killed_for_lack_of_memory_is_named_as_such() -> None:
    text = "The actor died.\nTask was killed due to the node running low on memory.\nMemory on the node was 0.97"
    assert cause_of_death(RuntimeError(text)).startswith(
        "died: killed because its node ran out of memory"
    )


@pytest.mark.parametrize("index", [0, 1])
def test_a_constructor_that_fails_is_a_fault_with_its_place(index: int) -> None:
    """The engine decides whether it costs the process or the run."""
    config = make_config(
        {"env_id": "worlds.faulty:Brittle", "env_kwargs": {"where": "constructor"}, "num_actors": 1}
    )
    actor = PPOActor(pack(sampler_plan(config)))
    zeros = np.zeros(1, np.int64)
    carry = SamplerCarry(zeros, zeros * 1.0, zeros, zeros * 1.0, zeros.astype(np.uint32))
    rebuilds = {0: Rebuild(carry, (np.zeros(0, np.int64),))} if index else {}
    answer = actor.make_segments(
        Question(index, (0,), (0,), 0, rebuilds), PolicySnapshot(0, np.zeros(1))
    )
    assert isinstance(answer, EnvironmentFault)
    assert answer.in_constructor
    assert "the environment's constructor raised" in str(answer)
