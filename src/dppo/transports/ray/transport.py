"""RayTransport: actors as processes on Ray, which may die at any time."""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray import ObjectRef
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError

from dppo.config.parts import Actors
from dppo.engine import messages
from dppo.engine.actor_collector import ActorCollector
from dppo.engine.collector import OnProgress
from dppo.engine.engine import CollectionEngine
from dppo.engine.hosting import shares
from dppo.engine.ledger import ReplayLedger
from dppo.engine.messages import Ask, Describe, Event, ForTransport, Limits, Process, Start
from dppo.engine.patience import SETTINGS
from dppo.errors import ClusterError, ConfigError
from dppo.hosts.plans import SamplerPlan
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.signals import StopSignals
from dppo.transports.ray.actor import PPOActor
from dppo.transports.ray.actor_class import actor_class
from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.capacity import Demand, rooms_for
from dppo.transports.ray.elastic_pool import ElasticPool, usable_nodes
from dppo.transports.ray.failures import FETCH_TIMEOUT_S, call_with_timeout, fatal_error, last_line
from dppo.transports.ray.pickling import decode_answer, pack, pack_code, packed_model
from dppo.transports.ray.session import RayLink, RaySession
from dppo.transports.ray.watching import Watching

TICK_S = 0.5  # longest single wait, and so the delay with which a deadline or a due restart is noticed
IDLE_S = 0.05  # the same while no call is pending
LOOK_S = 2.0  # between two looks at all actors, and at all pending calls
INLINE = 90_000  # bytes of a policy up to which each question holds it; Ray stores arguments of more than 100 KiB anew
CLOSING_S = 5.0  # for actors to close their environments
INTERRUPTED_S = 2.0  # the same for actors that are in the middle of a segment
START_AGAIN_S = 15.0  # for an actor to start after the network was silent
NOT_STARTED = f"has not started within {START_AGAIN_S:g} s after the network was back"
JOIN_S = 20.0  # for an actor that joins to start, before others host its samplers
KILLING_S, LOST_S = 2.0, 1.0  # for Ray to accept a kill; for a Ray that is lost to close actors all the same

_Call = tuple[Start | Ask | Describe, list[Any]]  # a pending one, and references to arrays that stay with Ray
_Ended = tuple[ObjectRef[Any], Callable[[], Any]]  # a call, and a function that returns its result or raises its error


