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


class Backups:
    """Finds late segments and idle actors that would make them sooner, replay included; drops the later answers.

    The actor of the first answer goes on with the sampler. What the other one makes of it from then on does not count.
    """

    def __init__(self, hosting: Hosting, balancing: Balancing) -> None:
        self._places, self._hosting, self._balancing = hosting.positions, hosting, balancing
        self._helpers: dict[int, Actor] = {}  # those that have been asked as well, by sampler
        self._void: dict[tuple[int, int], int] = {}  # by actor and sampler, the last question whose answer is too late
        self._look_at = 0.0
        self.asked = self.won = self.wasted_steps = 0

    def due(self, index: int, now: float) -> Iterator[tuple[Actor, tuple[int, ...]]]:
        """Yield idle actors, and for each the samplers whose segment `index` it can make sooner than their own."""
        balancing = self._balancing
        if now < self._look_at or not balancing.typical_s or self._hosting.limit < sys.maxsize:
            return
        running = list(self._hosting.running.values())
        self._look_at = now + PAUSE * balancing.typical_s
        idle = sorted((actor for actor in running if not actor.asked), key=balancing.takes_s)
        busy = [actor for actor in running if actor.asked and actor.first.index == index] if idle else []
        for early_s, _, owner in sorted((-balancing.left_s(one, now), one.actor_id, one) for one in busy):
            positions = ((sampler, self._places[sampler]) for sampler in owner.first.samplers)
            making = [sampler for sampler, place in positions if place.maker is owner and place.arrived == index]
            late = [sampler for sampler in making if sampler not in self._helpers]
            helpers = idle[: len(late)]
            shares = [(helper, tuple(late[number :: len(helpers)])) for number, helper in enumerate(helpers)]
            if shares and max(balancing.needs_s(*share, rebuilt=True) for share in shares) < -early_s:
                del idle[: len(helpers)]
                self.asked += len(late)
                self._helpers |= {sampler: helper for helper, share in shares for sampler in share}
                yield from shares

    def counted(self, actor: Actor, ask_id: int, answer: Answer) -> list[tuple[SegmentReport, Any]]:
        """Return the part of an answer that counts, and let its actor go on with these samplers."""
        made = [one for one in answer.made if ask_id > self._void.get((actor.actor_id, one[0].sampler_id), 0)]
        self.wasted_steps += sum(report.steps for report, _ in answer.made) - sum(report.steps for report, _ in made)
        for report, _ in made:
            sampler = report.sampler_id
            helper = self._helpers.pop(sampler, None)
            later = self._places[sampler].maker if helper is actor else helper
            if later is not None:
                self._void[later.actor_id, sampler] = max(later.asked, default=0)
                later.holds.pop(sampler, None)
            if helper is actor:
                self.won += 1
                if self._hosting.has_room(actor):  # else its own actor rebuilds it
                    self._hosting.rehost(sampler, actor)
                self._hosting.asked((sampler,), report.index, actor)
        return made

    def ended(self, actor: Actor) -> None:
        """Forget the requests to a process that is abandoned."""
        self._helpers = {sampler: helper for sampler, helper in self._helpers.items() if helper is not actor}

    def notes(self) -> list[str]:
        """Return a line for the end of the run."""
        won, wasted = f"{self.won:,} of them sooner", f"{self.wasted_steps:,} env steps wasted"
        return [f"Backup requests: {self.asked:,} segments asked for again, {won}, {wasted}."]
