"""The engine with thousands of actors, in virtual time: the work for an event is counted, never timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from driver import answer_to

from dppo.engine.engine import CollectionEngine
from dppo.engine.hosting import shares
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import (
    Answered,
    Ask,
    Command,
    Describe,
    Died,
    Kill,
    Limits,
    Process,
    Progressed,
    Start,
    Started,
)
from dppo.envs.activity import Activity, Phase
from dppo.ppo.exchange.records import PolicySnapshot

LIMITS = Limits(segment_timeout_s=100, max_actor_restarts=3)
COUNTED = 100  # times an event of each kind, at least, is counted, if there are as many


def instructions(call: Callable[[], object]) -> int:
    """Return the number of Python instructions that a call executes."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


class Counted:
    """An engine whose actors each host one sampler; counts the work for some events of each kind."""

    def __init__(self, num_actors: int) -> None:
        self.most: dict[str, int] = {}
        self._every = max(1, num_actors // COUNTED)
        self._now = 0.0
        self._seen = Counter[str]()
        ledger = ReplayLedger(num_actors, replay=True)
        self.engine = CollectionEngine(shares(num_actors, num_actors), ledger, LIMITS)
        starts = self.engine.describe(0.0)
        assert len(starts) == num_actors
        for start in starts:
            assert isinstance(start, Start)
            for command in self.on(Started(start.process)):
                if isinstance(command, Describe):
                    self.on(Answered(command.process, command.ask_id, "spaces"))  # type: ignore[arg-type]

    def on(self, event: Any) -> list[Command]:
        commands: list[Command] = []

        def both() -> None:
            commands.extend(self.engine.on(event, self._now))
            commands.extend(self.engine.tick(self._now))

        self._now += 0.001
        kind = type(event).__name__
        self._seen[kind] += 1
        if self._seen[kind] % self._every:
            both()
        else:
            self.most[kind] = max(self.most.get(kind, 0), instructions(both))
        return commands

    def request(self, index: int) -> list[Ask]:
        policy = PolicySnapshot(index, np.zeros(1, np.float32))
        return [
            command
            for command in self.engine.request(policy, index, self._now)
            if isinstance(command, Ask)
        ]

    def answer(self, ask: Ask) -> list[Command]:
        return self.on(answer_to(ask))


def worked(num_actors: int) -> dict[str, int]:
    """Return the most work for one event of each kind, during two iterations in which a tenth of the actors die."""
    run = Counted(num_actors)
    for index in range(2):
        asks = run.request(index)
        answered = 0
        assert len(asks) == num_actors
        while asks:
            ask = asks.pop()
            run.on(Progressed(ask.process, Activity(2, 1, Phase.STEP, 0, 0, 0, 0)))
            if index == 0 or ask.process.actor_id % 10 or ask.process.number > 1:
                assert run.answer(ask) == []
                answered += 1
                continue
            commands = run.on(Died(ask.process, "died"))
            assert [type(command) for command in commands if isinstance(command, Kill | Start)] == [
                Kill,
                Start,
            ]
            asked = run.on(Started(Process(ask.process.actor_id, 2)))
            assert len(asked) == 1
            asks += [command for command in asked if isinstance(command, Ask)]
        assert answered == num_actors
        assert run.engine.requests.finished
        run.engine.requests.take(0.0, 0.0, [])
    return run.most


def test_an_event_is_as_much_work_with_600_actors_as_with_20() -> None:
    few = worked(20)
    many = worked(600)
    assert many.keys() == {"Started", "Answered", "Progressed", "Died"} >= few.keys()
    assert max(many.values()) < 2 * max(few.values()), (few, many)


def test_actors_are_started_at_once_and_each_is_asked_when_it_runs() -> None:
    """The first segments do not wait for the last actor."""
    engine = CollectionEngine(shares(3, 3), ReplayLedger(3, replay=True), LIMITS)
    assert engine.describe(0.0) == [Start(Process(actor, 1)) for actor in range(3)]
    engine.on(Started(Process(0, 1)), 1.0)
    (describe,) = engine.tick(1.0)
    assert isinstance(describe, Describe)
    engine.on(Answered(describe.process, describe.ask_id, "spaces"), 2.0)  # type: ignore[arg-type]
    asked = [engine.request(PolicySnapshot(0, np.zeros(1, np.float32)), 0, 2.0)]
    for actor in (2, 1):
        engine.on(Started(Process(actor, 1)), 10.0 + actor)
        asked.append(engine.tick(10.0 + actor))
    assert [
        [command.process.actor_id for command in commands if isinstance(command, Ask)]
        for commands in asked
    ] == [[0], [2], [1]]
