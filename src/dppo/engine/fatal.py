"""Steps in which every process of an actor is lost: their episodes are given up, so that a run can go on."""

from collections.abc import Iterable

from dppo.engine.actors import Actor
from dppo.engine.place import Place
from dppo.errors import counted
from dppo.ppo.exchange.records import FatalStep

MOST_GIVEN_UP = 3  # episodes of a sampler that one segment may give up
NO_STEPS: dict[int, tuple[FatalStep, ...]] = {}


class FatalSteps:
    """The steps that samplers do not take again until their next segments have arrived."""

    def __init__(self) -> None:
        self._steps: dict[int, tuple[FatalStep, ...]] = {}

    def lost(self, actor: Actor, place: Place | None, limit: int) -> str | None:
        """Count a loss of an actor, and the place of its process; return None if the run has to end.

        After `limit` losses in a row, the loss after them gives up the episode in which all were, if there is one: then
        return a line that says so.
        """
        if not actor.losses:
            actor.lost_in = place
        elif actor.lost_in != place:
            actor.lost_in = None
        if actor.losses < limit:
            actor.losses += 1
            return ""
        if actor.lost_in is None or not limit or not self._give_up(actor.lost_in):
            return None
        actor.losses = 0
        return (
            f"\nIt was replaced {counted(limit, 'time')} in a row in {actor.lost_in} (max_actor_restarts={limit}): "
            f"this episode is given up, as after an exception"
        )

    def _give_up(self, place: Place) -> bool:
        """Let a step not be taken again; return False if that has not helped, or has been done too often."""
        steps = self._steps.get(place.sampler_id, ())
        if place.step in steps or len(steps) == MOST_GIVEN_UP:
            return False
        self._steps[place.sampler_id] = (*steps, place.step)
        return True

    def of(self, samplers: Iterable[int]) -> dict[int, tuple[FatalStep, ...]]:
        """Return the steps by sampler, of those that have some."""
        if not self._steps:  # nearly always: there is a question for each segment
            return NO_STEPS
        return {sampler: self._steps[sampler] for sampler in samplers if sampler in self._steps}

    def arrived(self, sampler: int) -> None:
        """Forget the steps of a sampler, whose episodes have been given up in the segment that arrived."""
        if self._steps:
            self._steps.pop(sampler, None)
