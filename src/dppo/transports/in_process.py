"""InProcessCollector: collects the segments of all samplers in this process."""

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dppo.attempts import WAITS_S
from dppo.engine.collector import Collected, Collector, OnProgress
from dppo.engine.ledger import ReplayLedger
from dppo.engine.progress import ProgressReports
from dppo.envs.activity import ActivityRecord, replaying
from dppo.envs.silence import SilenceWatch, name_sampler
from dppo.hosts.host import host_of
from dppo.hosts.plans import SamplerPlan
from dppo.log import logger
from dppo.numerics.arithmetic import limit_blas
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest
from dppo.signals import CLOSING_S, StopSignals, at_most
from dppo.spaces.spaces import Spaces

NUM_WAITS = 4  # 15 s, as long as an actor is replaced by default
REPLAY_LOG_S = 30.0  # between two lines about a long replay


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
        plan = replace(plan, waits_s=WAITS_S[:NUM_WAITS])
        self._resumed_at = plan.resumed_at or 0
        self._num_samplers = plan.sampling.num_samplers
        self._ledger = ledger
        self._reports = ProgressReports(on_progress, plan.sampling.batch_size)
        record = ActivityRecord(on_replay=ReplayLog(), on_step=self._report)
        self._record = record
        self._new_host = partial(host_of, plan, record)
        self._silence = SilenceWatch(record, name_sampler(plan.env.env_name), hint)
        self._host = self._new_host()
        self._threads = limit_blas(1)
        self.expected: Expected | None = None  # this process has computed it
        self._spaces: Spaces | None = None
        self._requests: deque[tuple[PolicySnapshot, int]] = deque()
        self._next = 0  # index of the segment that the samplers can collect without being rebuilt

    def describe(self, stop: StopSignals) -> Spaces:
        """Create the environments of the first sampler and return their spaces."""
        self._reports.begin(self._resumed_at, time.monotonic())
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
            SegmentRequest(
                sampler,
                index,
                self._ledger.rebuild(sampler, index) if rebuilt else None,
                self._ledger.given_up(sampler, index),
            )
            for sampler in range(self._num_samplers)
        ]
        with stop.interruptible():
            answer = self._host.collect(
                requests, policy, self._spaces if rebuilt or index == 0 else None
            )
        self._next = index + 1
        reports, segments = zip(*answer.results, strict=True)
        for report in reports:
            self._ledger.record(report)
        collect_s = time.monotonic() - began
        timings = {0: answer.timings}
        return Collected(index, policy, list(reports), list(segments), timings, collect_s)

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
        """Report progress within a question: no other process can read it while this one is busy."""
        if self._reports.due:
            self._reports.send(steps, processes=1, environments=self._record.look().environments)


class ReplayLog:
    """Logs the progress of a long replay every half minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._logged_at = 0.0
        self._last_replayed = math.inf

    def __call__(self, replayed: int, to_replay: int) -> None:
        """Take note of the steps replayed so far; if they are fewer than before, a new replay has begun."""
        now = self._clock()
        if replayed < self._last_replayed:
            self._logged_at = now
        self._last_replayed = replayed
        if now - self._logged_at >= REPLAY_LOG_S:
            self._logged_at = now
            logger.warning("%s", replaying(replayed, to_replay))
