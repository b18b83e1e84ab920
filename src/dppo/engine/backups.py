"""Backups: requests to idle actors for late segments."""

import sys
from collections.abc import Iterator
from typing import Any

from dppo.engine.actors import Actor
from dppo.engine.balancing import Balancing
from dppo.engine.hosting import Hosting
from dppo.ppo.exchange.questions import Answer
from dppo.ppo.exchange.records import SegmentReport

PAUSE = 0.05  # between two looks for late segments, in units of the time for a segment

Share = tuple[Actor, tuple[int, ...]]
"""An actor, and the samplers that it is asked for."""


class Backups:
    """Finds late segments and idle actors that would make them sooner, replay included; drops the later answers.

    The actor that answers first keeps the sampler. Later answers for the sampler from the other actor are discarded.
    """

    def __init__(self, hosting: Hosting, balancing: Balancing) -> None:
        self._hosting = hosting
        self._balancing = balancing
        self._helpers: dict[int, Actor] = {}  # actors that have been asked as well, by sampler
        # last question whose answer is too late, by actor and sampler
        self._void: dict[tuple[int, int], int] = {}
        self._look_at = 0.0
        self.num_requests = 0
        """Segments that were asked for again."""
        self.num_sooner = 0
        """Segments that the helper sent first."""
        self.wasted_steps = 0

    def due(self, index: int, now: float) -> Iterator[Share]:
        """Yield idle actors, each with the samplers whose segment `index` it can make sooner than their own actors."""
        balancing = self._balancing
        if now < self._look_at or not balancing.typical_s or self._hosting.limit < sys.maxsize:
            return
        self._look_at = now + PAUSE * balancing.typical_s
        running = list(self._hosting.running.values())
        idle = sorted((actor for actor in running if not actor.queue), key=balancing.segments_s)
        if not idle:
            return
        owners = [
            actor for actor in running if actor.queue and actor.current_question.index == index
        ]
        left_s = {actor.actor_id: balancing.left_s(actor, now) for actor in owners}
        for owner in sorted(owners, key=lambda actor: (-left_s[actor.actor_id], actor.actor_id)):
            late_samplers = self._late_samplers(owner, index)
            helpers = idle[: len(late_samplers)]
            shares = [
                (helper, tuple(late_samplers[number :: len(helpers)]))
                for number, helper in enumerate(helpers)
            ]
            needs_s = [balancing.needs_s(helper, share, rebuilt=True) for helper, share in shares]
            if shares and max(needs_s) < left_s[owner.actor_id]:
                del idle[: len(helpers)]
                self.num_requests += len(late_samplers)
                for helper, share in shares:
                    self._helpers.update(dict.fromkeys(share, helper))
                yield from shares

    def _late_samplers(self, owner: Actor, index: int) -> list[int]:
        samplers = []
        for sampler in owner.current_question.samplers:
            position = self._hosting.positions[sampler]
            is_making = position.maker is owner and position.next_arrival == index
            if is_making and sampler not in self._helpers:
                samplers.append(sampler)
        return samplers

    def counted(self, actor: Actor, ask_id: int, answer: Answer) -> list[tuple[SegmentReport, Any]]:
        """Return the results of an answer that count, and let its actor go on with their samplers."""
        results = []
        for report_and_segment in answer.results:
            report = report_and_segment[0]
            if ask_id > self._void.get((actor.actor_id, report.sampler_id), 0):
                results.append(report_and_segment)
                self._decide(actor, report)
            else:
                self.wasted_steps += report.steps
        return results

    def _decide(self, actor: Actor, report: SegmentReport) -> None:
        """Let the actor that has sent a segment first go on with the sampler; void what the other one makes."""
        sampler = report.sampler_id
        helper = self._helpers.pop(sampler, None)
        slower = self._hosting.positions[sampler].maker if helper is actor else helper
        if slower is not None:
            self._void[slower.actor_id, sampler] = max(slower.queue, default=0)
            slower.holds.pop(sampler, None)
        if helper is actor:
            self.num_sooner += 1
            if self._hosting.has_room(actor):  # otherwise its own actor rebuilds it
                self._hosting.rehost(sampler, actor)
            self._hosting.record_question((sampler,), report.index, actor)

    def record_end(self, actor: Actor) -> None:
        """Forget the requests to a process that is abandoned."""
        self._helpers = {
            sampler: helper for sampler, helper in self._helpers.items() if helper is not actor
        }

    def notes(self) -> list[str]:
        facts = f"{self.num_sooner:,} of them sooner, {self.wasted_steps:,} env steps wasted"
        return [f"Backup requests: {self.num_requests:,} segments asked for again, {facts}."]
