"""Requests: the segments that have been requested and not been taken, by index. Pure: no Ray, no clock."""

from typing import Any

from dppo.cluster.collecting.collector import Collected
from dppo.ppo.exchange.records import Incident, PolicySnapshot, SegmentReport, Timings


class Requests:
    """Keeps the policies that collect segments `index`, `index` + 1, ..., and what has arrived of these segments."""

    def __init__(self, num_samplers: int) -> None:
        self.index = 0
        """Index of the segments to be taken next."""
        self.began = 0.0
        """Time from which on they have been waited for: that of the last request, or of the last `take`."""
        self.owed = 0
        """Number of segments that have been requested and not arrived."""
        self.policies: dict[int, PolicySnapshot] = {}
        """By the index of the segment."""
        self._num_samplers = num_samplers
        self._received: dict[int, dict[int, tuple[SegmentReport, Any]]] = {}  # [index][sampler]
        self._timings: dict[int, dict[int, Timings]] = {}  # [index][id of the actor]

    @property
    def end(self) -> int:
        """The index after that of the last request."""
        return self.index + len(self.policies)

    def add(self, policy: PolicySnapshot, index: int, now: float) -> bool:
        """Add segments `index`; return whether they are the only ones."""
        first = not self.policies
        if first:
            self.index, self.began = index, now
        assert index == self.end, "segments are requested in order"
        self.policies[index], self._received[index], self._timings[index] = policy, {}, {}
        self.owed += self._num_samplers
        return first

    def arrived(self, made: tuple[SegmentReport, Any]) -> None:
        """Keep a segment."""
        self._received[made[0].index][made[0].sampler_id] = made
        self.owed -= 1

    def add_timings(self, index: int, actor_id: int, timings: Timings) -> None:
        """Add the timings of an answer with segments `index`."""
        own = self._timings[index]
        own[actor_id] = own[actor_id] + timings if actor_id in own else timings

    @property
    def finished(self) -> bool:
        """True when all segments to be taken next have arrived."""
        return self.index not in self.policies or len(self._received[self.index]) == self._num_samplers

    @property
    def steps_received(self) -> int:
        """Env steps of the segments to be taken next, as far as they have arrived."""
        return sum(report.steps for report, _ in self._received[self.index].values())

    def take(self, now: float, transfer_s: float, incidents: list[Incident]) -> Collected:
        """Return the segments that were requested first, with these figures; keep none."""
        assert self.index in self.policies, "receive() without request()"
        assert self.finished, "some segments have not arrived"
        index, received = self.index, self._received.pop(self.index)
        made = [received[sampler] for sampler in sorted(received)]
        began, self.index, self.began = self.began, index + 1, now
        return Collected(
            index=index,
            policy=self.policies.pop(index),
            reports=[report for report, _ in made],
            segments=[segment for _, segment in made],
            timings=list(self._timings.pop(index).values()),
            collect_s=now - began,
            transfer_s=transfer_s,
            incidents=incidents,
        )

    def clear(self) -> None:
        """Drop all requests."""
        self.owed = 0
        for by_index in (self.policies, self._received, self._timings):
            by_index.clear()
