"""Requests: the segments that were requested and have not been taken, by their index."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dppo.engine.collector import Collected
from dppo.ppo.exchange.records import Incident, PolicySnapshot, SegmentReport, Timings


@dataclass(slots=True)
class Request:
    """One segment of each sampler: the policy that collects them, and what has arrived."""

    policy: PolicySnapshot
    made: dict[int, tuple[SegmentReport, Any]] = field(default_factory=dict)  # by sampler
    timings: dict[int, Timings] = field(default_factory=dict)  # by the id of the actor


class Requests:
    """The requests for segments `index`, `index` + 1, ... that have not been taken."""

    def __init__(self, num_samplers: int) -> None:
        self.index = 0  # of the segments to be taken next
        self.began = 0.0  # time since which they are waited for: that of the last request, or of the last `take`
        self.pending: dict[int, Request] = {}  # by the index of the segment
        self._num_samplers = num_samplers

    @property
    def end(self) -> int:
        """The index after that of the last request."""
        return self.index + len(self.pending)

    @property
    def owed(self) -> bool:
        """True if a segment that has been requested has not arrived."""
        return any(len(request.made) < self._num_samplers for request in self.pending.values())

    def add(self, policy: PolicySnapshot, index: int, now: float) -> bool:
        """Add segments `index`; return whether they are the only ones."""
        first = not self.pending
        if first:
            self.index, self.began = index, now
        assert index == self.end, "segments are requested in order"
        self.pending[index] = Request(policy)
        return first

    def arrived(self, index: int, actor_id: int, made: Sequence[tuple[SegmentReport, Any]], timings: Timings) -> None:
        """Keep the segments `index` of an answer, if any of them count, and its timings."""
        if made:  # else they may have been taken
            request = self.pending[index]
            request.made |= {one[0].sampler_id: one for one in made}
            request.timings[actor_id] = request.timings.get(actor_id, Timings(actor=actor_id)) + timings

    @property
    def finished(self) -> bool:
        """True when all segments to be taken next have arrived."""
        return self.index not in self.pending or len(self.pending[self.index].made) == self._num_samplers

    def take(self, now: float, transfer_s: float, incidents: list[Incident]) -> Collected:
        """Return the segments that were requested first, with these figures; keep none."""
        assert self.index in self.pending, "receive() without request()"
        assert self.finished, "some segments have not arrived"
        request, index, began = self.pending.pop(self.index), self.index, self.began
        self.index, self.began = index + 1, now
        reports, segments = zip(*(request.made[sampler] for sampler in sorted(request.made)), strict=True)
        figures = list(request.timings.values()), now - began, transfer_s, incidents
        return Collected(index, request.policy, list(reports), list(segments), *figures)
