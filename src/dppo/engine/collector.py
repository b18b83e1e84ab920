"""Collector: the learner's view of the samplers, wherever they are; InProcessCollector; the requests to actors."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from dppo.engine.ledger import ReplayLedger
from dppo.envs.activity import ActivityRecord, replaying
from dppo.envs.silence import SilenceWatch, of_samplers
from dppo.hosts.host import host_of
from dppo.hosts.wire import SamplerPlan
from dppo.log import logger
from dppo.numerics.fingerprint import Expected
from dppo.numerics.portable import limit_blas
from dppo.ppo.exchange.records import (
    CollectionProgress,
    Incident,
    PolicySnapshot,
    SegmentReport,
    SegmentRequest,
    Timings,
)
from dppo.signals import CLOSING_S, StopSignals, at_most
from dppo.spaces.spaces import Spaces

PROGRESS_S = 1.0  # shortest interval between two reports of progress
SPARE = 20.0  # the same, in units of the time that a report takes
REPLAY_LOG_S = 30.0  # between two lines about a long replay

OnProgress = Callable[[CollectionProgress], None]
"""Called about once a second while segments are being collected."""


@dataclass(frozen=True, slots=True)
class Collected:
    """All segments of one iteration."""

    index: int
    """Index of these segments within the run."""
    policy: PolicySnapshot
    """The policy that collected them."""
    reports: list[SegmentReport]
    """N, in sampler order."""
    segments: list[Any]
    """N, in sampler order: each a `Segment`, or a reference to one if learners fetch them from the actors."""
    timings: list[Timings]
    """One for each process that took part."""
    collect_s: float
    """Seconds of collecting; with actors, from the request, or from the last segment of the iteration before if that is
    later, to the last segment."""
    transfer_s: float = 0.0
    """Seconds of `collect_s` spent on sending the policy and receiving segments."""
    incidents: list[Incident] = field(default_factory=list)
    """Actors lost or replaced during this collection."""
    actors: int = 0
    """Number of actors that are running at its end; 0 in process."""


class Collector(Protocol):
    """Collects segment 0, 1, 2, ... of all samplers: in this process, or from actors."""

    expected: Expected | None
    """The numerics that every process must have."""

    def describe(self, stop: StopSignals) -> Spaces:
        """Create the environments of one sampler and return their spaces.

        Waits for: one actor, until its deadline. Fails when: the environment raises, or no actor can be started.
        """

    def request(self, policy: PolicySnapshot, index: int) -> None:
        """Ask every sampler for segment `index` of the run, collected with `policy`; does not wait.

        Segments are requested in order, and several may be requested before the first is received.
        """

    def receive(self, stop: StopSignals) -> Collected:
        """Receive the segments that were requested first, and record in the ledger how to rebuild the samplers.

        Consumes: the first request. Produces: N segments in sampler order. Waits for: every sampler, each actor until
        its deadline. Fails when: an environment raises, or an actor has used up its restarts.
        """

    def renew(self) -> None:
        """Drop all requests and rebuild all samplers, because received segments must be collected again."""

    def notes(self) -> list[str]:
        """Return lines about slow actors for the end of the run."""
        return []

    def close(self) -> None:
        """Stop all actors; close all environments."""


class ProgressReports:
    """Calls `on_progress` about once a second while the segments of an iteration are being collected."""

    def __init__(self, on_progress: OnProgress, batch_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_progress = on_progress
        self._batch_size = batch_size  # env steps of an iteration
        self._clock = clock
        self._index, self._began, self._due_at = 0, 0.0, math.inf

    def begin(self, index: int, began: float) -> None:
        """Note that the segments of iteration `index` have been waited for since `began`."""
        self._index, self._began = index, began
        self._due_at = began + PROGRESS_S

    @property
    def due(self) -> bool:
        """True when it is time for a report."""
        return self._clock() >= self._due_at

    def send(self, steps: int, processes: int, took_s: float = 0.0) -> None:
        """Report that `processes` have made `steps` env steps for the request; it took `took_s` to find out.

        Those of a segment that two of them make count twice until one has sent it, but never beyond the batch.
        """
        steps = min(steps, self._batch_size or steps)
        now, global_step = self._clock(), self._index * self._batch_size + steps
        self._due_at = now + max(PROGRESS_S, SPARE * took_s)
        self._on_progress(CollectionProgress(self._index + 1, steps, global_step, processes, now - self._began))


class InProcessCollector(Collector):
    """A collector for debugging, for fast environments, and as the reference in tests."""

    def __init__(
        self,
        plan: SamplerPlan,
        ledger: ReplayLedger,
        on_progress: OnProgress = lambda progress: None,
        hint: str = "",
    ) -> None:
        """Prepare; `hint` ends the first line about an environment that does not return from a call."""
        self._num_samplers = plan.sampling.num_samplers
        self._ledger = ledger
        self._reports = ProgressReports(on_progress, plan.sampling.batch_size)
        record = ActivityRecord(on_replay=ReplayLog(), on_step=self._report)
        self._new_host = partial(host_of, plan, record)
        self._silence = SilenceWatch(record, of_samplers(plan.env.env_name), hint)
        self._host = self._new_host()
        self._threads = limit_blas(1)
        self.expected: Expected | None = None  # this process has computed it
        self._spaces: Spaces | None = None
        self._requests: deque[tuple[PolicySnapshot, int]] = deque()
        self._next = 0  # index of the segment that the samplers can collect without being rebuilt

    def describe(self, stop: StopSignals) -> Spaces:
        """Create the environments of the first sampler and return their spaces."""
        self._silence.start()
        with stop.interruptible():
            self._spaces = self._host.spaces(0)
        return self._spaces

    def request(self, policy: PolicySnapshot, index: int) -> None:
        """Store the request, which `receive` carries out."""
        self._requests.append((policy, index))

    def receive(self, stop: StopSignals) -> Collected:
        """Collect the segments that were requested first; a signal ends this in the middle of a step."""
        assert self._requests, "receive() without request()"
        policy, index = self._requests.popleft()
        began = time.monotonic()
        self._reports.begin(index, began)
        rebuilt = index != self._next
        requests = [
            SegmentRequest(sampler, index, self._ledger.rebuild(sampler, index) if rebuilt else None)
            for sampler in range(self._num_samplers)
        ]
        with stop.interruptible():
            answer = self._host.collect(requests, policy, self._spaces if rebuilt or index == 0 else None)
        self._next = index + 1
        reports, segments = zip(*answer.made, strict=True)
        for report in reports:
            self._ledger.record(report)
        return Collected(index, policy, list(reports), list(segments), [answer.timings], time.monotonic() - began)

    def renew(self) -> None:
        """Close all environments; the next `receive` rebuilds the samplers."""
        self._host.close()
        self._host = self._new_host()
        self._requests.clear()
        self._next = 0

    def close(self) -> None:
        """Close all environments; one that does not close in time is left alone, with a traceback."""
        with at_most(CLOSING_S):
            self._host.close()
        self._silence.close()
        self._threads.restore_original_limits()

    def _report(self, steps: int) -> None:
        """Report progress after an env step: nobody else can look while this process is busy."""
        if self._reports.due:
            self._reports.send(steps, processes=1)


class ReplayLog:
    """Logs the progress of a long replay every half minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at, self._before = 0.0, math.inf

    def __call__(self, replayed: int, to_replay: int) -> None:
        """Take note of the steps replayed so far; if they are fewer than before, a new replay has begun."""
        now = self._clock()
        if replayed < self._before:
            self._logged_at = now
        self._before = replayed
        if now - self._logged_at >= REPLAY_LOG_S:
            self._logged_at = now
            logger.warning("%s", replaying(replayed, to_replay))


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
