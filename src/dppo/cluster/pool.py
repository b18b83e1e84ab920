"""Where samplers run: SerialActors in this process, RayActors on Ray, behind `request`, `receive` and `close`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from dppo.assemble import SamplerPlan
from dppo.cluster.actor import PPOActor, limit_to_one_thread, or_raise
from dppo.cluster.recovery import ReplayLedger
from dppo.ppo.segment import Incident, PolicySnapshot, SegmentReport, SegmentRequest
from dppo.signals import StopSignals
from dppo.spaces import Spaces


@dataclass(frozen=True, slots=True)
class Collected:
    """All segments of one iteration."""

    reports: list[SegmentReport]
    """N, in sampler order."""
    segments: list[Any]
    """N, in sampler order: each a `Segment`, or a reference to one where learners fetch them themselves."""
    incidents: list[Incident]
    """What befell actors meanwhile."""
    collect_s: float
    """From the request to the last segment."""
    transfer_s: float
    """Of these, spent on sending the policy out and taking segments in."""


class ActorPool(Protocol):
    """N samplers, wherever they are hosted."""

    def describe(self, stop: StopSignals) -> Spaces:
        """Make the environments of the first sampler and say what their spaces are."""

    def request(self, snapshot: PolicySnapshot, index: int) -> None:
        """Ask every sampler for segment `index` of the run, to be made under `snapshot`; does not wait."""

    def receive(self, stop: StopSignals) -> Collected:
        """Wait for all segments that were asked for, or until `stop`.

        Fails when an environment raises, or when more actors are lost than may be.
        """

    def renew(self) -> None:
        """Give up all samplers, which are ahead of the ledger; the next request rebuilds them."""

    def alive(self) -> int:
        """Actors that are alive; 0 in process."""

    def close(self) -> None:
        """Stop all actors; close all environments."""


class SerialActors:
    """One actor in this process, without Ray: for debugging, for fast environments, and as the oracle of the rest."""

    def __init__(self, plan: SamplerPlan, num_samplers: int, ledger: ReplayLedger) -> None:
        self._num_samplers = num_samplers
        self._ledger = ledger
        self._actor = PPOActor(plan)
        self._threads = limit_to_one_thread()
        self._requested: tuple[PolicySnapshot, int] | None = None
        self._live = False  # whether the samplers hold what the ledger says

    def describe(self, stop: StopSignals) -> Spaces:
        with stop.interruptible():
            return or_raise(self._actor.describe(0))

    def request(self, snapshot: PolicySnapshot, index: int) -> None:
        self._requested = snapshot, index

    def receive(self, stop: StopSignals) -> Collected:
        with stop.interruptible():
            return self._collect()

    def _collect(self) -> Collected:
        assert self._requested is not None, "receive() without request()"
        snapshot, index = self._requested
        began = time.monotonic()
        reports, segments = [], []
        for sampler in range(self._num_samplers):
            rebuild = None if self._live else self._ledger.rebuild(sampler)
            report, segment = self._actor.make_segment(SegmentRequest(sampler, index, rebuild), snapshot)
            report = or_raise(report)
            assert segment is not None
            reports.append(report)
            segments.append(segment)
        self._live, self._requested = True, None
        return Collected(reports, segments, [], time.monotonic() - began, 0.0)

    def renew(self) -> None:
        self._actor.close()
        self._live = False

    def alive(self) -> int:
        return 0

    def close(self) -> None:
        self._actor.close()
        self._threads.restore_original_limits()


def make_pool(
    plan: SamplerPlan,
    hosting: list[list[int]],
    ledger: ReplayLedger,
    *,
    num_actors: int,
    cpus_per_actor: float,
    resources: dict[str, float],
    gpus_per_actor: float,
    segment_timeout_s: float,
    max_restarts: int,
    by_reference: bool,
    notify: Callable[[str], None],
) -> ActorPool:
    """The pool for `num_actors` actors; 0 does not import Ray."""
    if num_actors == 0:
        return SerialActors(plan, sum(map(len, hosting)), ledger)
    from dppo.cluster.ray_actors import RayActors

    return RayActors(
        plan,
        hosting,
        ledger,
        cpus_per_actor=cpus_per_actor,
        gpus_per_actor=gpus_per_actor,
        resources=resources,
        segment_timeout_s=segment_timeout_s,
        max_restarts=max_restarts,
        by_reference=by_reference,
        notify=notify,
    )
