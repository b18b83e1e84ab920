"""Hosts of samplers: SamplerHost lets all act together, ThreadedHost runs each in a thread of its own."""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import fields, replace
from functools import partial
from threading import Condition
from typing import Any

from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.envs.closing import closing_together
from dppo.envs.threads import Worker, wait_for_ends
from dppo.errors import ClusterError, EnvironmentFault
from dppo.hosts.plans import SamplerPlan
from dppo.hosts.sampler_builder import BuiltSampler, build_sampler
from dppo.numerics.arithmetic import as_usual
from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.questions import Answer
from dppo.ppo.exchange.records import (
    Incident,
    IncidentKind,
    PolicySnapshot,
    Segment,
    SegmentReport,
    SegmentRequest,
    Timings,
)
from dppo.process_state.borders import Change, guarded_steps, take_changes
from dppo.spaces.spaces import Spaces

POLL_S = 0.1  # between two looks at the progress of threads
# Longest wait of a question until earlier ones have begun, which may arrive after it.
ORDER_S = 60.0
# the attributes of an environment that fields of `Spaces` follow from, where that is not its observation_space
SOURCES = {"actions": "action_space", "mask": "action mask", "deterministic": "spec"}


class SamplerHost:
    """Hosts samplers of a run and collects their segments.

    It keeps no weights and no random state: each call brings the policy, and everything else that a segment depends on
    is in the samplers' environments, which can be rebuilt elsewhere.
    """

    def __init__(self, plan: SamplerPlan, progress: ActivityRecord) -> None:
        self._plan = plan
        self._progress = progress
        self._samplers: dict[int, BuiltSampler] = {}
        self._user_code = f"a step or reset of {plan.env.env_name}"

    def spaces(self, sampler_id: int) -> Spaces:
        """Create the environments of a sampler and return their spaces."""
        self._progress.begin()
        with as_usual():
            spaces = self._sampler(sampler_id, works=self._plan.resumed_at is not None).spaces
        self._progress.enter(place_of(Phase.IDLE))
        return spaces

    def collect(
        self, requests: Sequence[SegmentRequest], policy: PolicySnapshot, spaces: Spaces | None
    ) -> Answer:
        """Collect segments, with all samplers acting together; raise EnvironmentFault if an environment fails."""
        began = time.perf_counter()
        self._progress.begin(_steps_to_replay(requests))
        with as_usual():
            samplers = [self._ready(request) for request in requests]
            made_s = time.perf_counter() - began  # environments that did not exist: constructors
            if spaces is not None:
                self._check_spaces(requests, spaces)
            samplers[0].agent.build()  # a user's class, in the process state of dppo
            with guarded_steps(self._user_code):
                results = collect_together(samplers, requests, policy)
        changes = take_changes()
        if changes:
            results[0] = with_notes(*results[0], changes)
        timings = Timings(
            total_s=time.perf_counter() - began,
            env_s=made_s + sum(report.env_s for report, _ in results),
            replayed_steps=self._progress.replayed,
            replay_s=self._progress.replay_s,
        )
        self._progress.finish()
        return Answer(tuple(results), timings)

    def close(self) -> None:
        """Close all environments; wait for threads for a few seconds at most."""
        with closing_together():
            self.close_all_but()
            wait_for_ends()

    def close_all_but(self, hosted: Collection[int] = ()) -> None:
        """Close the environments of all samplers except `hosted`; does not wait for threads."""
        for sampler_id in self._samplers.keys() - set(hosted):
            # shown while it lasts: closing may take long
            self._progress.enter(place_of(Phase.CLOSE, sampler_id))
            self._samplers.pop(sampler_id).envs.close()

    def _ready(self, request: SegmentRequest) -> PPOSampler:
        """Return the sampler of a request, which must ask for its next segment unless it rebuilds the sampler."""
        built = self._sampler(request.sampler_id)
        is_valid = request.rebuild is not None or built.next == request.index
        assert is_valid, f"{request}, but the sampler is at segment {built.next}"
        built.next = request.index + 1
        return built.sampler

    def _sampler(self, sampler_id: int, *, works: bool = True) -> BuiltSampler:
        if sampler_id not in self._samplers:
            try:
                self._samplers[sampler_id] = build_sampler(
                    self._plan, sampler_id, self._progress, works=works
                )
            except EnvironmentFault as error:
                raise error.with_instances(self.instances, len(self._samplers)) from None
        return self._samplers[sampler_id]

    @property
    def instances(self) -> int:
        """Number of environment instances of the hosted samplers."""
        return sum(built.instances for built in self._samplers.values())

    def _check_spaces(self, requests: Sequence[SegmentRequest], expected: Spaces) -> None:
        """Raise EnvironmentFault if the spaces of a requested sampler differ from the run's spaces, `expected`."""
        for request in requests:
            spaces = self._sampler(request.sampler_id).spaces
            for field in fields(Spaces):
                value = f"{field.name}={getattr(spaces, field.name)!r}"
                expected_value = f"{field.name}={getattr(expected, field.name)!r}"
                if value != expected_value:
                    source = SOURCES.get(field.name, "observation_space")
                    raise EnvironmentFault(
                        f"sampler {request.sampler_id} ({self._plan.env.env_name}): its {source} gives {value}, and "
                        f"the sampler described first has {expected_value}. All environments of a run must have equal "
                        f"spaces."
                    )


