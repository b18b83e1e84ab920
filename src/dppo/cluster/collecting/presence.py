"""Presence: whether enough actors are running to collect segments. Pure: no Ray, no clock."""

from collections.abc import Mapping

from dppo.cluster.collecting import roster
from dppo.cluster.collecting.messages import Command, Limits, Log
from dppo.cluster.collecting.roster import Actor, State
from dppo.errors import ClusterError, counted

PATIENCE_S = 5.0  # without enough actors, before that is logged


class Presence:
    """Waits for actors: until a deadline if their number is fixed, without one if they join and leave."""

    def __init__(self, actors: Mapping[int, Actor], running: dict[int, Actor], limits: Limits) -> None:
        self._actors, self._running, self._limits = actors, running, limits
        self._few_since: float | None = None
        self.logged = False
        """True while the log says that the run waits for actors."""

    @property
    def enough(self) -> bool:
        """True if segments may be collected."""
        return len(self._running) >= self._limits.fewest_actors

    def leave(self, actor: Actor) -> bool:
        """Let an actor accept no more questions; return False if it is leaving already, or is the only one running."""
        if actor.state in (State.LEAVING, State.LEFT) or self._running.keys() == {actor.actor_id}:
            return False
        self._running.pop(actor.actor_id, None)
        actor.state = State.LEAVING if actor.has_process else State.LEFT
        return True

    def check(self, now: float) -> list[Command]:
        """Return a message once too few actors have been running for a while, and one once there are enough again.

        Raises:
            ClusterError: actors whose number is fixed cannot be started.
        """
        if self.enough:
            logged, self.logged, self._few_since = self.logged, False, None
            return [Log(f"training goes on with {counted(len(self._running), 'actor')}")] if logged else []
        if self._few_since is None:
            self._few_since = now
        if self._limits.elastic:
            if self.logged or now - self._few_since < PATIENCE_S:
                return []
            self.logged = True
            numbers = f"{len(self._running)} running, at least {self._limits.fewest_actors} wanted"
            return [Log(f"training waits for actors: {numbers}; `ray status` shows the room in the cluster")]
        missing = sorted(self._actors.values(), key=lambda actor: actor.missing_since)
        if min(now - self._few_since, now - missing[-1].missing_since) > self._limits.nobody_s:
            raise ClusterError(roster.none_started(missing[0], len(missing), self._limits))
        return []
