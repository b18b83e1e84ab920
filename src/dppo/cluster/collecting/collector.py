"""Collector: the learner's view of its actors, in process or on Ray."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from dppo.cluster.collecting.engine import Collecting
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import Command, Fail, Limits, Log, Report
from dppo.cluster.collecting.transports import InProcess, Transport
from dppo.cluster.plans import SamplerPlan
from dppo.config.parts import Actors
from dppo.ppo.exchange.records import CollectionProgress, Incident, PolicySnapshot, SegmentReport, Timings
from dppo.signals import StopSignals
from dppo.spaces.spaces import Spaces


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
    incidents: list[Incident]
    """Actors lost or replaced during this collection."""
    timings: list[Timings]
    """One for each actor that took part."""
    collect_s: float
    """Seconds from the request to the last segment."""
    transfer_s: float
    """Seconds of `collect_s` spent on sending the policy and receiving segments."""

    @property
    def replayed_steps(self) -> int:
        """Env steps replayed to rebuild samplers."""
        return sum(timings.replayed_steps for timings in self.timings)

    @property
    def replay_s(self) -> float:
        """Seconds spent on replays, summed over actors."""
        return sum(timings.replay_s for timings in self.timings)


PROGRESS_S = 1.0  # shortest interval between two reports of progress


class Collector:
    """Runs the loop between engine and transport: the engine decides, the transport acts, this class waits."""

    def __init__(
        self,
        engine: Collecting,
        transport: Transport,
        notify: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        on_progress: Callable[[CollectionProgress], None] | None = None,
        batch_size: int = 0,
    ) -> None:
        """Take over the engine and the transport.

        Args:
            on_progress: called about once a second while segments are being collected.
            batch_size: env steps of an iteration, for `on_progress`.
        """
        self._engine = engine
        self._transport = transport
        self._notify = notify
        self._clock = clock
        self._incidents: list[Incident] = []
        self._request: tuple[PolicySnapshot, int] | None = None
        self._requested_at = 0.0
        self._on_progress = on_progress
        self._batch_size = batch_size
        self._progress_at = math.inf
        self._steps_seen = 0
        if isinstance(transport, InProcess) and on_progress is not None:
            transport.call_at_steps(self._report_progress)

    def describe(self, stop: StopSignals) -> Spaces:
        """Start the actors; create the environments of one sampler and return their spaces.

        Waits for: one actor, until its deadline. Fails when: the environment raises, or no actor can be started.
        """
        self._do(self._engine.describe(self._clock()))
        self._wait(stop, lambda: self._engine.spaces is not None)
        assert self._engine.spaces is not None
        return self._engine.spaces

    def request(self, policy: PolicySnapshot, index: int) -> None:
        """Ask every sampler for segment `index` of the run, collected with `policy`; does not wait."""
        self._request, self._requested_at = (policy, index), self._clock()
        self._progress_at = self._requested_at + PROGRESS_S
        self._transport.take_seconds()
        self._do(self._engine.request(policy, index, self._requested_at))

    def receive(self, stop: StopSignals) -> Collected:
        """Receive all requested segments.

        Consumes: the last request. Produces: N segments in sampler order. Waits for: every sampler, each actor until
        its deadline. Fails when: an environment raises, or an actor has used up its restarts.
        """
        assert self._request is not None, "receive() without request()"
        began = self._requested_at if self._transport.parallel else self._clock()
        self._wait(stop, lambda: self._engine.finished)
        (policy, index), self._request = self._request, None
        received, self._engine.received = self._engine.received, {}
        incidents, self._incidents = self._incidents, []
        return Collected(
            index=index,
            policy=policy,
            reports=[received[sampler][0] for sampler in sorted(received)],
            segments=[received[sampler][1] for sampler in sorted(received)],
            incidents=incidents,
            timings=list(self._engine.timings.values()),
            collect_s=self._clock() - began,
            transfer_s=self._transport.take_seconds(),
        )

    def renew(self) -> None:
        """Replace all actors, because received segments were lost and must be collected again."""
        self._request = None
        self._do(self._engine.renew(self._clock()))

    def alive(self) -> int:
        """Count the actors with a process; 0 in process."""
        return self._engine.alive() if self._transport.parallel else 0

    def close(self) -> None:
        """Stop all actors; close all environments."""
        self._transport.close()

    def _wait(self, stop: StopSignals, over: Callable[[], bool]) -> None:
        while not over():
            for event in self._transport.events(stop):
                self._do(self._engine.on(event, self._clock()))
            self._do(self._engine.tick(self._clock()))
            self._report_progress()

    def _report_progress(self) -> None:
        now = self._clock()
        if now < self._progress_at or self._on_progress is None or self._request is None:
            return
        self._progress_at = now + PROGRESS_S
        under_way = self._transport.under_way()
        steps = under_way.steps + sum(report.steps for report, _ in self._engine.received.values())
        if steps > self._steps_seen:
            self._engine.heard(now)
        self._steps_seen = steps
        index = self._request[1]
        self._on_progress(
            CollectionProgress(
                iteration=index + 1,
                steps=steps,
                global_step=index * self._batch_size + steps,
                processes=under_way.processes,
                elapsed_s=now - self._requested_at,
            )
        )

    def _do(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if isinstance(command, Fail):
                raise command.error
            if isinstance(command, Report):
                self._incidents.append(command.incident)
                self._notify(command.text)
            elif isinstance(command, Log):
                self._notify(command.text)
            else:
                self._transport.do(command)


def make_collector(
    plan: SamplerPlan,
    actors: Actors,
    ledger: ReplayLedger,
    *,
    by_reference: bool,
    notify: Callable[[str], None],
    limits: Limits | None = None,
    on_progress: Callable[[CollectionProgress], None] | None = None,
) -> Collector:
    """Create the collector; Ray is imported only if there are actors.

    Args:
        by_reference: leave the arrays of segments with Ray, for learners that fetch them from the actors.
        on_progress: called about once a second while segments are being collected.
        limits: the default is taken from `actors`.
    """
    hosts = hosting(plan.sampling.num_samplers, actors.num_actors)
    reporting: dict[str, Any] = {"on_progress": on_progress, "batch_size": plan.sampling.batch_size}
    if actors.num_actors == 0:
        return Collector(Collecting(hosts, ledger, Limits()), InProcess(plan, notify), notify, **reporting)
    from dppo.cluster.collecting.ray_transport import RayTransport

    limits = limits or Limits(actors.segment_timeout_s, actors.max_actor_restarts)
    transport = RayTransport(plan, actors, by_reference=by_reference)
    return Collector(Collecting(hosts, ledger, limits), transport, notify, **reporting)


def hosting(num_samplers: int, num_actors: int) -> list[list[int]]:
    """Return the samplers of each actor at the start; without actors, one list for this process."""
    hosts = max(1, num_actors)
    return [list(range(num_samplers))[host::hosts] for host in range(hosts)]
