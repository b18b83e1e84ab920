"""RayActors: the samplers of a run, hosted by actors on Ray, any of which may die at any time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef, cloudpickle
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from dppo.assemble import SamplerPlan
from dppo.cluster.actor import SMALL, Fault, PPOActor, or_raise, packed, unpacked
from dppo.cluster.pool import Collected
from dppo.cluster.recovery import ReplayLedger, RestartBudget
from dppo.errors import ClusterError, ConfigError
from dppo.ppo.segment import Incident, PolicySnapshot, SegmentReport, SegmentRequest
from dppo.signals import StopSignals
from dppo.spaces import Spaces

TICK_S = 0.5  # longest single wait: how fast a deadline or a due restart is noticed
FETCH_TIMEOUT_S = 120.0  # for a segment that is ready but has to cross the network
START_TIMEOUT_S = 120.0  # for Ray to start a process: longer than a quick simulator's deadline, on a busy machine
QUIET_S = 30.0  # tell the user whom we wait for when nothing has come for so long


@dataclass(slots=True)
class _Host:
    """One actor slot: the process behind it changes, its number and its samplers do not."""

    actor_id: int
    samplers: list[int]
    handle: Any = None
    make_segment: Any = None
    """The handle's method; with `by_reference` it gives two objects, so that arrays can go elsewhere than reports."""
    starting: ObjectRef[Any] | None = None
    """Comes when the process is there; None from then on."""
    due: float = float("inf")
    """Monotonic time by which the next segment must be here."""
    start_at: float | None = None
    """Monotonic time at which to start a new process; None while there is one."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A segment that was asked for."""

    host: _Host
    request: SegmentRequest
    segment: ObjectRef[Any] | None
    """Where the arrays are to stay with Ray; None where they come with the report."""


