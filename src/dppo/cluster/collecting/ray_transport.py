"""RayTransport: actors as processes on Ray, which may die at any time."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray import ObjectRef
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError

from dppo.cluster import wire
from dppo.cluster.collecting import messages
from dppo.cluster.collecting.actor import PPOActor
from dppo.cluster.collecting.actor_collector import ActorCollector
from dppo.cluster.collecting.collector import OnProgress
from dppo.cluster.collecting.engine import Collecting
from dppo.cluster.collecting.hosting import shares
from dppo.cluster.collecting.ledger import ReplayLedger
from dppo.cluster.collecting.messages import Ask, Describe, Event, ForTransport, Limits, Process, Start
from dppo.cluster.collecting.roster import SETTINGS
from dppo.cluster.collecting.watching import Watching
from dppo.cluster.ray.capacity import Demand, rooms_for
from dppo.cluster.ray.session import RaySession
from dppo.cluster.ray.watch import Room, usable_nodes
from dppo.cluster.wire import FETCH_TIMEOUT_S, SamplerPlan, incurable, last_line, packed_model, within
from dppo.config.parts import Actors
from dppo.errors import ClusterError, ConfigError
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.signals import StopSignals

TICK_S = 0.5  # longest single wait, and so the delay with which a deadline or a due restart is noticed
IDLE_S = 0.05  # the same while no call is pending
LOOK_S = 5.0  # between two looks at all pending calls
IDLE_LOOK_S = 2.0  # between two looks at the actors without a call, whose deaths nothing else reports
INLINE = 90_000  # bytes of a policy up to which each question holds it; Ray stores arguments of more than 100 KiB anew
CLOSING_S = 5.0  # for actors to close their environments
INTERRUPTED_S = 2.0  # the same for actors that are in the middle of a segment
JOIN_S = 20.0  # for an actor that joins to start, before others host its samplers
KILLING_S = 2.0  # for Ray to accept a kill


_Call = tuple[Start | Ask | Describe, list[Any]]  # a pending one, and references to arrays that stay with Ray
_Ended = tuple[ObjectRef[Any], Callable[[], Any]]  # a call, and a function that returns its result or raises its error


class RayTransport:
    """Starts, asks and kills actors on Ray; the engine decides when."""

    def __init__(
        self, plan: SamplerPlan, demand: Demand, *, by_reference: bool, room: Room | None, logs: str, **options: Any
    ) -> None:
        """Pickle the plan for the actors; raise ConfigError if the environment or the user's network cannot be pickled.

        Args:
            demand: the resources of each, or alternatives; `options` are those of Ray for each of them.
            by_reference: leave the arrays of segments with Ray, for learners that fetch them from the actors.
            room: None if the number of actors is fixed. `logs` is their folder on this node.
        """
        self._model = packed_model(plan.network.model)
        try:
            self._plan = wire.pack_code(replace(plan, network=replace(plan.network, model=None)))
        except Exception as error:  # pickling a user's object may raise anything
            raise ConfigError(
                f"env_id={plan.env.env_name}: cannot be sent to actors: {error}. Pass module:factory, or a function "
                f"that holds no open files, locks or simulators."
            ) from None
        # Threads take up the next question while others are at this one; `close` is not to wait for any.
        options["max_concurrency"] = plan.sampling.lag + 2 if plan.sampling.env_threads else None
        self._actor_classes = [actor_class(PPOActor, group, options) for group in demand.groups]
        self._demand, self._groups = demand, dict[Process, int]()
        self._keep_gpus, self._by_reference, self._room = "GPU" in demand.actor, by_reference, room
        self._handles, self._calls = dict[Process, Any](), dict[ObjectRef[Any], _Call]()
        self._ended = SimpleQueue[_Ended]()  # calls that have ended, in this order
        self._looked_at, self._looked_at_idle, self._seconds = time.monotonic(), time.monotonic(), 0.0
        self._watching, self._logs = Watching(ray.get_runtime_context().get_node_id(), plan.seed), logs
        self.stacks = self._watching.stacks
        self._policies: dict[int, Any] = {}  # as sent, by version
        self._worn = set[Process]()  # those that are to be recycled
        self._stop: StopSignals | None = None  # of the last wait

    # ------------------------------------------------------------------ commands

    def do(self, command: ForTransport) -> None:
        """Execute a command; raise ClusterError if the policy cannot be put into Ray's object store."""
        began = time.monotonic()
        if isinstance(command, messages.Kill):
            self._kill(command.process)
        elif isinstance(command, Start):
            self._start(command)
        elif isinstance(command, messages.Look):
            self._watching.look(command.process)
        elif isinstance(command, Describe):
            self._expect(self._handles[command.process].describe.remote(command.sampler_id), command)
        else:
            self._ask(command)
        self._seconds += time.monotonic() - began

    def _start(self, start: Start) -> None:
        """Request an actor with the resources for which there is most room."""
        group, taken = 0, Counter(self._groups.values())
        if self._demand.others:
            rooms = dict(enumerate(rooms_for(usable_nodes().values(), self._demand)))
            group = max(rooms, key=lambda one: rooms[one] - taken[one])
        handle: Any = self._actor_classes[group].remote(self._plan, self._model)
        self._handles[start.process], self._groups[start.process] = handle, group
        log = f"{self._logs}/actor-{start.process.actor_id}.log", self._watching.here, os.getpid()
        self._expect(handle.alone_in_process.remote(self._keep_gpus, *log), start)

    def _ask(self, ask: Ask) -> None:
        try:
            if self._stop is not None:
                self._stop.run_added_checks()
        except ClusterError:
            return  # large arguments would end this process if the raylet has died; the next `events` raises
        apart, policy = self._by_reference, self._sent(ask.policy)
        method = self._handles[ask.process].make_segments_packed
        method = method.options(num_returns=1 + len(ask.question.samplers)) if apart else method
        sent = method.remote(wire.pack(ask.question), policy, apart)
        head, *segments = sent if apart else [sent]
        self._expect(head, ask, segments)

    def _expect(self, ref: ObjectRef[Any], command: Start | Ask | Describe, segments: Sequence[Any] = ()) -> None:
        """Let Ray report the end of a call, with its result, from one of its threads."""
        self._calls[ref] = command, list(segments)
        ref.future().add_done_callback(lambda future: self._ended.put((ref, future.result)))

    def _sent(self, policy: PolicySnapshot) -> Any:
        """Return a policy as an argument: packed once if small, else put into the object store once."""
        if policy.version not in self._policies:
            asks = [command for command, _ in self._calls.values() if isinstance(command, Ask)]
            oldest = min((ask.policy.version for ask in asks if ask.process in self._handles), default=policy.version)
            self._policies = {version: sent for version, sent in self._policies.items() if version >= oldest}
            try:
                sent = wire.pack(policy) if policy.weights.nbytes <= INLINE else ray.put(policy)
                self._policies[policy.version] = sent
            except RayError as error:
                raise ClusterError(
                    f"the weights could not be sent to the actors: {last_line(error)}. Free memory or disk space for "
                    f"Ray's object store, then resume (--resume)."
                ) from None
        return self._policies[policy.version]

    def _kill(self, process: Process) -> None:
        handle, _ = self._handles.pop(process, None), self._groups.pop(process, None)
        if handle is not None:
            idle = all(command.process != process for command, _ in self._calls.values())
            if idle or process in self._worn:  # it leaves, or is recycled, and refuses what is left in its queue
                ray.wait([handle.close.remote()], timeout=INTERRUPTED_S)
            within(KILLING_S, lambda: ray.kill(handle))
        self._watching.ended(process)  # its calls end as well, and `events` drops them

    # ------------------------------------------------------------------ events

    def events(self, stop: StopSignals) -> list[Event]:
        """Return an event for each call that has ended; wait up to `TICK_S` for the first."""
        self._stop = stop
        stop.check()
        events: list[Event] = [*self._watching.seen()]
        if self._room is not None:
            joined, left = self._room.changes(self._watching.homes)
            events += [*map(messages.Joined, joined), *map(messages.Left, left)]
        self._look_at_idle()
        ended, began = self._ended_calls(0 if events else TICK_S), time.monotonic()
        for ref, result in ended:
            call = self._calls.pop(ref, None)
            if call is not None and call[0].process in self._handles:  # else it has been killed
                events.append(self._event(*call, result))
        self._seconds += time.monotonic() - began
        return events

    def _ended_calls(self, timeout_s: float) -> list[_Ended]:
        """Return all calls that have ended; wait up to `timeout_s` for the first.

        Waiting for reports costs the same with any number of pending calls, `ray.wait` costs more with more of them. It
        looks at all of them now and then, because a wait must not depend on every report.
        """
        ended = []
        with suppress(Empty):
            ended.append(self._ended.get(timeout=timeout_s if self._calls else min(IDLE_S, timeout_s)))
            while True:
                ended.append(self._ended.get_nowait())
        if not ended and self._calls and time.monotonic() - self._looked_at > LOOK_S:
            refs, _ = ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
            ended = [(ref, partial(ray.get, ref, timeout=FETCH_TIMEOUT_S)) for ref in refs]
            self._looked_at = time.monotonic()
        return ended

    def _look_at_idle(self) -> None:
        """Call each actor that has died without a pending call: this call ends at once, with the reason.

        Otherwise an actor that waits for the others, perhaps for a long replay, would be missed at its next question.
        """
        if time.monotonic() - self._looked_at_idle > IDLE_LOOK_S:
            busy = {command.process for command, _ in self._calls.values()}
            for process, handle in self._handles.items():
                if process not in busy and handle._get_local_state() == ActorTableData.DEAD:
                    self._expect(handle.close.remote(), Start(process))
            self._looked_at_idle = time.monotonic()

    def _event(self, command: Start | Ask | Describe, segments: list[Any], result: Callable[[], Any]) -> Event:
        try:
            message = result()
        except RayError as error:  # the process, its node or the segment in transit is lost
            reason = self._watching.cause_of_death(command.process, error)
            return messages.Died(command.process, reason, incurable(error))
        if isinstance(command, Start):
            return self._watching.started(command.process, message)
        answer = wire.decode_answer([message, *segments] if segments else message)
        if isinstance(answer, wire.Recycled):
            self._worn.add(command.process)
        return messages.Answered(command.process, command.ask_id, answer)

    def steps_of(self, processes: Iterable[Process]) -> int:
        """Return the env steps that these processes have made for the questions that they work on."""
        return sum(map(self._watching.steps_of, processes))

    def take_seconds(self) -> float:
        """Return the seconds spent on sending questions and receiving answers since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Give actors a few seconds to close their environments, then kill them."""
        asked = any(isinstance(command, Ask) for command, _ in self._calls.values())
        starting = {command.process for command, _ in self._calls.values() if isinstance(command, Start)}
        closing = [handle.close.remote() for process, handle in self._handles.items() if process not in starting]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=INTERRUPTED_S if asked else CLOSING_S)
        for process in self._handles:
            self._watching.ended(process)
        handles, self._handles = [*self._handles.values(), *self._watching.take_witnesses()], {}
        within(KILLING_S, lambda: [ray.kill(handle) for handle in handles])


def actor_class(kind: type, resources: Mapping[str, float], options: dict[str, Any]) -> Any:
    """Return the class of actors of this kind that take these resources."""
    return ray.remote(kind).options(
        num_cpus=resources["CPU"],
        num_gpus=resources.get("GPU", 0),
        resources={name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")},
        scheduling_strategy="SPREAD",
        max_restarts=0,  # the engine replaces actors, so it must see every death
        max_task_retries=0,
        enable_task_events=False,
        **options,
    )


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
    engine = Collecting(shares(plan.sampling.num_samplers, session.demand.num_actors), ledger, limits)
    transport = RayTransport(plan, session.demand, room=session.room, **session.options, **more)
    return ActorCollector(engine, transport, on_progress, batch_size=plan.sampling.batch_size)