class RayTransport:
    """Starts, asks and kills actors on Ray; the engine decides when.

    Commands are executed in order by the thread of `link.calls`, the only one that calls Ray: the thread of the loop
    puts them into its queue, and reads what has ended. Each attribute is changed by one of the two, as noted.
    """

    def __init__(
        self, plan: SamplerPlan, demand: Demand, link: RayLink, *, by_reference: bool, room: ElasticPool | None,
        logs: str, **options: Any,
    ) -> None:  # fmt: skip
        """Pickle the plan for the actors; raise ConfigError if the environment or the user's network cannot be pickled.

        Args:
            demand: the resources of each, or alternatives; `options` are those of Ray for each of them.
            by_reference: leave the arrays of segments with Ray, for learners that fetch them from the actors.
            room: None if the number of actors is fixed. `logs` is their folder on this node.
        """
        self._model = packed_model(plan.network.model)
        try:
            self._plan = pack_code(replace(plan, network=replace(plan.network, model=None)))
        except Exception as error:  # pickling a user's object may raise anything
            raise ConfigError(
                f"env_id={plan.env.env_name}: cannot be sent to actors: {error}. Pass module:factory, or a function "
                f"that holds no open files, locks or simulators."
            ) from None
        # Threads take up the next question while others are at this one; `close` is not to wait for any.
        options["max_concurrency"] = plan.sampling.lag + 2 if plan.sampling.env_threads else None
        self._actor_classes = [actor_class(PPOActor, group, options) for group in demand.groups]
        self._demand, self._link = demand, link
        self._keep_gpus, self._by_reference, self._room = "GPU" in demand.actor, by_reference, room
        self._watching, self._logs = Watching(link, link.node_id, plan.seed), logs
        self.stacks = self._watching.stacks
        # Of the thread that calls Ray:
        self._handles, self._groups = dict[Process, Any](), dict[Process, int]()
        self._policies: dict[int, Any] = {}  # as sent, by version
        self._calls = dict[ObjectRef[Any], _Call]()  # from which the loop takes those that have ended
        self._sending_s = 0.0
        # Of the loop:
        self._alive = set[Process]()  # those that are to be started or run; answers of others do not count
        self._worn = set[Process]()  # those that are to be recycled
        self._looked_at = time.monotonic()
        self._silences = 0  # of the network, so far
        self._doubtful = dict[Process, float]()  # those that were starting then, and until when they may
        self._receiving_s = 0.0
        # Of both:
        self._ended = SimpleQueue[_Ended]()  # calls that have ended, in this order
        self._unreported = deque[_Ended]()  # the same, found by a look
        self._looking = False  # True while a look at all actors is due

    # ------------------------------------------------------------------ commands

    def do(self, command: ForTransport) -> None:
        """Let a command be executed, after all earlier ones; does not wait."""
        if isinstance(command, messages.Look):
            return self._watching.look(command.process)
        if isinstance(command, Start):
            self._alive.add(command.process)
        elif isinstance(command, messages.Kill):
            self._alive.discard(command.process)
            self._watching.ended(command.process)
        self._link.calls.post(partial(self._execute, command), messages.IN_WORDS[type(command)])

    @calls_ray
    def _execute(self, command: ForTransport) -> None:
        """Execute a command; raise ClusterError if the policy cannot be put into Ray's object store."""
        began = time.monotonic()
        if isinstance(command, messages.Kill):
            self._kill(command.process)
        elif isinstance(command, Start):
            self._start(command)
        elif isinstance(command, Describe):
            self._expect(self._handles[command.process].describe.remote(command.sampler_id), command)
        elif isinstance(command, Ask) and not self._link.watch.lost:  # else large arguments would end this process
            self._ask(command)
        self._sending_s += time.monotonic() - began

    @calls_ray
    def _start(self, start: Start) -> None:
        """Request an actor with the resources for which there is most room."""
        group, taken = 0, Counter(self._groups.values())
        if self._demand.others:
            rooms = dict(enumerate(rooms_for(usable_nodes().values(), self._demand)))
            group = max(rooms, key=lambda one: rooms[one] - taken[one])
        handle: Any = self._actor_classes[group].remote(self._plan, self._model)
        self._handles[start.process], self._groups[start.process] = handle, group
        log = f"{self._logs}/actor-{start.process.actor_id}.log", self._watching.here, os.getpid()
        self._expect(handle.configure_process.remote(self._keep_gpus, *log), start)

    @calls_ray
    def _ask(self, ask: Ask) -> None:
        apart, policy = self._by_reference, self._sent(ask.policy)
        method = self._handles[ask.process].make_segments_packed
        method = method.options(num_returns=1 + len(ask.question.samplers)) if apart else method
        sent = method.remote(pack(ask.question), policy, apart)
        head, *segments = sent if apart else [sent]
        self._expect(head, ask, segments)

    def _expect(self, ref: ObjectRef[Any], command: Start | Ask | Describe, segments: Sequence[Any] = ()) -> None:
        """Let Ray report the end of a call, with its result, from one of its threads."""
        self._calls[ref] = command, list(segments)
        ref.future().add_done_callback(lambda future: self._ended.put((ref, future.result)))

    @calls_ray
    def _sent(self, policy: PolicySnapshot) -> Any:
        """Return a policy as an argument: packed once if small, else put into the object store once."""
        if policy.version not in self._policies:
            asks = [command for command, _ in list(self._calls.values()) if isinstance(command, Ask)]
            oldest = min((ask.policy.version for ask in asks if ask.process in self._handles), default=policy.version)
            self._policies = {version: sent for version, sent in self._policies.items() if version >= oldest}
            try:
                sent = pack(policy) if policy.weights.nbytes <= INLINE else ray.put(policy)
                self._policies[policy.version] = sent
            except RayError as error:
                raise ClusterError(
                    f"the weights could not be sent to the actors: {last_line(error)}. Free memory or disk space for "
                    f"Ray's object store, then resume (--resume)."
                ) from None
        return self._policies[policy.version]

    @calls_ray
    def _kill(self, process: Process) -> None:
        handle, _ = self._handles.pop(process, None), self._groups.pop(process, None)
        if handle is not None:  # its calls end as well, and `events` drops them
            idle = all(command.process != process for command, _ in list(self._calls.values()))
            if idle or process in self._worn:  # it leaves, or is recycled, and refuses what is left in its queue
                ray.wait([handle.close.remote()], timeout=INTERRUPTED_S)
            call_with_timeout(KILLING_S, partial(ray.kill, handle))

    # ------------------------------------------------------------------ events

    def events(self, stop: StopSignals) -> list[Event]:
        """Return an event for each call that has ended; wait up to `TICK_S` for the first."""
        stop.check()
        events: list[Event] = [*self._watching.seen()]
        if self._room is not None:
            joined, left = self._room.changes(self._watching.homes)
            events += [*map(messages.Joined, joined), *map(messages.Left, left)]
        events += self._not_started()
        ended, began = self._ended_calls(0 if events else TICK_S), time.monotonic()
        self._look_if_due(began)
        for ref, result in ended:
            call = self._calls.pop(ref, None)
            if call is not None and call[0].process in self._alive:  # else it has been killed
                events.append(self._event(*call, result))
        self._receiving_s += time.monotonic() - began
        return events

    def _not_started(self) -> list[Event]:
        """Return the ends of processes that were requested before the network was silent, and did not start afterwards.

        Messages between other processes of Ray were lost as well, and Ray notices that after minutes.
        """
        silences, now = self._link.watch.silences, self._link.clock.patience()
        starting = {command.process for command, _ in list(self._calls.values()) if isinstance(command, Start)}
        if silences != self._silences:
            self._silences = silences
            self._doubtful = dict.fromkeys(starting, now + START_AGAIN_S)
        late = [process for process, until in self._doubtful.items() if now > until]
        for process in late:
            del self._doubtful[process]
        return [messages.Died(process, NOT_STARTED) for process in late if process in starting]

    def _ended_calls(self, timeout_s: float) -> list[_Ended]:
        """Return all calls that have ended; wait up to `timeout_s` for the first."""
        ended = []
        with suppress(Empty):
            ended.append(self._ended.get(timeout=timeout_s if self._calls else min(IDLE_S, timeout_s)))
            while True:
                ended.append(self._ended.get_nowait())
        while self._unreported:
            ended.append(self._unreported.popleft())
        return ended

    def _look_if_due(self, now: float) -> None:
        if now - self._looked_at > LOOK_S and not self._looking:
            self._looked_at, self._looking = now, True
            self._link.calls.post(self._look, "looking at all actors")

    @calls_ray
    def _look(self) -> None:
        """Call each actor that has died without a pending call; look for calls whose end was not reported.

        Such a call ends at once; an actor that waits for others would be missed otherwise. Unlike `ray.wait`, reports
        cost the same with any number of pending calls; but the loop must not depend on every report.
        """
        pending = list(self._calls.items())
        refs = [ref for ref, _ in pending]
        busy = {command.process for _, (command, _) in pending}
        for process, handle in self._handles.items():
            if process not in busy and handle._get_local_state() == ActorTableData.DEAD:
                self._expect(handle.close.remote(), Start(process))
        if refs and self._ended.empty():
            for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                self._unreported.append((ref, _result_of(ref)))
        self._looking = False

    def _event(self, command: Start | Ask | Describe, segments: list[Any], result: Callable[[], Any]) -> Event:
        try:
            message = result()
        except RayError as error:  # the process, its node or the segment in transit is lost
            reason = self._watching.cause_of_death(command.process, error)
            return messages.Died(command.process, reason, fatal_error(error))
        if isinstance(command, Start):
            return self._watching.started(command.process, message)
        answer = decode_answer([message, *segments] if segments else message)
        if isinstance(answer, messages.Recycled):
            self._worn.add(command.process)
        return messages.Answered(command.process, command.ask_id, answer)

    @property
    def spent_s(self) -> float:
        """Seconds spent on sending questions and receiving answers so far."""
        return self._sending_s + self._receiving_s

    def close(self) -> None:
        """Give actors a few seconds to close their environments, then kill them."""
        for process in self._alive:
            self._watching.ended(process)
        with suppress(ClusterError):  # Ray does not answer
            timeout_s = LOST_S if self._link.watch.lost else CLOSING_S + 2 * KILLING_S
            self._link.calls.call(self._close, "closing the actors", timeout_s=timeout_s)

    @calls_ray
    def _close(self) -> None:
        asked = any(isinstance(command, Ask) for command, _ in list(self._calls.values()))
        starting = {command.process for command, _ in list(self._calls.values()) if isinstance(command, Start)}
        closing = [handle.close.remote() for process, handle in self._handles.items() if process not in starting]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=INTERRUPTED_S if asked else CLOSING_S)
        handles, self._handles = [*self._handles.values(), *self._watching.take_witnesses()], {}
        call_with_timeout(KILLING_S, lambda: [ray.kill(handle) for handle in handles])


