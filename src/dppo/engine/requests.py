"""Requests: the segments that were requested and have not been taken, by their index."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from dppo.engine.collector import Collected
from dppo.ppo.exchange.records import Incident, PolicySnapshot, SegmentReport, Timings


@dataclass(slots=True)
class Request:
    """The request for one segment of each sampler: the policy that collects them, and what has arrived."""

    policy: PolicySnapshot
    results: dict[int, tuple[SegmentReport, Any]] = field(default_factory=dict)
    """Reports and segments by sampler."""
    timings: dict[int, Timings] = field(default_factory=dict)
    """Sums by the id of the actor."""


class Requests:
    """The requests for segments `index`, `index` + 1, ... that have not been taken."""

    def __init__(self, num_samplers: int) -> None:
        self.index = 0
        """Index of the segments to be taken next."""
        self.began = 0.0
        """Time since which these are waited for: of the last request, or of the last `take`."""
        self.pending: dict[int, Request] = {}
        """Requests by the index of the segments."""
        self._num_samplers = num_samplers
        self._num_missing = 0  # segments that have been requested and have not arrived

    @property
    def end(self) -> int:
        """The index after the last request."""
        return self.index + len(self.pending)

    @property
    def owed(self) -> bool:
        """True if a segment that has been requested has not arrived."""
        return self._num_missing > 0

    def add(self, policy: PolicySnapshot, index: int, now: float) -> bool:
        """Add the segments with this index; return whether no others are pending."""
        is_only = not self.pending
        if is_only:
            self.index = index
            self.began = now
        assert index == self.end, "segments are requested in order"
        self.pending[index] = Request(policy)
        self._num_missing += self._num_samplers
        return is_only

    def record_answer(
        self,
        index: int,
        actor_id: int,
        results: Sequence[tuple[SegmentReport, Any]],
        timings: Timings,
    ) -> None:
        """Store the part of an answer that counts, and its timings."""
        if not results:  # the segments may have been taken
            return
        request = self.pending[index]
        self._num_missing -= len(results)
        for report_and_segment in results:
            sampler = report_and_segment[0].sampler_id
            assert sampler not in request.results, "a segment counts once"
            request.results[sampler] = report_and_segment
        earlier = request.timings.get(actor_id)
        request.timings[actor_id] = timings if earlier is None else earlier + timings

    def clear(self) -> None:
        """Drop all requests."""
        self.pending.clear()
        self._num_missing = 0

    @property
    def finished(self) -> bool:
        """True when all segments to be taken next have arrived."""
        return (
            self.index not in self.pending
            or len(self.pending[self.index].results) == self._num_samplers
        )

    def take(self, now: float, transfer_s: float, incidents: list[Incident]) -> Collected:
        """Remove the first request; return its segments with these times and incidents."""
        assert self.index in self.pending, "receive() without request()"
        assert self.finished, "some segments have not arrived"
        request = self.pending.pop(self.index)
        results = [request.results[sampler] for sampler in sorted(request.results)]
        collected = Collected(
            index=self.index,
            policy=request.policy,
            reports=[report for report, _ in results],
            segments=[segment for _, segment in results],
            timings=request.timings,
            collect_s=now - self.began,
            transfer_s=transfer_s,
            incidents=incidents,
        )
        self.index += 1
        self.began = now
        return collected
