"""Hosting: which actor hosts which sampler. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class Hosting:
    """The actor of each sampler; every sampler has one, running or not."""

    def __init__(self, at_start: Sequence[Sequence[int]]) -> None:
        """Host the samplers `at_start[actor_id]` on each actor."""
        self._where = {sampler: actor_id for actor_id, samplers in enumerate(at_start) for sampler in samplers}

    @property
    def samplers(self) -> set[int]:
        """All samplers."""
        return set(self._where)

    def host_of(self, sampler: int) -> int:
        """Return the actor of a sampler."""
        return self._where[sampler]

    def hosted_by(self, actor_id: int) -> tuple[int, ...]:
        """Return the samplers of an actor, in order."""
        return tuple(sorted(sampler for sampler, host in self._where.items() if host == actor_id))

    def move(self, samplers: Sequence[int], running: Sequence[int]) -> list[int]:
        """Move each of `samplers` to the one of the `running` actors with the fewest; return their new hosts."""
        for sampler in samplers:
            self._where[sampler] = min(running, key=lambda actor_id: len(self.hosted_by(actor_id)))
        return sorted({self._where[sampler] for sampler in samplers})

    def balance(self, running: Sequence[int]) -> None:
        """Even out the samplers of the `running` actors, to a difference of one; called between two segments.

        Samplers of other actors come first: these have no room.
        """
        loads = dict.fromkeys(set(running), 0)
        for actor_id in self._where.values():
            loads[actor_id] = loads.get(actor_id, 0) + 1
        while running:
            least, most = min(running, key=lambda one: (loads[one], one)), max(loads, key=lambda one: loads[one])
            if loads[most] - loads[least] < 2:
                return
            sampler = self.hosted_by(most)[-1]
            self._where[sampler] = least
            loads[most], loads[least] = loads[most] - 1, loads[least] + 1