class SamplerThread:
    """The thread of one sampler, and the host that runs in it."""

    def __init__(self, plan: SamplerPlan, sampler_id: int, check: Callable[..., None]) -> None:
        self.worker = Worker(f"sampler {sampler_id} ({plan.env.env_name})")
        self.progress = ActivityRecord(on_replay=check, on_step=check)
        self.host = SamplerHost(plan, self.progress)
        self.next = 0
        """Index of the first segment that has not been requested."""


class ThreadedHost:
    """Hosts samplers, each in a thread that makes and steps its environments, at its own pace.

    A question is a call of `collect`. A thread may ask one while earlier ones are still being worked on, so that no
    sampler waits for the others between its segments. Questions are answered in the order in which they begin.
    """

    def __init__(self, plan: SamplerPlan, progress: ActivityRecord) -> None:
        self._plan = plan
        self._progress = progress
        self._threads: dict[int, SamplerThread] = {}
        self._num_begun = 0
        """Number of questions that have begun."""
        self._num_over = 0
        """Number of questions that have ended, with an answer or an error."""
        self._turns = Condition()
        """Guards both numbers, and is notified of their changes."""
        self._to_close: set[int] = set()
        """Samplers that the next question closes, unless it requests them."""
        self._failure: BaseException | None = None
        """The exception that ends all threads, each after its current step."""

    def spaces(self, sampler_id: int) -> Spaces:
        """Create the environments of a sampler and return their spaces; the first question, if it is asked."""
        with self._turns:
            thread = self._thread(sampler_id)
            call = thread.worker.begin(partial(thread.host.spaces, sampler_id))
            self._num_begun += 1
        self._progress.begin()
        spaces: list[Spaces] = self._results({call: thread})
        return spaces[0]

    def collect(
        self, requests: Sequence[SegmentRequest], policy: PolicySnapshot, spaces: Spaces | None
    ) -> Answer:
        """Collect the requested segments in parallel, as `SamplerHost.collect`; the times are the slowest thread's."""
        began = time.perf_counter()
        cpu_began = time.process_time()
        calls = self._begin(requests, policy, spaces)
        self._progress.begin(_steps_to_replay(requests))
        answers: list[Answer] = self._results(calls)
        cpu_s = time.process_time() - cpu_began
        wall_s = time.perf_counter() - began
        slowest = max((answer.timings for answer in answers), key=lambda timings: timings.total_s)
        replayed_steps = sum(answer.timings.replayed_steps for answer in answers)
        timings = replace(slowest, replayed_steps=replayed_steps)
        # each thread has made one segment
        results = tuple(answer.results[0] for answer in answers)
        return Answer(results, timings, min(1.0, cpu_s / wall_s))

    def _begin(
        self, requests: Sequence[SegmentRequest], policy: PolicySnapshot, spaces: Spaces | None
    ) -> dict[Future[Any], SamplerThread]:
        """Start the requested segments in the threads of their samplers; wait until all earlier questions are over.

        Waits first until the segments before the requested ones have been started, for ORDER_S at most.
        """
        calls: dict[Future[Any], SamplerThread] = {}
        with self._turns:
            self._turns.wait_for(
                lambda: self._failure or all(map(self._is_next, requests)), ORDER_S
            )
            if self._failure is not None:
                raise self._failure
            requested = {request.sampler_id for request in requests}
            closing = self._end(self._to_close - requested)
            if self._plan.sampling.licences is not None:
                # new environments need the licences of the closed ones
                wait(closing)
            for request in requests:
                thread = self._thread(request.sampler_id)
                thread.next = request.index + 1
                call = thread.worker.begin(partial(thread.host.collect, [request], policy, spaces))
                calls[call] = thread
            num_earlier = self._num_begun
            self._num_begun += 1
            self._turns.notify_all()
            self._turns.wait_for(lambda: self._num_over >= num_earlier)
        return calls

    def close_all_but(self, hosted: Collection[int]) -> None:
        """Let the next question close the environments of all samplers except `hosted`, unless it needs them."""
        self._to_close = self._threads.keys() - set(hosted)

    def close(self) -> None:
        """Close all environments, each after its current step; wait for a few seconds at most."""
        self._failure = self._failure or ClusterError("the samplers of this process are closed")
        with closing_together():
            self._end(set(self._threads))
            wait_for_ends()

    def _thread(self, sampler_id: int) -> SamplerThread:
        if sampler_id not in self._threads:
            self._threads[sampler_id] = SamplerThread(self._plan, sampler_id, self._check)
        return self._threads[sampler_id]

    def _is_next(self, request: SegmentRequest) -> bool:
        """Return whether all earlier segments of the sampler have been requested, or the request rebuilds it."""
        if request.rebuild is not None:
            return True
        thread = self._threads.get(request.sampler_id)
        if thread is None:
            return request.index == 0
        return request.index == thread.next

    def _end(self, samplers: set[int]) -> list[Future[Any]]:
        """End the threads of samplers after closing their environments; return the calls that close them."""
        threads = [self._threads.pop(sampler_id) for sampler_id in samplers & self._threads.keys()]
        return [thread.worker.end(thread.host.close_all_but) for thread in threads]

    def _check(self, *_: int) -> None:
        """Raise ClusterError if a thread has failed or the host is closed; all threads call this during steps."""
        if self._failure is not None:
            raise ClusterError("the samplers of this process are closed")

    def _results(self, calls: dict[Future[Any], SamplerThread]) -> list[Any]:
        """Return the results of the calls of a question; an exception ends all threads, each after its step."""
        try:
            done: set[Future[Any]] = set()
            while len(done) < len(calls):
                done = wait(calls, POLL_S, FIRST_EXCEPTION).done
                self._raise_failures(call for call in calls if call in done)
                busy_threads = [thread for call, thread in calls.items() if call not in done]
                self._look(busy_threads, [call.result() for call in done])
        except BaseException as error:
            self._failure = self._failure or error
            raise self._failure from None
        finally:
            with self._turns:
                self._num_over += 1
                self._turns.notify_all()
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
                raise error.with_instances(other_instances, other_samplers)
            if error is not None:
                raise error

    def _others(self, error: EnvironmentFault) -> tuple[int, int]:
        """Return the numbers of instances and of samplers in the threads other than the thread of a fault.

        If there are other threads, but none has an instance yet, 1 instance and 1 sampler are counted.
        """
        other_threads = dict(self._threads)
        if error.place is not None:
            other_threads.pop(error.place.sampler_id, None)
        instances = [thread.host.instances for thread in other_threads.values()]
        num_hosts = len(instances) - instances.count(0)
        if num_hosts:
            return sum(instances), num_hosts
        # at least one of the other threads is making its first instance
        being_made = min(1, len(other_threads))
        return being_made, being_made

    def _look(self, busy_threads: list[SamplerThread], results: list[Any]) -> None:
        """Record the summed progress of all threads, and the activity of the first one that is still busy."""
        looks = [thread.progress.look() for thread in busy_threads]
        answers = [result for result in results if isinstance(result, Answer)]
        all_looks = [thread.progress.look() for thread in list(self._threads.values())]
        num_calls = sum(look.num_calls for look in all_looks)
        environments = sum(look.environments for look in all_looks)
        finished_reports = [answer.results[0][0] for answer in answers]
        replayed = sum(look.replayed for look in looks)
        replayed += sum(answer.timings.replayed_steps for answer in answers)
        steps = sum(look.steps for look in looks)
        steps += sum(report.steps for report in finished_reports)
        first_busy = next(iter(looks), None)
        restarts = sum(look.restarts for look in looks)
        for report in finished_reports:
            kinds = [incident.kind for incident in report.incidents]
            restarts += kinds.count(IncidentKind.PROGRAM_RESTARTED)
        self._progress.record_threads(
            num_calls, environments, first_busy, replayed, steps, restarts
        )


def _steps_to_replay(requests: Sequence[SegmentRequest]) -> int:
    rebuilds = [request.rebuild for request in requests if request.rebuild is not None]
    return sum(len(actions) for rebuild in rebuilds for actions in rebuild.actions)


def with_notes(
    report: SegmentReport, segment: Segment, changes: Sequence[Change]
) -> tuple[SegmentReport, Segment]:
    """Return a report with its segment, after adding incidents for process state that user code has changed."""
    notes = [Incident(IncidentKind.GLOBAL_STATE, f"{change}.") for change in changes]
    return replace(report, incidents=(*report.incidents, *notes)), segment


def host_of(plan: SamplerPlan, progress: ActivityRecord) -> SamplerHost | ThreadedHost:
    """Return a host for the samplers of a plan; `progress` records its activity."""
    if plan.sampling.env_threads:
        return ThreadedHost(plan, progress)
    return SamplerHost(plan, progress)
