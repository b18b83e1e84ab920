"""Balancing: moves samplers from late actors to early ones. Pure: no Ray, no clock."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from dppo.engine.actors import Actor, ActorState
from dppo.engine.hosting import Hosting
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Log
from dppo.ppo.exchange.questions import Answer, Question

# Share of a time: a smaller gain is within the noise, and a smaller cost of a slow actor is not worth a line.
MARGIN = 0.1
# An actor is slow if a segment takes it this many times as long as a typical actor.
SLOW = 1.5
# Seconds of a segment: a smaller difference is due to processes that share cores, not to an actor.
NOISE_S = 0.02
# Number of iterations that a slow actor must delay before a line is logged.
ITERATIONS = 5


class Balancing:
    """Knows the pace of each actor, and decides which samplers move.

    A sampler moves if another actor would make its segments sooner, at best at the end of an episode, where there is
    nothing to replay. It stays as long as the replay takes longer than an iteration gains and than the run has waited
    for its actor so far, so that the total is at most twice the optimum.
    """

    def __init__(self, actors: dict[int, Actor], hosting: Hosting, ledger: ReplayLedger) -> None:
        self.typical_s = 0.0
        """Seconds for a segment on a typical actor; 0 while no pace is known."""
        self._actors = actors
        self._hosting = hosting
        self._ledger = ledger
        self._segment_steps = 1  # steps of a segment, as the last answer shows
        # Share of a segment that one more sampler of an actor adds: 1 if samplers take turns, less with threads.
        self._added_share = 1.0
        # seconds to rebuild a sampler, without its replay
        self._overheads = deque([0.0], maxlen=5)
        # Heap of actors with room: the time at which each would have made one segment more, its id, and the actor.
        self._takers: list[tuple[float, int, Actor]] = []
        # times of the first and of the last call of `plan`
        self._began_at = math.inf
        self._planned_at = math.inf

    # ------------------------------------------------------------------ measuring

    def measure(self, actor: Actor, question: Question, answer: Answer) -> None:
        """Measure the times of an answer."""
        timings = answer.timings
        pace = actor.pace
        num_samplers = len(question.samplers)
        self._segment_steps = max(1, answer.results[0][0].steps)
        in_turn = num_samplers  # samplers that took turns
        alone_share = 1.0  # share of the time that one sampler alone would have taken
        # with threads, one sampler alone would not have waited for the CPU
        if answer.cpu_share is not None:
            in_turn = 1
            alone_share = 1 - answer.cpu_share * (num_samplers - 1) / num_samplers
            added_share = answer.cpu_share / (num_samplers * alone_share)
            self._added_share += (added_share - self._added_share) / 2
        if question.index and not question.rebuilds:
            if timings.total_s > timings.replay_s:
                rest_s = timings.total_s - timings.env_s
                fastest_env_s = min([report.env_s for report, _ in answer.results])
                segment_s = alone_share * rest_s / in_turn + alone_share * fastest_env_s
                pace.add(num_samplers, segment_s)
            return
        if not pace.segment_s:
            return
        # a slow actor is tried again
        if not pace.recent:
            seconds = alone_share * (timings.total_s - timings.replay_s) / in_turn
            pace.add(num_samplers, max(seconds / 10, seconds - self._overhead_s()))
            return
        replay_s = pace.segment_s * timings.replayed_steps / self._segment_steps
        extra_s = alone_share * timings.total_s - in_turn * pace.segment_s - replay_s
        rebuilt_in_turn = max(1, min(in_turn, len(question.rebuilds)))
        self._overheads.append(max(0.0, extra_s / rebuilt_in_turn))

    def _overhead_s(self) -> float:
        overheads = sorted(self._overheads)
        return overheads[len(overheads) // 2]

    # ------------------------------------------------------------------ predicting

    def segments_s(self, actor: Actor, samplers: int = 1) -> float:
        """Return the seconds that an actor is expected to need for a segment of each of some samplers."""
        segment_s = self.typical_s or 1.0
        own_segment_s = actor.pace.segment_s
        if own_segment_s and abs(own_segment_s - segment_s) > NOISE_S:
            segment_s = own_segment_s
        measured = actor.pace.samplers
        if samplers <= measured:
            return self._relative_time(samplers) * segment_s
        # More samplers in threads than were measured may share what the process does not show: other CPUs, a licence.
        return self._relative_time(measured) * (samplers / measured) * segment_s

    def _relative_time(self, samplers: int) -> float:
        """Return the time for a segment of each of some samplers, relative to the time of a single sampler."""
        if samplers == 0:
            return 0.0
        return 1 + (samplers - 1) * self._added_share

    def _hosted_s(self, actor: Actor) -> float:
        """Predict the seconds for a segment of each sampler of an actor."""
        return self.segments_s(actor, len(actor.samplers))

    def _one_more_s(self, actor: Actor) -> float:
        return self._with_one_more_s(actor) - self._hosted_s(actor)

    def _with_one_more_s(self, actor: Actor) -> float:
        return self.segments_s(actor, len(actor.samplers) + 1)

    def replay_s(self, sampler: int, actor: Actor) -> float:
        """Predict how long an actor would need to rebuild a sampler; 0 while no pace is known."""
        if not self.typical_s:
            return 0.0
        replayed = self._open_steps(sampler) / self._segment_steps
        return self._overhead_s() + self.segments_s(actor) * replayed

    def _open_steps(self, sampler: int) -> float:
        position = self._hosting.positions[sampler]
        return self._ledger.open_steps(sampler, position.next_arrival)

    def needs_s(self, actor: Actor, samplers: Sequence[int], *, rebuilt: bool) -> float:
        """Return the seconds that an actor would need for a segment of each of some samplers.

        With `rebuilt`, the actor first replays the open episodes of these samplers.
        """
        needed_s = self.segments_s(actor, len(samplers))
        if not rebuilt:
            return needed_s
        replays_s = sum(self.replay_s(sampler, actor) for sampler in samplers)
        count = len(samplers)
        return needed_s + replays_s * self._relative_time(count) / count

    def left_s(self, actor: Actor, now: float) -> float:
        """Return the seconds until an actor is expected to answer its current question.

        An actor that is late is expected to need as long again as it is late, hence the absolute value.
        """
        question = actor.current_question
        expected_s = self.needs_s(actor, question.samplers, rebuilt=bool(question.rebuilds))
        return abs(expected_s - (now - actor.deadline.began))

    def _finish_s(self, actor: Actor, end: int, now: float) -> float:
        """Return the seconds until an actor would have made its segments before `end`."""
        if not self.typical_s:
            return float(len(actor.samplers))
        hosted = max(1, len(actor.samplers))
        each_s = self.segments_s(actor, hosted) / hosted
        positions = [self._hosting.positions[sampler] for sampler in actor.samplers]
        to_do = sum(end - position.next_arrival for position in positions)
        if not actor.queue:
            return each_s * to_do
        queued = sum(len(question.samplers) for question in actor.queue.values())
        behind = max(to_do, queued) - len(actor.current_question.samplers)
        return each_s * behind + self.left_s(actor, now)

    # ------------------------------------------------------------------ moving

    def plan(self, end: int, now: float) -> list[Log]:
        """Move samplers between actors, before the segments of index `end` - 1 are requested; log a slow actor once."""
        running = list(self._hosting.running.values())
        period_s = max(0.0, now - self._planned_at)
        self._began_at = min(self._began_at, now)
        self._planned_at = now
        paces = sorted([actor.pace.segment_s for actor in running if actor.pace.segment_s])
        self.typical_s = 0.0
        if paces:
            self.typical_s = paces[len(paces) // 2]
        longest_s = max(map(self._hosted_s, self._actors.values()), default=0.0)
        least_s = min(map(self._with_one_more_s, running), default=math.inf)
        # without an actor that would be done sooner with one sampler more, no move gains anything
        if least_s < (1 + MARGIN) * longest_s:
            self._move(running, end, now)
        for actor in running:
            if not actor.samplers and (actor.pace.segment_s or self._added_share < 1):
                self._retry_slow_actor(actor)
        slowest_s = max(paces, default=0.0)
        is_slow = slowest_s > max(SLOW * self.typical_s, self.typical_s + NOISE_S)
        if is_slow and period_s:
            return self._report_slow_actors(running, period_s)
        return []

    def _move(self, running: list[Actor], end: int, now: float) -> None:
        """Move samplers from the actors that would finish last to those that have room, while that gains enough."""
        finish_s = {
            actor.actor_id: self._finish_s(actor, end, now)
            for actor in self._actors.values()
            if actor.samplers
        }
        self._takers = [
            (
                now + finish_s.get(actor.actor_id, 0.0) + self._one_more_s(actor),
                actor.actor_id,
                actor,
            )
            for actor in running
            if not actor.waits and self._hosting.has_room(actor)
        ]
        heapify(self._takers)
        actors = [self._actors[actor_id] for actor_id in finish_s]
        # the latest first; of equal ones, those whose process is gone
        actors.sort(
            key=lambda actor: (
                -finish_s[actor.actor_id],
                actor.state is ActorState.RUNNING,
                actor.actor_id,
            )
        )
        for actor in actors:
            if not self._takers:
                break
            earliest_s = self._takers[0][0] - now
            if earliest_s >= (1 - MARGIN) * finish_s[actor.actor_id]:
                break
            self._rebalance(actor, end, now)

    def questions(self, indices: range, now: float) -> Iterator[tuple[Actor, int, tuple[int, ...]]]:
        """Yield actor, index and samplers of each question for the segments `indices` that can be asked now."""
        slots = self._hosting.slots
        if slots.limited:
            self._hosting.mark_ready(*slots.take_waiting())
        while ready := self._hosting.take_ready():
            for actor in ready:
                if actor.waits and not actor.queue:
                    self._rebalance(actor, indices.stop, now)
                if actor.waits:
                    continue
                for index in indices:
                    granted = slots.grant(actor, self._hosting.askable(actor, index), now)
                    if granted:
                        yield actor, index, granted

    def _rebalance(self, giver: Actor, end: int, now: float) -> None:
        """Move samplers of an actor if others are sooner; if that depends on its next answers, let it wait for them."""
        giver.waits = False
        late_s = self._finish_s(giver, end, now)
        by_cost = sorted(giver.samplers, key=lambda sampler: (self._open_steps(sampler), -sampler))
        for sampler in by_cost:
            while self._takers and not self._can_take(self._takers[0][2]):
                heappop(self._takers)
            if not self._takers:
                return
            ready_at, taker_id, taker = self._takers[0]
            early_s = max(0.0, ready_at - now)
            giver_s = self._hosted_s(giver)
            # gained in each later iteration
            lasting_s = giver_s - self._with_one_more_s(taker)
            # With threads, one segment more takes nearly nothing: that an actor is ahead now is no reason to move.
            required_s = (MARGIN if self._added_share < 1 else -MARGIN) * giver_s
            is_soon_enough = early_s < (1 - MARGIN) * late_s
            if taker is giver or not is_soon_enough or lasting_s < required_s:
                return
            replay_s = 0.0
            # a new actor takes a sampler at once, wherever that is
            if taker.samplers or taker.pace.segment_s:
                position = self._hosting.positions[sampler]
                if position.next_request > position.next_arrival:
                    giver.waits = bool(giver.queue)
                    return
                replay_s = self.replay_s(sampler, taker)
                segment_s = self.segments_s(giver)
                gained_now_s = min(segment_s, late_s - early_s)
                if replay_s > gained_now_s + giver.pace.waited_s:
                    giver.pace.waited_s += max(0.0, min(segment_s, lasting_s))
                    return
            self._hosting.rehost(sampler, taker)
            giver.pace.waited_s = 0.0
            late_s -= self._one_more_s(giver)
            next_ready_at = ready_at + replay_s + self._one_more_s(taker)
            heapreplace(self._takers, (next_ready_at, taker_id, taker))

    def _can_take(self, actor: Actor) -> bool:
        return actor.state is ActorState.RUNNING and self._hosting.has_room(actor)

    def _retry_slow_actor(self, actor: Actor) -> None:
        """Move a sampler to an actor that was slow, or in threads new; the longer it rests, the more it may replay."""
        pace = actor.pace
        pace.rested += 1
        if pace.rested < pace.rest_before_retry:
            return
        segment_s = self.segments_s(actor)
        costs = []
        for sampler, position in self._hosting.positions.items():
            host = position.host
            if len(host.samplers) > 1 and host.state is ActorState.RUNNING:
                # A sampler that has been asked for moves when its segments have arrived, and has to replay these, too.
                asked_for = position.next_request - position.next_arrival
                cost_s = self.replay_s(sampler, actor) + segment_s * asked_for
                costs.append((cost_s, -len(host.samplers), sampler))
        cost_s, _, sampler = min(costs, default=(math.inf, 0, 0))
        if cost_s <= segment_s * (pace.rested / pace.rest_before_retry - 1):
            self._hosting.rehost(sampler, actor)
            pace.rested = 0
            pace.rest_before_retry *= 2
            pace.enough_evidence = 1
            pace.recent = []

    # ------------------------------------------------------------------ lines about slow actors

    def _report_slow_actors(self, running: list[Actor], period_s: float) -> list[Log]:
        """Add to the cost of the slowest actor; return a line about it, once."""
        slowest = max(running, key=lambda actor: actor.pace.segment_s)
        longest_s = max(map(self._hosted_s, running))
        fair_share = math.ceil(len(self._hosting.positions) / len(running))
        fair_s = self.typical_s * self._relative_time(fair_share)
        cost_s = max(0.0, min(longest_s, period_s) - fair_s)
        slowest.pace.cost_s += cost_s
        if cost_s <= MARGIN * period_s:
            return []
        slowest.pace.costly_iterations += 1
        if slowest.pace.costly_iterations != ITERATIONS:
            return []
        return [Log(describe_slow(slowest, self.typical_s, cost_s / period_s))]

    def notes(self) -> list[str]:
        """Return a line for the end of the run about the actor that has cost most, if that is worth a line."""
        worst = max(self._actors.values(), key=lambda actor: actor.pace.cost_s)
        share = worst.pace.cost_s / max(1e-9, self._planned_at - self._began_at)
        if share > MARGIN:
            return [describe_slow(worst, self.typical_s, share)]
        return []


def describe_slow(actor: Actor, typical_s: float, share: float) -> str:
    """Return the message about an actor that makes the run longer; `share` of the time is due to it."""
    on_node = f" on node {actor.node}" if actor.node else ""
    return (
        f"actor {actor.actor_id}{on_node} needs {actor.pace.segment_s:.3g} s for a segment, a typical actor "
        f"{typical_s:.3g} s, which costs {share:.0%} of the time. Its samplers move where that saves time. "
        f"Look for other programs on that node, or run fewer actors there."
    )
