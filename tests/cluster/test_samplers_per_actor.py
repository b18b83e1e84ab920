"""The engine alone, with a limit of the samplers in a process: known from the start, or found by a constructor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from driver import LIMITS, PACED, Cluster, Driver, answer_to, one_slow
from virtual import one_too_many

from dppo.engine.messages import Joined, Kill, Left, Process
from dppo.errors import ClusterError, EnvironmentFault


def with_two_asked_of_one(samplers_per_actor: int | None = None) -> tuple[Cluster, int]:
    """Return a slow and a fast actor, and the index of the first segment that the fast one is to make of both."""
    cluster = Cluster(2, 2, one_slow, replace(PACED, samplers_per_actor=samplers_per_actor))
    for index in range(60):
        cluster.asks.clear()
        cluster.request(index)
        if cluster.hosts()[0] == 1:
            return cluster, index
        cluster.collect()
    return cluster, 0


def test_without_a_limit_a_sampler_moves_from_a_slow_actor_and_with_one_it_stays() -> None:
    _, num_questions = with_two_asked_of_one()
    assert num_questions > 0
    _, asked_with_limit = with_two_asked_of_one(1)
    assert asked_with_limit == 0

    with_room = Cluster(4, 3, one_slow, replace(PACED, samplers_per_actor=2))  # [0, 3], [1], [2]
    moves = 0
    for index in range(40):
        moves += len(with_room.iterate(index))
        running = with_room.engine.hosting.running.values()
        assert max(len(actor.samplers) for actor in running) <= 2
    assert moves >= 2, "to actors with room they move"


@pytest.mark.proves("raises in its constructor beside another instance, after a move")
def test_a_sampler_that_cannot_be_made_beside_another_one_goes_back_and_stays() -> None:
    cluster, index = with_two_asked_of_one()
    [ask] = cluster.asks
    assert ask.question.samplers == (0, 1)

    cluster.forget()
    cluster.refuse(one_too_many(0, 1))
    [log] = cluster.incidents()
    assert log.text == (
        "actor 1 (samplers 0, 1): sampler 0: the environment's constructor raised PermissionError: only one in a "
        "process, in a process that had 1 other instance; replaced, and sampler 0 goes back. From now on a process "
        "gets at most 1 sampler; samplers_per_actor=1 (--samplers-per-actor 1) says so from the start"
    )
    assert cluster.all(Kill) == [Kill(Process(1, 1))]
    assert cluster.hosts() == {0: 0, 1: 1}

    cluster.start(1, 2)
    del cluster.asks[0]
    assert [ask.process for ask in cluster.asks] == [Process(0, 1), Process(1, 2)]
    assert cluster.collect() == [1], "the process of the other one still has it"
    for actor in cluster.engine.hosting.running.values():
        assert actor.losses == 0
    for later in range(index + 1, index + 40):
        assert not cluster.iterate(later), "it is not moved again"


def limited(shares: list[list[int]], samplers_per_actor: int = 1, **limits: Any) -> Driver:
    return Driver(shares, replace(LIMITS, samplers_per_actor=samplers_per_actor, **limits))


@pytest.mark.proves("may have one instance in a process, and its actor is lost")
def test_the_sampler_of_a_lost_actor_waits_for_the_next_process() -> None:
    driver = limited([[0], [1]])
    driver.request(0)
    driver.forget()
    driver.die(0)
    driver.on(answer_to(driver.asks[1]))
    driver.asks.clear()
    driver.wait(80)
    [line] = [line for line in driver.logged() if "must wait" in line]
    assert line.endswith(
        "s; sampler 0 must wait for it: no other actor has room (samplers_per_actor=1)"
    )
    assert not driver.asks

    driver.start(0, 2)
    assert "actor 0 is back" in driver.logged()
    assert [(ask.process, ask.question.samplers) for ask in driver.asks] == [(Process(0, 2), (0,))]


def test_what_fits_elsewhere_moves_and_the_rest_waits() -> None:
    driver = limited([[0, 3], [1, 4], [2]], 2)
    driver.request(0)
    driver.die(0)
    for ask in driver.asks[1:]:
        driver.on(answer_to(ask))
    driver.wait(80)
    assert driver.hosts() == {0: 2, 1: 1, 2: 2, 3: 0, 4: 1}
    lines = [command.text for command in driver.incidents()]
    [line] = [line for line in lines if "until it is back" in line]
    assert line.endswith("its samplers 0 are on actor 2")


def test_an_actor_that_never_comes_back_ends_a_run_whose_samplers_may_not_move() -> None:
    driver = limited([[0], [1]])
    driver.request(0)
    driver.die(0)
    driver.on(answer_to(driver.asks[1]))
    with pytest.raises(
        ClusterError,
        match=r"no other actor has room for sampler 0: .* \(samplers_per_actor=1\)\. Make",
    ):
        driver.wait(200)


def test_actors_that_come_and_go_are_waited_for_until_there_are_enough() -> None:
    driver = limited([[0], [1], [2]], elastic=True)
    driver.request(0)
    driver.on(Left(2))
    driver.answer()
    driver.request(1)
    assert not driver.asks

    driver.wait(20)
    [line] = [line for line in driver.logged() if "training waits" in line]
    assert line.startswith(
        "training waits for actors: 2 running, at least 3 wanted (samplers_per_actor=1)"
    )

    driver.on(Joined(7))
    driver.start(7)
    assert [(ask.process.actor_id, ask.question.samplers) for ask in driver.asks] == [
        (0, (0,)),
        (1, (1,)),
        (7, (2,)),
    ]


def test_a_process_that_has_had_more_was_refused_a_licence() -> None:
    """Then the same samplers are tried again in a new process, after a while."""
    driver = Driver([[0, 1]])
    driver.request(0)
    driver.answer()
    driver.request(1)
    driver.die(0)
    driver.start(0, 2)
    driver.refuse(one_too_many(1, 1))
    assert "was refused: sampler 1: the environment's constructor" in driver.incidents()[-1].text
    assert driver.hosts()[1] == 0


@pytest.mark.parametrize(
    ("dies", "resumed_at", "text"),
    [(False, 0, "had 1 other instance"), (True, 0, "was refused"), (False, 1, "was refused")],
)
def test_where_actors_come_and_go_a_refusal_after_a_loss_may_be_of_a_busy_licence(
    dies: bool, resumed_at: int, text: str
) -> None:
    driver = Driver([[0, 1]], replace(LIMITS, elastic=True, most_actors=2))
    driver.make(resumed_at)
    driver.engine.hosting.most_instantiated = 0
    driver.request(resumed_at)
    if dies:
        driver.die(0)
        driver.start(0, 2)
    driver.refuse(one_too_many(1, 1))
    assert text in driver.incidents()[-1].text


@pytest.mark.parametrize("first_end", ["death", "refusal"])
def test_what_may_be_a_busy_licence_or_a_limit_ends_with_the_instances_of_the_process(
    first_end: str,
) -> None:
    """From which the advice on both follows: see `instances_line`."""
    driver = Driver([[0, 1], [2]], replace(LIMITS, max_actor_restarts=1))
    driver.request(0)
    del driver.asks[1]
    if first_end == "death":
        driver.die(0)
    else:
        driver.refuse(one_too_many(1, 1))
    driver.start(0, 2)
    with pytest.raises(EnvironmentFault, match="Its actor was replaced 1 time in a row") as raised:
        driver.refuse(one_too_many(1, 1))
    assert raised.value.place is not None
    assert raised.value.place.samplers_beside == 1
