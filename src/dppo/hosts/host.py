"""Hosts of samplers, in any process: SamplerHost lets them act together, ThreadedHost each in a thread of its own."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace
from functools import partial
from threading import Condition
from typing import Any

from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.threads import Worker, wait_for_ends
from dppo.errors import ClusterError, EnvironmentFault
from dppo.hosts.builders import BuiltSampler, build_sampler
from dppo.hosts.plans import SamplerPlan
from dppo.numerics.arithmetic import as_usual
from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.questions import Answer
from dppo.ppo.exchange.records import (
    Incident,
    IncidentKind,
    PolicySnapshot,
    SegmentReport,
    SegmentRequest,
    Timings,
)
from dppo.process_state.borders import guarded_steps, take_changes
from dppo.spaces.spaces import Spaces

LOOK_S = 0.1  # interval between two looks at the progress of threads
ORDER_S = 60.0  # longest wait until an earlier question, which arrived at the same time, has begun


class SamplerHost:
    """Hosts samplers of a run and collects their segments.

    It keeps no weights and no random state: each call brings the policy, and everything else that a segment depends on
    is in the samplers' environments, which can be rebuilt elsewhere.
    """

    def __init__(self, plan: SamplerPlan, progress: ActivityRecord) -> None:
        self._plan = plan
        self._progress = progress
        self._samplers: dict[int, BuiltSampler] = {}

    def spaces(self, sampler_id: int) -> Spaces:
        """Create the environments of a sampler and return their spaces."""
        self._progress.begin()
        with as_usual():
            return self._sampler(sampler_id).spaces

    def collect(
        self, requests: Sequence[SegmentRequest], policy: PolicySnapshot, spaces: Spaces | None
    ) -> Answer:
        """Collect segments, with all samplers acting together; raise EnvironmentFault if an environment fails."""
        began = time.perf_counter()
        self._progress.begin(_steps_to_replay(requests))
        with as_usual():
            samplers = [self._ready(request) for request in requests]
            if spaces is not None:
                self._check_spaces(requests, spaces)
            with guarded_steps(f"a step or reset of {self._plan.env.env_name}"):
                made = collect_together(samplers, requests, policy)
        made[0] = with_notes(*made[0])
        for number, request in enumerate(requests):
            meter = self._sampler(request.sampler_id).envs.meter
            if meter is not None:
                report, segment = made[number]
                made[number] = (replace(report, info=meter.take()), segment)
        timings = Timings(
            total_s=time.perf_counter() - began,
            env_s=sum(report.env_s for report, _ in made),
            replayed_steps=self._progress.look().replayed,
            replay_s=self._progress.replay_s,
        )
        self._progress.enter(place_of(Phase.IDLE))
        return Answer(tuple(made), timings)

    def close(self) -> None:
        """Close all environments; wait for threads for a few seconds at most."""
        self.close_all_but()
        wait_for_ends()

    def close_all_but(self, hosted: Collection[int] = ()) -> None:
        """Close the environments of all samplers except `hosted`; does not wait for threads."""
        for sampler_id in self._samplers.keys() - set(hosted):
            # closing may take long
            self._progress.enter(place_of(Phase.CLOSE, sampler_id))
            self._samplers.pop(sampler_id).envs.close()

    def _ready(self, request: SegmentRequest) -> PPOSampler:
        """Return the requested sampler, which must be at the requested segment unless the request rebuilds it."""
        built = self._sampler(request.sampler_id)
        is_there = request.rebuild is not None or built.next == request.index
        assert is_there, f"{request}, but the sampler is at segment {built.next}"
        built.next = request.index + 1
        return built.sampler

    def _sampler(self, sampler_id: int) -> BuiltSampler:
        if sampler_id not in self._samplers:
            try:
                self._samplers[sampler_id] = build_sampler(self._plan, sampler_id, self._progress)
            except EnvironmentFault as error:
                raise error.beside(self.instances, len(self._samplers)) from None
        return self._samplers[sampler_id]

    @property
    def instances(self) -> int:
        """Number of environments of all samplers."""
        return sum(built.instances for built in self._samplers.values())

    def _check_spaces(self, requests: Sequence[SegmentRequest], expected: Spaces) -> None:
        """Raise if a requested sampler has other spaces than the run: its policy would be another."""
        for request in requests:
            spaces = self._sampler(request.sampler_id).spaces
            for name, noun in (("obs", "observation_space"), ("actions", "action_space")):
                space = repr(getattr(spaces, name))
                expected_space = repr(getattr(expected, name))
                if space != expected_space:
                    raise EnvironmentFault(
                        f"sampler {request.sampler_id} ({self._plan.env.env_name}): its {noun} gives {space}, that of "
                        f"the sampler described first {expected_space}. All environments of a run must have equal "
                        f"spaces."
                    )


class SamplerThread:
    """The thread of a sampler, and its host there."""

    def __init__(self, plan: SamplerPlan, sampler_id: int, check: Callable[..., None]) -> None:
        self.worker = Worker(f"sampler {sampler_id} ({plan.env.env_name})")
        self.progress = ActivityRecord(on_replay=check, on_step=check)
        self.host = SamplerHost(plan, self.progress)
        self.next = 0
        """Index of the next segment: one more than that of the last segment that was requested."""


class ThreadedHost:
    """Hosts samplers, each in a thread that makes and steps its environments, at its own pace.

    Another thread may ask a question while earlier ones are being worked on. Then no sampler waits for the others
    between its segments, and questions are answered in their order.
    """

    def __init__(self, plan: SamplerPlan, progress: ActivityRecord) -> None:
        self._plan = plan
        self._progress = progress
        self._threads: dict[int, SamplerThread] = {}
        self._turns = Condition()
        self._begun = 0  # number of questions that have begun
        self._over = 0  # number of questions that have been answered, or have failed
        self._leaving: set[int] = set()  # samplers that are no longer hosted
        self._failure: BaseException | None = None  # ends all threads, each after its current step

    def spaces(self, sampler_id: int) -> Spaces:
        """Create the environments of a sampler and return their spaces."""
        self._progress.begin()
        thread = self._thread(sampler_id)
        call = thread.worker.begin(partial(thread.host.spaces, sampler_id))
        spaces: list[Spaces] = self._results({call: thread})
        return spaces[0]

    def collect(
        self, requests: Sequence[SegmentRequest], policy: PolicySnapshot, spaces: Spaces | None
    ) -> Answer:
        """Collect all requested segments side by side; as `SamplerHost.collect`, with the times of the slowest one."""
        began = time.perf_counter()
        cpu_began = time.process_time()
        calls = self._begin(requests, policy, spaces)
        self._progress.begin(_steps_to_replay(requests))
        try:
            answers: list[Answer] = self._results(calls)
        finally:
            with self._turns:
                self._over += 1
                self._turns.notify_all()
        used = (time.process_time() - cpu_began) / (time.perf_counter() - began)
        slowest = max((answer.timings for answer in answers), key=lambda timings: timings.total_s)
        timings = replace(
            slowest, replayed_steps=sum(answer.timings.replayed_steps for answer in answers)
        )
        return Answer(tuple(answer.made[0] for answer in answers), timings, min(1.0, used))

    def _begin(
        self, requests: Sequence[SegmentRequest], policy: PolicySnapshot, spaces: Spaces | None
    ) -> dict[Future[Any], SamplerThread]:
        """Let the threads of the requested samplers begin, after earlier questions; wait until these are answered."""
        calls: dict[Future[Any], SamplerThread] = {}
        with self._turns:
            self._turns.wait_for(
                lambda: self._failure or all(map(self._is_next, requests)), ORDER_S
            )
            if self._failure is not None:
                raise self._failure
            closing = self._end(self._leaving - {request.sampler_id for request in requests})
            # new environments need the licences of those that are closed
            if self._plan.sampling.licences is not None:
                wait(closing)
            for request in requests:
                thread = self._thread(request.sampler_id)
                thread.next = request.index + 1
                call = thread.worker.begin(partial(thread.host.collect, [request], policy, spaces))
                calls[call] = thread
            number = self._begun
            self._begun += 1
            self._turns.notify_all()
            self._turns.wait_for(lambda: self._over == number)
        return calls

    def close_all_but(self, hosted: Collection[int]) -> None:
        """Let the next question close the environments of all samplers except `hosted`, unless it needs them."""
        self._leaving = self._threads.keys() - set(hosted)

    def close(self) -> None:
        """Close all environments, each after its current step; wait for a few seconds at most."""
        self._failure = self._failure or ClusterError("the samplers of this process are closed")
        self._end(set(self._threads))
        wait_for_ends()

    def _thread(self, sampler_id: int) -> SamplerThread:
        if sampler_id not in self._threads:
            self._threads[sampler_id] = SamplerThread(self._plan, sampler_id, self._check)
        return self._threads[sampler_id]

    def _is_next(self, request: SegmentRequest) -> bool:
        """Return whether the sampler has been asked for all segments before the requested one, or is rebuilt."""
        if request.rebuild is not None:
            return True
        thread = self._threads.get(request.sampler_id)
        next_index = 0 if thread is None else thread.next
        return request.index == next_index

    def _end(self, samplers: set[int]) -> list[Future[Any]]:
        """Let the threads of these samplers close their environments and end."""
        threads = [self._threads.pop(sampler_id) for sampler_id in samplers & self._threads.keys()]
        return [thread.worker.end(thread.host.close_all_but) for thread in threads]

    def _check(self, *_: int) -> None:
        if self._failure is not None:
            raise ClusterError("the samplers of this process are closed")

    def _results(self, calls: dict[Future[Any], SamplerThread]) -> list[Any]:
        """Return the results of all calls; the first exception ends all threads, each after its current step."""
        try:
            done: set[Future[Any]] = set()
            while len(done) < len(calls):
                done = wait(calls, LOOK_S, FIRST_EXCEPTION).done
                self._raise_failures(call for call in calls if call in done)
                busy = [thread for call, thread in calls.items() if call not in done]
                self._look(busy, [call.result() for call in done])
        except BaseException as error:
            self._failure = self._failure or error
            raise self._failure from None
        return [call.result() for call in calls]

    def _raise_failures(self, calls: Iterable[Future[Any]]) -> None:
        """Raise the error of the first finished call that failed.

        If the constructor of an environment failed, the error also has the number of environments and samplers beside
        it in this process.
        """
        for call in calls:
            error = call.exception()
            if isinstance(error, EnvironmentFault):
                other_instances, other_samplers = self._others(error)
                raise error.beside(other_instances, other_samplers)
            if error is not None:
                raise error

    def _others(self, error: EnvironmentFault) -> tuple[int, int]:
        """Return the numbers of instances and samplers that the threads have, without the thread of a fault."""
        failed = error.place.sampler_id if error.place is not None else -1
        others = [
            thread.host
            for sampler_id, thread in list(self._threads.items())
            if sampler_id != failed
        ]
        instances = [host.instances for host in others if host.instances]
        if instances:
            return sum(instances), len(instances)
        # the other threads have not finished an environment yet: at least one is being made there, if there are any
        being_made = min(1, len(others))
        return being_made, being_made

    def _look(self, busy: list[SamplerThread], results: list[Any]) -> None:
        """Record the progress of all threads: sums, and the place of the first that is still working."""
        looks = [thread.progress.look() for thread in busy]
        answers = [result for result in results if isinstance(result, Answer)]
        self._progress.show(
            sum(thread.progress.look().moves for thread in list(self._threads.values())),
            looks[0] if looks else None,
            sum(look.replayed for look in looks)
            + sum(answer.timings.replayed_steps for answer in answers),
            sum(look.steps for look in looks) + sum(answer.made[0][0].steps for answer in answers),
        )


def _steps_to_replay(requests: Sequence[SegmentRequest]) -> int:
    rebuilds = [request.rebuild for request in requests if request.rebuild is not None]
    return sum(len(actions) for rebuild in rebuilds for actions in rebuild.actions)


def with_notes(report: SegmentReport, segment: Any) -> tuple[SegmentReport, Any]:
    """Return report and segment; add an incident for each change to process-wide state that user code has made."""
    notes = tuple(Incident(IncidentKind.GLOBAL_STATE, f"{change}.") for change in take_changes())
    if notes:
        report = replace(report, incidents=(*report.incidents, *notes))
    return report, segment


def host_of(plan: SamplerPlan, progress: ActivityRecord) -> SamplerHost | ThreadedHost:
    """Return a host for the samplers of a plan, whose activity `progress` records."""
    return (
        ThreadedHost(plan, progress) if plan.sampling.env_threads else SamplerHost(plan, progress)
    )
