"""The engine under the real learner: thousands of runs in virtual time, with faults of every kind."""

from __future__ import annotations

import logging
import math
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from schedules import (
    LAGS,
    LIMITS,
    Draws,
    Laboratory,
    Piece,
    config,
    contents,
    with_real_samplers,
    with_toys,
)
from virtual import KINDS, Cloud, Faults, VirtualTransport, real_actors

from dppo.errors import ClusterError
from dppo.hosts.plans import sampler_plan

ITERATIONS = {0: 3, 1: 3, 3: 5}  # by policy lag
MOVES = {"between episodes", "within episodes", "samplers_moved"}
SEEN = {*KINDS, *MOVES, "asked", "won", "wasted", "segments_lost", "actor_hung", "limits found"}
slow = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    logger = logging.getLogger("dppo")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.fixture(scope="module")
def toys() -> Laboratory:
    return with_toys()


@pytest.fixture(scope="module")
def real() -> Laboratory:
    return with_real_samplers()


@pytest.fixture(scope="module")
def learning() -> Iterator[Laboratory]:
    laboratory = with_real_samplers(trained=True)
    yield laboratory
    laboratory.trainers.close()


def check(laboratory: Laboratory, seeds: range) -> None:
    """Run schedules; DPPO_SCHEDULE=17 runs schedule 17 alone."""
    alone = os.environ.get("DPPO_SCHEDULE")
    for seed in seeds if alone is None else [int(alone)]:
        draws = Draws(seed)
        problem = laboratory.problem(draws)
        if problem:
            pytest.fail(
                f"schedule {seed}: {problem}\nThe shortest one that fails:\n{laboratory.shortest(draws.drawn)}"
            )


@pytest.mark.parametrize(
    "seeds", [range(60), *(pytest.param(range(part, 10_000, 10), marks=slow) for part in range(10))]
)
def test_nothing_that_happens_to_actors_changes_the_learner(seeds: range, toys: Laboratory) -> None:
    """Slow actors, moves, backup requests, deaths, hangs, late and repeated answers, leaves and joins, a resume."""
    check(toys, seeds)
    assert len(seeds) < 1000 or toys.seen.keys() >= SEEN


@pytest.mark.parametrize(
    "seeds", [range(20), *(pytest.param(range(part, 1000, 10), marks=slow) for part in range(10))]
)
def test_faults_do_not_change_what_real_samplers_make(seeds: range, real: Laboratory) -> None:
    check(real, seeds)
    assert real.seen.keys() >= {"dies", "hangs", "actor_lost", "actor_hung", "samplers_moved"}


@pytest.mark.parametrize("seeds", [range(1000, 1003), pytest.param(range(1000, 1030), marks=slow)])
def test_faults_do_not_change_what_ppo_learns(seeds: range, learning: Laboratory) -> None:
    check(learning, seeds)


def drawn_faults(rng: random.Random) -> Faults:
    return Faults(
        at_most=rng.choice([0, 0, 2]), dies=0.1, hangs=0.1, repeats=rng.choice([0.0, 0.3])
    )


@pytest.mark.parametrize("seeds", [range(24), pytest.param(range(24, 600), marks=slow)])
def test_nodes_that_come_and_go_do_not_change_the_learner(seeds: range, real: Laboratory) -> None:
    """Actors join and leave with nodes that are added, announced to leave, and lost; some fail by themselves.

    In every fourth run, their samplers work in threads.
    """
    in_threads = real_actors(sampler_plan(config(env_threads=True)))
    events: set[str] = set()
    for seed in seeds:
        rng = random.Random(seed)
        fewest = rng.choice([1, 1, 2, 3])
        faults = drawn_faults(rng)
        threads = seed % 4 == 1
        make_actor = in_threads if threads else real.make_actor
        size = {"fewest": fewest, "most": real.num_samplers}
        cloud = Cloud(make_actor, rng, faults, **size, threads=threads)
        lag = LAGS[seed % 3]
        iterations = ITERATIONS[lag]
        limits = replace(LIMITS, start_timeout_s=20, fewest_actors=fewest, elastic=True)
        piece = Piece(lag, iterations, num_actors=cloud.room.num_at_start, limits=limits)
        state = real.train(cloud, piece)
        story = f"schedule {seed}: {cloud.happened} {faults.happened}"
        assert contents(state) == real.expected(lag, iterations), story
        events.update(cloud.happened, state.values["incidents"])

    assert events >= {"added", "announced", "lost", "joins", "leaves", "samplers_moved"}


@pytest.mark.parametrize("kind", ["dies", "hangs", "forges"])
@pytest.mark.parametrize("lag", LAGS)
def test_actors_that_always_fail_end_the_run(lag: int, kind: str, toys: Laboratory) -> None:
    always: dict[str, Any] = {kind: 1.0}
    transport = VirtualTransport(
        toys.make_actor, random.Random(lag), Faults(at_most=10**6, **always)
    )
    with pytest.raises(ClusterError, match=r"replaced 6 times in a row .*max_actor_restarts=6"):
        toys.train(transport, Piece(lag, 3, num_actors=1 + lag))


@pytest.mark.proves("leaks memory")
@pytest.mark.parametrize("num_actors", [1, 2])
@pytest.mark.parametrize("lag", LAGS)
def test_recycled_actors_do_not_change_the_learner(
    lag: int, num_actors: int, real: Laboratory
) -> None:
    """Each process makes two segments of its samplers, and is replaced before the next."""
    plan = replace(sampler_plan(config()), recycling=(math.inf, 2))
    transport = VirtualTransport(real_actors(plan), random.Random(lag), Faults())
    state = real.train(transport, Piece(lag, ITERATIONS[lag], num_actors=num_actors))
    assert contents(state) == real.expected(lag, ITERATIONS[lag])
    assert state.values["incidents"].keys() == {"actor_recycled"}


def test_an_actor_that_is_always_too_large_makes_a_segment_before_it_is_replaced(
    real: Laboratory,
) -> None:
    plan = replace(sampler_plan(config()), recycling=(1.0, math.inf))
    transport = VirtualTransport(real_actors(plan), random.Random(0), Faults())
    state = real.train(transport, Piece(0, 3))
    assert contents(state) == real.expected(0, 3)
    assert state.values["incidents"] == {"actor_recycled": 2}
