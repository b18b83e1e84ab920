"""Collector: the learner's view of the samplers, wherever they are."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import (
    CollectionProgress,
    Incident,
    PolicySnapshot,
    SegmentReport,
    Timings,
)
from dppo.signals import StopSignals
from dppo.spaces.spaces import Spaces

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
    timings: dict[int, Timings]
    """Times of each process that took part, by the id of the actor; 0 for this process."""
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

    def take_incidents(self) -> list[Incident]:
        """Return the incidents of actors that no received segments were sent with, and forget them."""
        return []

    def renew(self) -> None:
        """Drop all requests and rebuild all samplers, because received segments must be collected again."""

    def notes(self) -> list[str]:
        return []

    def close(self) -> None:
        """Stop all actors; close all environments."""
