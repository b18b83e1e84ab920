"""WaitLog: logs what a run waits for, once nothing has happened for a while."""

from dppo.engine.actors import Actor, ActorState
from dppo.engine.deadline import UNSEEN_S
from dppo.engine.hosting import Hosting, samplers_named
from dppo.engine.messages import LONGEST_QUIET_S, Limits, Log
from dppo.engine.patience import Patience
from dppo.engine.requests import Requests

BACKUPS = (
    "backup_requests=True (--backup-requests) would let an idle actor make a late segment, too"
)
NAMED = 8  # samplers in a message
MAX_PARTS = 4  # actors in a message


class WaitLog:
    """Logs a line once nothing has happened for a while, and then after longer and longer times, until news arrive."""

    def __init__(
        self, hosting: Hosting, requests: Requests, patience: Patience, limits: Limits
    ) -> None:
        self.news_at = 0.0
        """Time of the last sign of progress."""
        self._hosting = hosting
        self._requests = requests
        self._patience = patience
        self._limits = limits
        self._index = -2  # segments that `_quiet_s` is about; -1: the first environment
        self._quiet_s = limits.quiet_s  # seconds without a sign of progress until a line

    def check(self, now: float, *, described: bool) -> list[Log]:
        """Return a line if one is due: about the first environment, or if that is `described`, about segments."""
        index = self._requests.index if described else -1
        if index != self._index:
            self._index = index
            self._quiet_s = self._limits.quiet_s
        if now - self.news_at <= self._quiet_s:
            return []
        self.news_at = now
        self._quiet_s = max(self._limits.quiet_s, min(2 * self._quiet_s, LONGEST_QUIET_S))
        return [Log(self._describe(now))]

    def _describe(self, now: float) -> str:
        waited_s = now - self._requests.began
        hosting = self._hosting
        starts = _shortened(
            [_describe_start(actor) for actor in hosting.actors.values() if actor.is_missing]
        )
        if self._index < 0:
            first = f"waiting for the first environment for {waited_s:.0f} s"
            return "; ".join([first, *starts, *_shortened(self._describe_places(now))])
        positions = hosting.positions
        owed = sorted(
            sampler
            for sampler, position in positions.items()
            if position.next_arrival <= self._index
        )
        samplers = samplers_named(owed[:NAMED])
        if len(owed) > NAMED:
            samplers += " ..."
        late_actors = [positions[sampler].host for sampler in owed]
        segments = (
            f"waiting for {len(owed)} of {len(positions)} segments for {waited_s:.0f} s ({samplers})"
            f"{self._describe_nodes(late_actors)}"
        )
        parts = [segments, *starts, *_shortened(self._describe_places(now))]
        if hosting.slots.limited:
            parts.append(str(hosting.slots))
        parts.append(self._describe_limits(late_actors, now))
        some_idle = any(not actor.queue for actor in hosting.running.values())
        if (
            some_idle
            and not starts
            and not hosting.slots.limited
            and not self._limits.backup_requests
        ):
            parts.append(BACKUPS)
        return "; ".join(parts)

    def _describe_nodes(self, late_actors: list[Actor]) -> str:
        """Return the nodes of late actors, "" if all actors are on the same node."""
        if len({actor.node for actor in self._hosting.running.values()}) < 2:
            return ""
        nodes = sorted(
            {actor.node for actor in late_actors if actor.state is ActorState.RUNNING} - {""}
        )
        if len(nodes) > NAMED:
            nodes[NAMED:] = ["..."]
        return f" on {', '.join(nodes)}" if nodes else ""

    def _describe_places(self, now: float) -> list[str]:
        """Return where actors are that replay, then actors seen twice in the same place, and actors out of sight."""
        replaying = []
        standing = []
        unseen = []
        for actor in self._hosting.actors.values():
            deadline = actor.deadline
            progress = deadline.progress
            if not actor.queue:
                continue
            name = f"actor {actor.actor_id}"
            if actor.node:
                name += f" on {actor.node}"
            standstill_s = deadline.standstill[1]
            unseen_s = now - deadline.unseen_since
            duration = ""
            if standstill_s > 0:
                limit_s = self._patience.longest_wait_s(actor)
                duration = f" for {standstill_s:.0f} s, of {limit_s:g} s at most"
            if unseen_s > UNSEEN_S:
                unseen.append(f"{name} has not been seen for {unseen_s:.0f} s")
            elif progress is not None and actor.current_question.rebuilds:
                replaying.append(f"{name}: {progress}{duration}")
            elif progress is not None and duration:
                standing.append(f"{name}: {progress}{duration}")
        return replaying + standing + unseen

    def _describe_limits(self, late_actors: list[Actor], now: float) -> str:
        """Return after how many seconds without progress the late actors are replaced."""
        limits = sorted({self._limit_s(actor, now) for actor in late_actors})
        seconds = f"{limits[0]:g}"
        if len(limits) > 1:
            # limits of replacements, constructors and resets are longer
            seconds += f" to {limits[-1]:g}"
        return f"an actor that makes no progress for {seconds} s is replaced"

    def _limit_s(self, actor: Actor, now: float) -> float:
        deadline = actor.deadline
        # shorter limits follow from the phase in which a look finds it
        if deadline.progress is None and now - deadline.unseen_since > UNSEEN_S:
            return deadline.due - deadline.began
        return self._patience.longest_wait_s(actor)


def _describe_start(actor: Actor) -> str:
    verb = "restarted" if actor.ever_started else "started"
    return f"actor {actor.actor_id} is being {verb}"


def _shortened(parts: list[str]) -> list[str]:
    if len(parts) <= MAX_PARTS:
        return parts
    return [*parts[:MAX_PARTS], f"and so are {len(parts) - MAX_PARTS} more"]
