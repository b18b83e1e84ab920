"""The engine with hundreds of actors, in virtual time: the work for an event is counted, never timed."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from driver import Driver, answer_to

from dppo.engine.hosting import shares
from dppo.engine.messages import Limits, Process, Progressed, Start
from dppo.envs.activity import Activity, Phase

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


class Counted(Driver):
    """An engine whose actors each host one sampler; counts the work for some events of each kind."""

    def __init__(self, num_actors: int) -> None:
        self.most = Counter[str]()
        self._every = max(1, num_actors // COUNTED)
        self._events = Counter[str]()
        limits = Limits(segment_timeout_s=100, max_actor_restarts=3)
        super().__init__(shares(num_actors, num_actors), limits)

    def on(self, event: Any) -> None:
        self.now += 0.001
        kind = type(event).__name__
        self._events[kind] += 1
        handle = partial(super().on, event)
        if self._events[kind] % self._every:
            handle()
        else:
            self.most[kind] = max(self.most[kind], instructions(handle))


def worked(num_actors: int) -> dict[str, int]:
    """Return the most work for one event of each kind, during two iterations in which a tenth of the actors die."""
    run = Counted(num_actors)
    for index in range(2):
        run.request(index)
        assert len(run.asks) == num_actors
        while run.asks:
            ask = run.asks.pop()
            actor_id = ask.process.actor_id
            run.on(Progressed(ask.process, Activity(2, 1, Phase.STEP, 0, 0, 0, 0)))
            if index == 0 or actor_id % 10 or ask.process.number > 1:
                run.on(answer_to(ask))
            else:
                run.die(actor_id)
                run.start(actor_id, 2)
                assert run.asks[-1].process == Process(actor_id, 2)
        assert run.finished
        run.take()
    return run.most


def test_an_event_is_as_much_work_with_600_actors_as_with_20() -> None:
    few = worked(20)
    work_of_600 = worked(600)
    assert work_of_600.keys() == {"Started", "Answered", "Progressed", "Died"} >= few.keys()
    assert max(work_of_600.values()) < 2 * max(few.values()), (few, work_of_600)


def test_actors_are_started_at_once_and_each_is_asked_when_it_runs() -> None:
    """The first segments do not wait for the last actor."""
    driver = Driver([[0], [1], [2]], described=False)
    assert driver.all(Start) == [Start(Process(actor, 1)) for actor in range(3)]
    driver.start(0)
    driver.describe()
    driver.request(0)
    assert driver.asked() == [(0, 0, False)]
    for actor in (2, 1):
        driver.start(actor)
        assert driver.asked() == [(actor, 0, False)]
