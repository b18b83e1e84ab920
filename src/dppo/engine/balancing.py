"""Balancing: moves samplers from late actors to early ones; and backup requests to idle ones. Pure: no clock."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from dppo.engine.actors import Actor, State
from dppo.engine.hosting import Hosting
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Log
from dppo.ppo.exchange.questions import Answer, Question

MARGIN = 0.1  # of a time: a smaller gain is within the noise, and a smaller cost of a slow actor not worth a line
SLOW = 1.5  # times the typical pace
NOISE_S = 0.02  # seconds of a segment; a smaller difference is due to processes that share cores, not to an actor
ITERATIONS = 5  # in which a slow actor must cost something before a line is logged


class Balancing:
    """Knows the pace of each actor, and decides which samplers move.

    A sampler moves if another actor would make its segments sooner, at best at the end of an episode, where there is
    nothing to replay. It stays as long as the replay takes longer than an iteration gains and than the run has waited
    for its actor so far, so that the total is at most twice what it could be.
    """

    def __init__(self, actors: dict[int, Actor], hosting: Hosting, ledger: ReplayLedger) -> None:
        self.typical_s = 0.0  # seconds for a segment on a typical actor; 0 while no pace is known
        self._actors, self._hosting, self._places, self._ledger = actors, hosting, hosting.positions, ledger
        self._segment_steps = 1
        self._added = 1.0  # by a further sampler of an actor, in units of the time of one alone; less with threads
        self._overheads = deque([0.0], maxlen=5)  # seconds to rebuild a sampler, without its replay
        self._takers: list[tuple[float, int, Actor]] = []  # heap: times at which they would have one segment more
        self._began = self._planned_at = math.inf

    def measure(self, actor: Actor, question: Question, answer: Answer) -> None:
        """Take note of the times of an answer."""
        timings, pace, count = answer.timings, actor.pace, len(question.samplers)
        self._segment_steps = max(1, answer.made[0][0].steps)
        in_turn, alone = count, 1.0
        if answer.used is not None:  # one sampler alone would not have waited for the CPU
            in_turn, alone = 1, 1 - answer.used * (count - 1) / count
            self._added += (answer.used / (count * alone) - self._added) / 2
        seconds = alone * (timings.total_s - timings.replay_s) / in_turn
        if question.index and not question.rebuilds:
            rest_s = alone * (timings.total_s - timings.env_s) / in_turn
            if seconds > 0:
                pace.add(count, rest_s + alone * min([report.env_s for report, _ in answer.made]))
        elif not pace.recent and pace.segment_s:  # it is tried again
            pace.add(count, max(seconds / 10, seconds - self._overhead_s()))
        elif pace.segment_s:
            replay_s = pace.segment_s * timings.replayed_steps / self._segment_steps
            extra_s = alone * timings.total_s - in_turn * pace.segment_s - replay_s
            self._overheads.append(max(0.0, extra_s / max(1, min(in_turn, len(question.rebuilds)))))

    def takes_s(self, actor: Actor, samplers: int = 1) -> float:
        """Return the seconds that an actor is expected to need for a segment of each of some samplers."""
        own_s, typical_s = actor.pace.segment_s, self.typical_s or 1.0
        known = actor.pace.samplers  # more in threads may share what its process does not show: other CPUs, a licence
        times = self._times(min(samplers, known)) * max(1.0, samplers / known)
        return times * (own_s if own_s and abs(own_s - typical_s) > NOISE_S else typical_s)

    def _times(self, samplers: int) -> float:
        return 1 + (samplers - 1) * self._added if samplers else 0.0

    def _one_more_s(self, actor: Actor) -> float:
        return self.takes_s(actor, len(actor.samplers) + 1) - self.takes_s(actor, len(actor.samplers))

    def replay_s(self, sampler: int, actor: Actor) -> float:
        """Return the seconds that an actor would need to rebuild a sampler."""
        steps = self._open_steps(sampler)
        return self._overhead_s() + self.takes_s(actor) * steps / self._segment_steps if self.typical_s else 0.0

    def _open_steps(self, sampler: int) -> float:
        return self._ledger.open_steps(sampler, self._places[sampler].arrived)

    def _overhead_s(self) -> float:
        return sorted(self._overheads)[len(self._overheads) // 2]

    def needs_s(self, actor: Actor, samplers: Sequence[int], *, rebuilt: bool) -> float:
        """Return the seconds that an actor would need for a segment of each of some samplers."""
        replays_s = sum(self.replay_s(one, actor) for one in samplers if rebuilt)
        return self.takes_s(actor, len(samplers)) + replays_s * self._times(len(samplers)) / len(samplers)

    def left_s(self, actor: Actor, now: float) -> float:
        """Return the seconds until an actor answers its first question.

        One that is later than its pace promises is expected to need as long again as it is late.
        """
        whole_s = self.needs_s(actor, actor.first.samplers, rebuilt=bool(actor.first.rebuilds))
        return abs(whole_s - (now - actor.began))

    def _finish_s(self, actor: Actor, end: int, now: float) -> float:
        """Return the seconds until an actor would have made its segments before `end`."""
        each_s = self.takes_s(actor, hosted := max(1, len(actor.samplers))) / hosted
        to_do = sum(end - self._places[sampler].arrived for sampler in actor.samplers)
        if not actor.asked or not self.typical_s:
            return each_s * to_do if self.typical_s else float(len(actor.samplers))
        queue = sum(len(question.samplers) for question in actor.asked.values())
        return each_s * (max(to_do, queue) - len(actor.first.samplers)) + self.left_s(actor, now)

    def plan(self, end: int, now: float) -> list[Log]:
        """Move samplers before segments `end` - 1 are asked for; return a line if an actor turns out to be slow."""
        running, period_s = list(self._hosting.running.values()), max(0.0, now - self._planned_at)
        self._began, self._planned_at = min(self._began, now), now
        paces = sorted([pace_s for actor in running if (pace_s := actor.pace.segment_s)])
        self.typical_s = paces[len(paces) // 2] if paces else 0.0
        most_s = max([self.takes_s(one, len(one.samplers)) for one in self._actors.values()], default=0.0)
        least_s = min([self.takes_s(one, len(one.samplers) + 1) for one in running], default=math.inf)
        if least_s < (1 + MARGIN) * most_s:  # else nobody gains
            self._move(running, end, now)
        for actor in [one for one in running if not one.samplers and (one.pace.segment_s or self._added < 1)]:
            self._retry_slow_actor(actor)
        is_slow = bool(paces) and paces[-1] > max(SLOW * self.typical_s, self.typical_s + NOISE_S)
        return self._report_slow_actors(running, period_s) if is_slow and period_s else []

    def _move(self, running: list[Actor], end: int, now: float) -> None:
        ends = {one.actor_id: self._finish_s(one, end, now) for one in self._actors.values() if one.samplers}
        self._takers = [
            (now + ends.get(one.actor_id, 0.0) + self._one_more_s(one), one.actor_id, one)
            for one in running
            if not one.waits and self._hosting.has_room(one)
        ]
        heapify(self._takers)
        for actor_id in sorted(ends, key=lambda one: (-ends[one], self._actors[one].state is State.RUNNING, one)):
            if not self._takers or self._takers[0][0] - now >= (1 - MARGIN) * ends[actor_id]:
                break
            self._rebalance(self._actors[actor_id], end, now)

    def questions(self, end: int, now: float) -> Iterator[tuple[Actor, int, tuple[int, ...]]]:
        """Yield actor, index and samplers of each question for segments before `end` that can be asked now."""
        self._hosting.ready(*self._hosting.slots.take_waiting())
        while ready := self._hosting.take_ready():
            for actor in ready:
                if actor.waits and not actor.asked:
                    self._rebalance(actor, end, now)
                for index, samplers in () if actor.waits else self._hosting.next_of(actor, end):
                    if able := self._hosting.slots.grant(actor, samplers, now):
                        yield actor, index, able

    def _rebalance(self, giver: Actor, end: int, now: float) -> None:
        """Move samplers of an actor if others are sooner; if that depends on its next answers, let it wait for them."""
        late, giver.waits = self._finish_s(giver, end, now), False
        for sampler in sorted(giver.samplers, key=lambda one: (self._open_steps(one), -one)):
            while self._takers and not self._takes(self._takers[0][2]):
                heappop(self._takers)
            when, taker_id, taker = self._takers[0] if self._takers else (math.inf, 0, giver)
            own_s, early, replay_s = self.takes_s(giver), max(0.0, when - now), 0.0
            own_all_s = self.takes_s(giver, len(giver.samplers))
            lasting_s = own_all_s - self.takes_s(taker, len(taker.samplers) + 1)
            # With threads, one segment more takes nearly nothing: that an actor is ahead now is no reason to move.
            least_s = (MARGIN if self._added < 1 else -MARGIN) * own_all_s
            if taker is giver or early >= (1 - MARGIN) * late or lasting_s < least_s:
                return
            if taker.samplers or taker.pace.segment_s:  # else it takes one at once, wherever that is in an episode
                if self._places[sampler].asked > self._places[sampler].arrived:
                    giver.waits = bool(giver.asked)
                    return
                replay_s = self.replay_s(sampler, taker)
                if replay_s > min(own_s, late - early) + giver.pace.waited_s:
                    giver.pace.waited_s += max(0.0, min(own_s, lasting_s))
                    return
            self._hosting.rehost(sampler, taker)
            giver.pace.waited_s, late = 0.0, late - self._one_more_s(giver)
            heapreplace(self._takers, (when + replay_s + self._one_more_s(taker), taker_id, taker))

    def _takes(self, actor: Actor) -> bool:
        return actor.state is State.RUNNING and self._hosting.has_room(actor)

    def _retry_slow_actor(self, actor: Actor) -> None:
        """Move a sampler to an actor that was slow, or in threads new; the longer it rests, the more it may replay."""
        pace, own_s = actor.pace, self.takes_s(actor)
        pace.rested += 1
        costs = [  # in its time; one that has been asked for moves when that has arrived, with so much more to replay
            (self.replay_s(one, actor) + own_s * (place.asked - place.arrived), -len(place.host.samplers), one)
            for one, place in (self._places.items() if pace.rested >= pace.patience else ())
            if len(place.host.samplers) > 1 and place.host.state is State.RUNNING
        ]
        cost_s, _, sampler = min(costs, default=(math.inf, 0, 0))
        if cost_s <= own_s * (pace.rested / pace.patience - 1):
            self._hosting.rehost(sampler, actor)
            pace.rested, pace.patience, pace.enough, pace.recent = 0, 2 * pace.patience, 1, ()

    def _report_slow_actors(self, running: list[Actor], period_s: float) -> list[Log]:
        """Add to the cost of the slowest actor; return a line about it, once."""
        slowest = max(running, key=lambda actor: actor.pace.segment_s)
        longest_s = max(self.takes_s(actor, len(actor.samplers)) for actor in running)
        fair_s = self.typical_s * self._times(math.ceil(len(self._places) / len(running)))
        pace, cost_s = slowest.pace, max(0.0, min(longest_s, period_s) - fair_s)
        pace.cost_s += cost_s
        pace.iterations += cost_s > MARGIN * period_s
        worth = pace.iterations == ITERATIONS and cost_s > MARGIN * period_s
        return [Log(slow(slowest, self.typical_s, cost_s / period_s))] if worth else []

    def notes(self) -> list[str]:
        """Return a line for the end of the run about the actor that has cost most, if that is worth a line."""
        worst = max(self._actors.values(), key=lambda actor: actor.pace.cost_s)
        share = worst.pace.cost_s / max(1e-9, self._planned_at - self._began)
        return [slow(worst, self.typical_s, share)] if share > MARGIN else []


def slow(actor: Actor, typical_s: float, share: float) -> str:
    """Return the message about an actor that makes the run longer; `share` of the time is due to it."""
    on_node = f" on node {actor.node}" if actor.node else ""
    return (
        f"actor {actor.actor_id}{on_node} needs {actor.pace.segment_s:.3g} s for a segment, a typical actor "
        f"{typical_s:.3g} s, which costs {share:.0%} of the time. Its samplers move where that saves time. "
        f"Look for other programs on that node, or run fewer actors there."
    )
