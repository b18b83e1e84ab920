"""Recovery from lost actors: the replay ledger, the restart budget, and Ray's errors in one line."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from builders import make_config
from driver import LIMITS, Driver
from ray.exceptions import ActorUnavailableError

from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Start
from dppo.engine.restarts import delay_before
from dppo.errors import ClusterError, EnvironmentFault
from dppo.hosts.plans import sampler_plan
from dppo.ppo.exchange.questions import Question
from dppo.ppo.exchange.records import PolicySnapshot, SamplerCarry, SegmentReport
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.failures import cause_of_death
from dppo.transports.ray.pickling import pack


def recorded(*segments: tuple[int, int, int]) -> ReplayLedger:
    """Return the ledger of a sampler after segments of one step: index, episode and action."""
    ledger = ReplayLedger(1, replay=True)
    for index, episode, action in segments:
        numbers = np.array([episode])
        carry = SamplerCarry(
            numbers, numbers * 1.0, numbers, numbers * 1.0, numbers.astype(np.uint32)
        )
        ledger.record(SegmentReport(0, index, 0, 1, carry, (np.array([action]),)))
    return ledger


def actions_before(ledger: ReplayLedger, index: int) -> list[int]:
    rebuild = ledger.rebuild(0, index)
    assert rebuild is not None
    actions: list[int] = rebuild.actions[0].tolist()
    return actions


def test_only_the_last_two_segments_can_be_collected_again() -> None:
    """During the update on one segment the next is in flight, and either may be lost."""
    ledger = recorded((0, 0, 10), (1, 0, 11), (2, 0, 12), (3, 0, 13))
    assert actions_before(ledger, 4) == [10, 11, 12, 13]
    assert actions_before(ledger, 3) == [10, 11, 12]
    with pytest.raises(AssertionError, match="segment 2 of sampler 0 can no longer be collected"):
        ledger.rebuild(0, 2)


def test_a_segment_that_is_collected_again_replaces_the_first() -> None:
    """Its environment is not deterministic given its seed."""
    ledger = recorded((0, 0, 10), (1, 0, 11), (2, 0, 12), (2, 7, 22), (3, 7, 23))
    assert actions_before(ledger, 3) == [22]
    assert actions_before(ledger, 4) == [22, 23]


def test_delays_double_up_to_half_a_minute() -> None:
    delays = [delay_before(replacement) for replacement in range(1, 10)]
    assert delays == [0, 1, 2, 4, 8, 16, 30, 30, 30]


def restarts_in_vain(driver: Driver, times: int) -> None:
    """Let processes of actor 1 die before they have started."""
    for number in range(2, 2 + times):
        driver.die(1, number)
        driver.wait(10.0)


def test_an_actor_that_never_starts_rests_while_others_work_with_its_samplers() -> None:
    """A node whose disk is full kills each process that starts there."""
    driver = Driver([[0], [1]])
    driver.die(1)
    restarts_in_vain(driver, times=LIMITS.max_actor_restarts)
    assert driver.hosts() == {0: 0, 1: 0}
    assert driver.incidents()[-2].text == "actor 1 (sampler 1) died; replaced in 600 s"
    absence = "has not started for 20 s; until it is back, its samplers 1 are on actor 0"
    assert driver.incidents()[-1].text == f"actor 1 {absence}"
    driver.make(5)

    driver.forget()
    driver.wait(550.0)
    assert not driver.all(Start)
    driver.wait(50.0)
    [again] = driver.all(Start)
    driver.die(1, again.process.number)
    [line] = driver.incidents()
    assert line.text == "actor 1 (no samplers) died; replaced in 600 s"
    driver.wait(600.0)
    driver.start(1, again.process.number + 1)
    assert driver.logged() == ["actor 1 is back"]


def test_an_actor_that_never_starts_ends_the_run_if_no_other_has_room_for_its_samplers() -> None:
    driver = Driver([[0], [1]], replace(LIMITS, samplers_per_actor=1))
    driver.die(1)
    with pytest.raises(ClusterError, match="replaced 3 times in a row"):
        restarts_in_vain(driver, times=LIMITS.max_actor_restarts)


def test_actors_that_never_start_end_the_run_if_no_other_runs() -> None:
    driver = Driver([[0], [1]])
    driver.die(0)
    driver.die(1)
    with pytest.raises(ClusterError, match="replaced 3 times in a row"):
        restarts_in_vain(driver, times=LIMITS.max_actor_restarts)


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


def test_a_constructor_that_fails_is_a_fault_with_its_place() -> None:
    """The engine decides whether it costs the process or the run."""
    config = make_config(
        {"env_id": "worlds.faulty:Brittle", "env_kwargs": {"where": "constructor"}, "num_actors": 1}
    )
    actor = PPOActor(pack(sampler_plan(config)))
    answer = actor.make_segments(Question(0, (0,), (0,)), PolicySnapshot(0, np.zeros(1)))
    assert isinstance(answer, EnvironmentFault)
    assert answer.in_constructor
    assert "the environment's constructor raised" in str(answer)