class RayActors:
    """Requests segments from M actors and receives them as they come.

    An actor that dies, or lets its deadline pass, is replaced by a new process which rebuilds the samplers and
    answers the same requests: the segments are the same, so nobody can tell later. What the old process may still
    send is not listened to any more.
    """

    def __init__(
        self,
        plan: SamplerPlan,
        hosting: list[list[int]],
        ledger: ReplayLedger,
        *,
        cpus_per_actor: float,
        gpus_per_actor: float = 0.0,
        resources: dict[str, float],
        segment_timeout_s: float,
        max_restarts: int,
        by_reference: bool = False,
        notify: Callable[[str], None],
    ) -> None:
        try:
            self._plan: bytes = cloudpickle.dumps(plan)  # type: ignore[no-untyped-call]
        except Exception as error:  # whatever a user's object raises when it is pickled
            raise ConfigError(
                f"env_id={plan.env_name}: cannot be sent to actors: {error}. Give it as module:factory, or make it a "
                f"function that holds no open files, locks or simulators."
            ) from None
        self._remote_class = ray.remote(PPOActor).options(
            num_cpus=cpus_per_actor,
            num_gpus=gpus_per_actor,
            resources=resources or None,
            scheduling_strategy="SPREAD",
            max_restarts=0,  # we replace actors ourselves, and see every death
            max_task_retries=0,
            enable_task_events=False,
        )
        self._ledger = ledger
        self._timeout_s = segment_timeout_s
        self._budget = RestartBudget(max_restarts)
        self._by_reference = by_reference
        self._gpus = gpus_per_actor > 0
        self._notify = notify
        self._hosts = [_Host(actor_id, samplers) for actor_id, samplers in enumerate(hosting)]
        self._calls: dict[ObjectRef[Any], _Call] = {}
        self._live: set[int] = set()  # samplers whose process holds what the ledger says
        self._snapshot: PolicySnapshot | None = None  # goes with each request, or
        self._reference: ObjectRef[Any] | None = None  # is fetched once by each node
        self._version = 0
        self._index = 0
        self._received: dict[int, tuple[SegmentReport, Any]] = {}
        self._incidents: list[Incident] = []
        self._requested_at = 0.0
        self._transfer_s = 0.0
        for host in self._hosts:
            self._start(host)

    # ------------------------------------------------------------------ the pool's face

    def describe(self, stop: StopSignals) -> Spaces:
        """Ask the first actor alone, so that a constructor that fails is run, and told, once."""
        host = self._hosts[0]
        while True:
            ref = host.handle.describe.remote(host.samplers[0])
            try:
                deadline = time.monotonic() + max(START_TIMEOUT_S, self._timeout_s)
                while not ray.wait([ref], timeout=TICK_S)[0]:
                    stop.check()
                    if host.starting is not None and ray.wait([host.starting], timeout=0)[0]:
                        host.starting, deadline = None, time.monotonic() + self._timeout_s
                    if time.monotonic() > deadline:
                        raise GetTimeoutError
                spaces: Spaces = or_raise(ray.get(ref, timeout=FETCH_TIMEOUT_S))
                return spaces
            except GetTimeoutError:
                if host.starting is not None:
                    raise self._never_started(host) from None
                kind, reason = "actor_hung", f"made no environment within segment_timeout_s={self._timeout_s:g}"
            except RayTaskError as error:
                raise _our_own(error) from None
            except RayActorError as error:
                _refuse_what_cannot_start(error)
                kind, reason = "actor_lost", _cause(error)
            self._lose(host, reason, kind)
            while host.handle is None:
                stop.check()
                time.sleep(0.05)
                self._start_the_due()

    def request(self, snapshot: PolicySnapshot, index: int) -> None:
        began = time.monotonic()
        self._requested_at = began
        small = snapshot.weights.nbytes <= SMALL
        self._snapshot, self._reference = (snapshot, None) if small else (None, ray.put(snapshot))
        self._version, self._index = snapshot.version, index
        self._received = {}
        for host in self._hosts:
            if host.handle is not None:
                self._ask(host)
        self._transfer_s = time.monotonic() - began

    def receive(self, stop: StopSignals) -> Collected:
        """Take segments as they come.

        Consumes: the requests made last. Produces: N segments in sampler order. Waits for: every sampler, each
        actor until its deadline. Fails when: an environment raises, or an actor's restarts are used up.
        """
        told = time.monotonic()
        while len(self._received) < sum(len(host.samplers) for host in self._hosts):
            stop.check()
            if self._take(self._wait()):
                told = time.monotonic()
            elif time.monotonic() - told > QUIET_S:
                told = time.monotonic()
                self._notify(self._whom_we_wait_for())
            self._replace_the_late()
            self._start_the_due()
        received = [self._received[sampler] for sampler in sorted(self._received)]
        incidents, self._incidents = self._incidents, []
        return Collected(
            reports=[report for report, _ in received],
            segments=[segment for _, segment in received],
            incidents=incidents,
            collect_s=time.monotonic() - self._requested_at,
            transfer_s=self._transfer_s,
        )

    def renew(self) -> None:
        for host in self._hosts:
            if host.handle is not None:
                ray.kill(host.handle)
                host.handle, host.start_at = None, time.monotonic()
        self._calls.clear()
        self._live.clear()

    def alive(self) -> int:
        return sum(host.handle is not None for host in self._hosts)

    def close(self) -> None:
        """Let actors close their environments for a moment, then kill them."""
        closing = [host.handle.close.remote() for host in self._hosts if host.handle is not None and not self._calls]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=5)
        for host in self._hosts:
            if host.handle is not None:
                ray.kill(host.handle)
                host.handle = None

    # ------------------------------------------------------------------ asking and taking

    def _ask(self, host: _Host) -> None:
        """Ask for every segment of this iteration that `host` still owes."""
        for sampler in host.samplers:
            if sampler in self._received:
                continue
            rebuild = None if sampler in self._live else self._ledger.rebuild(sampler)
            request = SegmentRequest(sampler, self._index, rebuild)
            asked = packed((request, self._snapshot))
            made = host.make_segment.remote(asked, self._reference, self._by_reference)
            report, segment = made if self._by_reference else (made, None)
            self._calls[report] = _Call(host, request, segment)
        starting = host.starting is not None
        host.due = time.monotonic() + (max(START_TIMEOUT_S, self._timeout_s) if starting else self._timeout_s)

    def _wait(self) -> list[ObjectRef[Any]]:
        """Calls that have ended; waits a moment for the first, and for no other."""
        calls = list(self._calls)
        if not calls:
            time.sleep(min(TICK_S, 0.05))
            return []
        ready, _ = ray.wait(calls, num_returns=1, timeout=TICK_S)
        if ready and len(calls) > 1:
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        return list(ready)

    def _take(self, ready: list[ObjectRef[Any]]) -> bool:
        """Take in what has come; true if it was anything."""
        began = time.monotonic()
        for ref in ready:
            call = self._calls.pop(ref, None)
            if call is None:  # its actor was lost while we took in another
                continue
            try:
                answer = unpacked(ray.get(ref, timeout=FETCH_TIMEOUT_S))
                report, segment = answer if call.segment is None else (answer, call.segment)
            except RayTaskError as error:
                raise _our_own(error) from None
            except RayError as error:  # the process, the node, or the segment on its way is lost
                _refuse_what_cannot_start(error)
                self._lose(call.host, _cause(error))
                continue
            self._accept(call, report, segment)
        self._transfer_s += time.monotonic() - began
        return bool(ready)

    def _accept(self, call: _Call, answer: SegmentReport | Fault, segment: Any) -> None:
        report = or_raise(answer)
        asked = (call.request.sampler_id, self._index, self._version)
        got = (report.sampler_id, report.index, report.policy_version)
        assert got == asked, f"asked for (sampler, segment, policy version) {asked}, got {got}"
        self._received[report.sampler_id] = report, segment
        self._live.add(report.sampler_id)
        self._budget.delivered(call.host.actor_id)
        call.host.due = time.monotonic() + self._timeout_s

    def _whom_we_wait_for(self) -> str:
        owed = sorted(call.request.sampler_id for call in self._calls.values())
        waited = time.monotonic() - self._requested_at
        return (
            f"waiting for {len(owed)} of {len(owed) + len(self._received)} segments for {waited:.0f} s "
            f"(samplers {', '.join(map(str, owed[:8]))}{' ...' if len(owed) > 8 else ''}); an actor that sends none "
            f"for {self._timeout_s:g} s is replaced"
        )

    # ------------------------------------------------------------------ losing and replacing

    def _start(self, host: _Host) -> None:
        host.handle = self._remote_class.remote(self._plan, tuple(path for path in sys.path if path))
        make_segment = host.handle.make_segment_packed
        host.make_segment = make_segment.options(num_returns=2) if self._by_reference else make_segment
        host.starting = host.handle.alone_in_process.remote(self._gpus)
        host.start_at = None

    def _start_the_due(self) -> None:
        for host in self._hosts:
            if host.start_at is not None and time.monotonic() >= host.start_at:
                self._start(host)
                if self._snapshot is not None or self._reference is not None:
                    self._ask(host)

    def _replace_the_late(self) -> None:
        now = time.monotonic()
        for host in self._hosts:
            owes = any(call.host is host for call in self._calls.values())
            if not owes:
                continue
            if host.starting is not None and ray.wait([host.starting], timeout=0)[0]:
                host.starting, host.due = None, now + self._timeout_s
            if now > host.due and host.starting is not None:
                raise self._never_started(host)
            if now > host.due:
                self._lose(
                    host,
                    f"sent no segment for segment_timeout_s={self._timeout_s:g} and counts as hung; if its simulator "
                    f"is only slow, raise --segment-timeout-s",
                    kind="actor_hung",
                )

    def _never_started(self, host: _Host) -> ClusterError:
        started = sum(host.starting is None for host in self._hosts)
        return ClusterError(
            f"actor {host.actor_id} was not started by Ray within {max(START_TIMEOUT_S, self._timeout_s):g} s; "
            f"{started} of {len(self._hosts)} were. Either the cluster has no room (see `ray status`): use fewer "
            f"--num-actors or lower --cpus-per-actor; or it takes longer: raise --segment-timeout-s."
        )

    def _lose(self, host: _Host, reason: str, kind: str = "actor_lost") -> None:
        """Give up the process behind `host`, and plan a new one."""
        message = f"actor {host.actor_id} (samplers {', '.join(map(str, host.samplers))}) {reason}"
        ray.kill(host.handle)  # also when it is thought dead: it must not answer, or step a simulator, any more
        host.handle = None
        self._calls = {ref: call for ref, call in self._calls.items() if call.host is not host}
        self._live -= set(host.samplers)
        delay = self._budget.spend(host.actor_id)
        if delay is None:
            raise ClusterError(
                f"{message}\nIt was replaced {self._budget.max_restarts} times in a row without making a segment "
                f"(max_actor_restarts={self._budget.max_restarts}). Look for the reason in the simulator's own log; "
                f"`--num-actors 0` runs it in this process, where a debugger can follow."
            )
        host.start_at = time.monotonic() + delay
        self._incidents.append(Incident(kind, message))
        self._notify(f"{message}; replaced" + (f" in {delay:.0f} s" if delay else ""))


def _refuse_what_cannot_start(error: RayError) -> None:
    """An actor that cannot be made would not be made the next time either.

    Raises:
        ClusterError: `error` says so.
    """
    if getattr(error, "actor_init_failed", False) or "failed to import" in str(error):
        last = [line.strip() for line in str(error).splitlines() if line.strip()][-1]
        raise ClusterError(f"An actor could not be made: {last}. Install the same dppo on every node.")


def _cause(error: RayError) -> str:
    """What Ray says of a death, in a line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "worker" in line.lower() or "node" in line.lower() or "exit" in line.lower()]
    return f"died: {(telling or lines or [type(error).__name__])[-1][:300]}"


def _our_own(error: RayTaskError) -> ClusterError:
    return ClusterError(f"An actor failed in dppo itself; please report this.\n{error}")
