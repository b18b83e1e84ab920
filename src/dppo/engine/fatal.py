"""Steps in which every process of an actor is lost: their episodes are given up, so that a run can go on."""

from collections.abc import Iterable

from dppo.engine.actors import Actor, Place
from dppo.engine.ledger import ReplayLedger
from dppo.errors import counted
from dppo.invocation import flag
from dppo.ppo.exchange.records import FatalStep

MOST_GIVEN_UP = 3  # episodes of a sampler that one segment may give up


class FatalSteps:
    """The steps that samplers do not take again until their next segments have arrived."""

    def __init__(self, ledger: ReplayLedger) -> None:
        """Begin without steps; the `ledger` knows those of segments that have been made."""
        self._ledger = ledger
        self._steps: dict[int, tuple[FatalStep, ...]] = {}

    def record_loss(self, actor: Actor, place: Place | None, limit: int, now: float) -> str | None:
        """Count a loss of an actor `now`, and the place of its process; return None if the run has to end.

        After `limit` losses in a row, the loss after them gives up the episode in which all were, if there is one: then
        return a line that says so.
        """
        if not actor.losses:
            actor.lost_in = place
            actor.first_loss_at = now
        elif actor.lost_in != place:
            actor.lost_in = None
        if actor.losses < limit:
            actor.losses += 1
            return ""
        if actor.lost_in is None or not limit or not self._give_up(actor.lost_in):
            return None
        actor.losses = 0
        timeout = "step_timeout_s" if actor.lost_in.step.step else "reset_timeout_s"
        return (
            f"\nIt was replaced {counted(limit, 'time')} in a row in {actor.lost_in} (max_actor_restarts={limit}): "
            f"that is a fault of the environment, which gives up this episode, or ends the run (on_env_fault), "
            f"{now - actor.first_loss_at:.0f} s after the first loss; a smaller {flag(timeout)} or "
            f"{flag('max_actor_restarts')} does so sooner"
        )

    def _give_up(self, place: Place) -> bool:
        """Let a step not be taken again; return False if that has not helped, or has been done too often."""
        steps = self._steps.get(place.sampler_id, ())
        if place.step in steps or len(steps) == MOST_GIVEN_UP:
            return False
        self._steps[place.sampler_id] = (*steps, place.step)
        return True

    def of(self, samplers: Iterable[int], index: int) -> dict[int, tuple[FatalStep, ...]]:
        """Return the steps that segment `index` leaves out by sampler, of those that have some."""
        # each question asks, and nearly no run gives up a step
        if not self._steps and not self._ledger.has_given_up:
            return {}
        by_sampler = {
            sampler: (*self._ledger.given_up(sampler, index), *self._steps.get(sampler, ()))
            for sampler in samplers
        }
        return {sampler: steps for sampler, steps in by_sampler.items() if steps}

    def record_arrival(self, sampler: int) -> None:
        """Forget the steps of a sampler, whose episodes have been given up in the segment that arrived."""
        if self._steps:
            self._steps.pop(sampler, None)
