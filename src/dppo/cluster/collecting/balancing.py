"""Balancing: moves samplers from actors that would finish late to those that would finish early. Pure: no clock."""

from __future__ import annotations

import math
from collections import deque
from heapq import heapify, heappop, heapreplace

from dppo.cluster.collecting import roster
from dppo.cluster.collecting.hosting import Hosting
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import Log
from dppo.cluster.collecting.roster import Actor, Asked, State
from dppo.cluster.wire import Answer

MARGIN = 0.1  # of the time of an iteration: a smaller gain is within the noise
SLOW = 1.5  # times the typical pace
WORTH = 0.1  # of an iteration: what a slow actor must cost to be reported
ITERATIONS = 5  # in which an actor must be slow before a line is logged


class Balancing:
    """Knows the pace of each actor, and decides which samplers move.

    A sampler moves if another actor would have its next segment sooner, replay included: at best at the end of an
    episode, where there is nothing to replay. If the replay takes longer than this iteration would gain, the sampler
    stays until the run has waited as long as the replay takes; so the total is at most twice what it could be.
    """

    def __init__(self, actors: dict[int, Actor], hosting: Hosting, ledger: ReplayLedger) -> None:
        self.typical_s = 0.0
        """Seconds for a segment on a typical actor; 0 while no pace is known."""
        self._actors, self._hosting, self._ledger = actors, hosting, ledger
        self._segment_steps = 1
        self._overheads = deque([0.0], maxlen=5)  # seconds to rebuild a sampler, besides the steps that are replayed
        self._takers: list[tuple[float, int, Actor]] = []  # heap: times at which they would have one segment more
        self._began = self._planned_at = math.inf

    # ------------------------------------------------------------------ measuring

    def measure(self, actor: Actor, question: Asked, answer: Answer) -> None:
        """Take note of the times of an answer."""
        timings, pace, count = answer.timings, actor.pace, len(question.samplers)
        self._segment_steps = max(1, answer.made[0][0].steps)
        seconds, builds = (timings.total_s - timings.replay_s) / count, question.rebuilds or question.index == 0
        if pace.on_trial and builds:
            pace.add(max(seconds / 10, seconds - self._overhead_s()))
        elif not builds and seconds > 0:
            pace.add(seconds)
            if pace.first_s:
                self._overheads.append(max(0.0, pace.first_s - pace.segment_s))
                pace.first_s = 0.0
        elif builds and pace.segment_s:
            expected_s = pace.segment_s * (count + timings.replayed_steps / self._segment_steps)
            self._overheads.append(max(0.0, timings.total_s - expected_s) / max(1, question.rebuilds))
        elif builds:
            pace.first_s = seconds

    def rate(self, actor: Actor) -> float:
        """Return the seconds that an actor is expected to need for a segment."""
        return actor.pace.segment_s or self.typical_s or 1.0

    def replay_s(self, sampler: int, actor: Actor) -> float:
        """Return the seconds that an actor would need to rebuild a sampler whose last segment has arrived."""
        steps = self._open_steps(sampler) / self._segment_steps
        return self._overhead_s() + self.rate(actor) * steps if self.typical_s else 0.0

    def _open_steps(self, sampler: int) -> float:
        return self._ledger.open_steps(sampler, self._hosting.places[sampler].arrived)

    def _overhead_s(self) -> float:
        return sorted(self._overheads)[len(self._overheads) // 2]

    def finish_s(self, actor: Actor, end: int, now: float) -> float:
        """Return the seconds until an actor would have made all segments before `end`; one that is late, twice that."""
        rate, places = self.rate(actor), self._hosting.places
        if not self.typical_s:
            return rate * len(actor.samplers)
        to_do = sum(end - places[sampler].arrived for sampler in actor.samplers)
        if not actor.asked:
            return rate * to_do
        first_s = rate * len(actor.first.samplers)
        queued = sum(len(question.samplers) for question in actor.asked.values())
        return rate * max(to_do, queued) - first_s + abs(first_s - (now - actor.began))

    # ------------------------------------------------------------------ moving

    def plan(self, end: int, now: float) -> list[Log]:
        """Move samplers, before those of the segments before `end` are asked for that have not been yet."""
        self._began, period_s = min(self._began, now), max(0.0, now - self._planned_at)
        running, self._planned_at = list(self._hosting.running.values()), now
        paces = sorted(actor.pace.segment_s for actor in running if actor.pace.segment_s)
        self.typical_s = paces[len(paces) // 2] if paces else 0.0
        ends = {one.actor_id: self.finish_s(one, end, now) for one in self._actors.values() if one.samplers}
        self._takers = [
            (now + ends.get(one.actor_id, 0.0) + self.rate(one), one.actor_id, one) for one in running if not one.waits
        ]
        if not self._takers or not ends:
            return []
        heapify(self._takers)
        early = self._takers[0][0] - now
        late = [(end_s, actor_id) for actor_id, end_s in ends.items() if early < (1 - MARGIN) * end_s]
        for _, actor_id in sorted(late, key=lambda one: (-one[0], self._actors[one[1]].state is State.RUNNING, one[1])):
            self.settle(self._actors[actor_id], end, now)
        for actor in running:
            if not actor.samplers and actor.pace.segment_s and actor.pace.rest():
                self._try_again(actor, max(running, key=lambda one: len(one.samplers)))
        return self._blame(running, period_s)

    def _try_again(self, actor: Actor, giver: Actor) -> None:
        """Move a sampler to a slow actor, to measure it again, if there is little to replay."""
        sampler = min(giver.samplers, key=self._open_steps)
        if self.replay_s(sampler, actor) <= self.rate(actor):
            self._hosting.rehost(sampler, actor)
            actor.pace.begin_trial()

    def settle(self, giver: Actor, end: int, now: float) -> None:
        """Move samplers of an actor if others are sooner; wait for its answers if they decide that."""
        giver.waits = False
        rate, late, places = self.rate(giver), self.finish_s(giver, end, now), self._hosting.places
        for sampler in sorted(giver.samplers, key=lambda one: (self._open_steps(one), -one)):
            while self._takers and self._takers[0][2].state is not State.RUNNING:
                heappop(self._takers)
            if not self._takers or self._takers[0][2] is giver:
                return
            when, actor_id, taker = self._takers[0]
            early, cost_s = max(0.0, when - now), 0.0
            load, its_load = rate * len(giver.samplers), self.rate(taker) * (len(taker.samplers) + 1)
            if early >= (1 - MARGIN) * late or its_load >= (1 + MARGIN) * load:
                return
            if taker.samplers or taker.pace.segment_s:  # else it takes one at once, wherever that is in an episode
                if places[sampler].asked > places[sampler].arrived:
                    giver.waits = bool(giver.asked)
                    return
                cost_s = self.replay_s(sampler, taker)
                if cost_s > min(rate, late - early) + giver.pace.waited_s:
                    giver.pace.waited_s += max(0.0, min(rate, load - its_load))
                    return
            giver.pace.waited_s, late = 0.0, late - rate
            self._hosting.rehost(sampler, taker)
            heapreplace(self._takers, (when + cost_s + self.rate(taker), actor_id, taker))

    # ------------------------------------------------------------------ reporting

    def _blame(self, running: list[Actor], period_s: float) -> list[Log]:
        """Add to the cost of the slowest actor; return a line about it, once."""
        slowest = max(running, key=lambda actor: actor.pace.segment_s)
        fair_s = self.typical_s * math.ceil(len(self._hosting.places) / len(running))
        longest_s = max(self.rate(actor) * len(actor.samplers) for actor in running)
        pace, cost_s = slowest.pace, max(0.0, min(longest_s, period_s) - fair_s)
        if slowest.pace.segment_s <= SLOW * self.typical_s or not period_s:
            return []
        pace.cost_s += cost_s
        pace.iterations += cost_s > WORTH * period_s
        if pace.iterations != ITERATIONS or cost_s <= WORTH * period_s:
            return []
        return [Log(roster.slow(slowest, self.typical_s, cost_s / period_s))]

    def notes(self) -> list[str]:
        """Return a line for the end of the run about the actor that has cost most, if that is worth a line."""
        worst = max(self._actors.values(), key=lambda actor: actor.pace.cost_s)
        share = worst.pace.cost_s / max(1e-9, self._planned_at - self._began)
        return [roster.slow(worst, self.typical_s, share)] if share > WORTH else []
