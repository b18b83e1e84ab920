"""The engine under the real learner: 10,000 runs in virtual time with actors that take microseconds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from schedules import Draws, Schedules
from test_engine import KINDS

from dppo.engine.messages import Kill
from dppo.engine.roster import Actor

SCHEDULES, PARTS, FIRST = 10_000, 10, 60


@pytest.fixture(scope="module")
def schedules() -> Iterator[Schedules]:
    logger = logging.getLogger("dppo")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield Schedules()
    logger.setLevel(level)


@pytest.mark.parametrize("part", [-1, *(pytest.param(part, marks=pytest.mark.slow) for part in range(PARTS))])
def test_nothing_that_happens_to_actors_changes_the_state_of_the_learner(part: int, schedules: Schedules) -> None:
    """Slow actors, moves, backup requests, deaths, hangs, late and repeated answers, leaves and joins, a resume.

    DPPO_SCHEDULE=17 runs schedule 17 alone.
    """
    alone = os.environ.get("DPPO_SCHEDULE")
    seeds = range(FIRST) if part < 0 else range(part, SCHEDULES, PARTS)
    for seed in seeds if alone is None else [int(alone)]:
        draws = Draws(seed)
        if problem := schedules.problem(draws):
            pytest.fail(f"schedule {seed}: {problem}\nThe shortest one that fails:\n{schedules.shortest(draws.drawn)}")
    if part >= 0 and alone is None:
        moves = {"between episodes", "within episodes", "samplers_moved"}
        assert schedules.seen.keys() >= {*KINDS, *moves, "asked", "won", "wasted", "segments_lost", "actor_hung"}
        assert schedules.seen["limits found"] > 0


def test_the_shortest_failing_schedule_shows_little_but_the_events_that_matter(
    schedules: Schedules, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Actor.end

    def broken(actor: Actor, now: float) -> Kill:
        held = dict(actor.holds)
        kill = end(actor, now)
        actor.holds = held  # as if the new process still had the samplers of the lost one
        return kill

    monkeypatch.setattr(Actor, "end", broken)
    drawn = next(draws.drawn for seed in range(100) if schedules.problem(draws := Draws(seed)))
    first, _, *events, problem = schedules.shortest(drawn).splitlines()
    assert "but the sampler is at segment 0" in problem
    assert "slowness {0: 1.0, " in first
    assert "backup requests False" in first
    assert len(events) < 20
    ends = [event for event in events if any(word in event for word in ("dies", "hangs", "wrong", "leaves"))]
    assert 1 <= len(ends) + ("lost []" not in first) <= 2, "of a process"
    assert all("answers after 0.0 s" in event for event in events if event not in ends), "nothing else happens"