@calls_ray
def _result_of(ref: ObjectRef[Any]) -> Callable[[], Any]:
    """Return a function that returns the result of a call that has ended, or raises its error."""
    done = Future[Any]()
    try:
        done.set_result(ray.get(ref, timeout=FETCH_TIMEOUT_S))
    except RayError as error:
        done.set_exception(error)
    return done.result


def collector_on_ray(
    plan: SamplerPlan, actors: Actors, ledger: ReplayLedger, on_progress: OnProgress, session: RaySession, **more: Any
) -> ActorCollector:
    """Return a collector whose actors run on Ray; `more` as for `RayTransport`."""
    limits = Limits(actors.segment_timeout_s, actors.max_actor_restarts, backup_requests=actors.backup_requests)
    limits = replace(limits, of_phases={name: getattr(actors, name) for name in SETTINGS.values()})
    limits = replace(limits, most_hosted=plan.sampling.most_hosted, start_s=plan.sampling.start_s)
    limits = replace(limits, samplers_per_actor=actors.samplers_per_actor)
    if session.room is not None:
        fewest = max(actors.actor_bounds[0], actors.fewest_for(plan.sampling.num_samplers))
        most = min(actors.actor_bounds[1], plan.sampling.num_samplers)
        limits = replace(limits, start_timeout_s=JOIN_S, fewest_actors=fewest, most_actors=most, elastic=True)
    engine = CollectionEngine(shares(plan.sampling.num_samplers, session.demand.num_actors), ledger, limits)
    link = session.link("actors")
    transport = RayTransport(plan, session.demand, link, room=session.room, **session.options, **more)
    sizes = {"batch_size": plan.sampling.batch_size}
    return ActorCollector(engine, transport, on_progress, **sizes, clock=link.clock.patience)
