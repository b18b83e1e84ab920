"""RayTransport: actors as processes on Ray, which may die at any time."""

import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray import ObjectRef
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group

from dppo.engine import messages
from dppo.engine.mailbox import Mailbox
from dppo.engine.messages import Ask, Describe, Event, ForTransport, Kill, Play, Process, Start
from dppo.errors import ClusterError
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.signals import StopSignals
from dppo.transports.ray.actor_class import ActorClass, group_of
from dppo.transports.ray.calls import calls_ray
from dppo.transports.ray.capacity import Demand, rooms_for
from dppo.transports.ray.elastic_pool import ElasticPool, usable_nodes
from dppo.transports.ray.failures import FETCH_TIMEOUT_S, call_with_timeout, fatal_error, last_line
from dppo.transports.ray.pickling import decode_answer, pack, unpack
from dppo.transports.ray.session import RayLink
from dppo.transports.ray.watching import Watching
from dppo.user_code import in_a_line

# longest single wait, and so the delay with which a deadline or a due restart is noticed
TICK_S = 0.5
IDLE_S = 0.05  # wait while no call is pending
POLL_S = 2.0  # between two looks at all actors, and at all pending calls
INLINE = 90_000  # bytes of a policy up to which each question holds it; Ray puts larger arguments into its store again
CLOSING_S = 5.0  # longest wait for actors that close their environments
INTERRUPTED_S = 2.0  # longest wait for actors in the middle of a segment
START_AGAIN_S = 15.0  # longest start of an actor after the network was silent
NOT_STARTED = f"has not started within {START_AGAIN_S:g} s after the network was back"
KILLING_S = 2.0  # longest wait until Ray accepts a kill
LOST_S = 1.0  # longest wait for actors of a lost Ray

_Question = Ask | Describe | Play
# a call, and a function that returns its result or raises its error
_Ended = tuple[ObjectRef[Any], Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class ActorKind:
    """The actors that a transport starts."""

    name: str
    """Name of the processes in file names of logs: actor-3.log."""
    classes: Sequence[ActorClass]
    """Classes of actors, by the group of resources: see `Demand`."""
    arguments: Callable[[int], tuple[Any, ...]]
    """Arguments of the constructor, by the id of the actor."""
    logs: str
    """Folder of their logs on this node."""
    by_reference: bool = False
    """True if the arrays of segments stay with Ray, for learners that fetch them from the actors."""
    seed: int | None = None
    """Seed of the run, for messages about samplers; None if the actors host none."""


@dataclass(frozen=True, slots=True)
class _Call:
    """A pending call to an actor."""

    command: Start | _Question
    segments: list[Any]
    """References to arrays that stay with Ray."""


class RayTransport:
    """Starts, asks and kills actors on Ray; an engine decides when.

    Commands are executed in order by the thread of `link.calls`, the only one that calls Ray: the thread of the loop
    puts them into its queue, and reads what has ended. Each attribute is changed by one of the two, as noted.
    """

    def __init__(
        self, kind: ActorKind, demand: Demand, link: RayLink, pool: ElasticPool | None = None
    ) -> None:
        """Keep the arguments; `pool` decides which actors join and leave, if their number is not fixed."""
        self._kind = kind
        self._demand = demand
        self._link = link
        self._pool = pool
        self._watching = Watching(link, link.node_id, kind.seed)
        self.stacks = self._watching.stacks
        self.log_of = self._watching.log_of
        # Of the thread that calls Ray:
        self._handles: dict[Process, Any] = {}
        self._groups: dict[Process, int] = {}
        # of processes with cores on several nodes
        self._reserved: dict[Process, PlacementGroup] = {}
        self._policies: dict[int, Any] = {}  # version -> policy as it was sent
        # from which the loop takes those that have ended
        self._calls: dict[ObjectRef[Any], _Call] = {}
        self._sending_s = 0.0
        # Of the loop:
        # processes to be started or running; answers of others do not count
        self._alive: set[Process] = set()
        self._worn: set[Process] = set()  # processes to be recycled
        self._looked_at = time.monotonic()
        self._silences = 0  # silences of the network so far
        # processes that were starting then, and until when they may
        self._doubtful: dict[Process, float] = {}
        self._receiving_s = 0.0
        # Of both:
        self._ended = Mailbox[_Ended]()  # calls that have ended, in this order
        self._unreported = deque[_Ended]()  # the same, found by a look
        self._failed = Mailbox[messages.Died]()  # processes that could not be asked
        self._looking = False  # True while a look at all actors is due

    # ------------------------------------------------------------------ commands

    def do(self, command: ForTransport) -> None:
        """Let a command be executed, after all earlier ones; does not wait."""
        if isinstance(command, messages.Look):
            self._watching.look(command.process)
            return
        if isinstance(command, Start):
            self._alive.add(command.process)
        elif isinstance(command, Kill):
            self._alive.discard(command.process)
            self._watching.ended(command.process)
        self._link.calls.post(partial(self._execute, command), messages.IN_WORDS[type(command)])

    @calls_ray
    def _execute(self, command: Start | Kill | _Question) -> None:
        """Execute a command; raise ClusterError if the policy of segments cannot be put into Ray's object store."""
        began = time.monotonic()
        if isinstance(command, Kill):
            self._kill(command.process)
        elif isinstance(command, Start):
            self._start(command)
        elif isinstance(command, Describe):
            described = self._handles[command.process].describe.remote(command.sampler_id)
            self._expect(described, command)
        elif self._link.watch.lost:
            return  # large arguments would end this process
        elif isinstance(command, Play):
            self._play(command)
        else:
            self._ask(command)
        self._sending_s += time.monotonic() - began

    @calls_ray
    def _start(self, start: Start) -> None:
        """Request an actor with the resources for which there is most room."""
        group = 0
        if self._demand.alternatives:
            started = Counter(self._groups.values())
            rooms = dict(enumerate(rooms_for(usable_nodes().values(), self._demand)))
            group = max(rooms, key=lambda group: rooms[group] - started[group])
        actor_id = start.process.actor_id
        reserved = group_of(self._demand)
        if reserved is not None:
            self._reserved[start.process] = reserved
        arguments = self._kind.arguments(actor_id)
        avoided = sorted(self._watching.avoided)
        handle = self._kind.classes[group].start(arguments, reserved, avoided)
        self._handles[start.process] = handle
        self._groups[start.process] = group
        log = f"{self._kind.logs}/{self._kind.name}-{actor_id}.log"
        keep_gpus = "GPU" in self._demand.actor
        configured = handle.configure_process.remote(
            keep_gpus, log, self._watching.node_id, os.getpid(), reserved
        )
        self._expect(configured, start)

    @calls_ray
    def _ask(self, ask: Ask) -> None:
        by_reference = self._kind.by_reference
        method = self._handles[ask.process].make_segments_packed
        arguments = pack(ask.question), self._sent(ask.policy), by_reference
        if not by_reference:
            self._expect(method.remote(*arguments), ask)
            return
        method = method.options(num_returns=1 + len(ask.question.samplers))
        head, *segments = method.remote(*arguments)
        self._expect(head, ask, segments)

    @calls_ray
    def _play(self, play: Play) -> None:
        try:
            policy = play.policy
            if isinstance(policy, PolicySnapshot):
                policy = self._sent(policy)
        except ClusterError as error:  # an evaluation may be left out
            self._failed.put(messages.Died(play.process, f"failed: {error}"))
            return
        actor = self._handles[play.process]
        self._expect(actor.play.remote(policy, play.episode, play.timeout_s), play)

    def _expect(
        self, ref: ObjectRef[Any], command: Start | _Question, segments: Sequence[Any] = ()
    ) -> None:
        """Let Ray report the end of a call, with its result, from one of its threads."""
        self._calls[ref] = _Call(command, list(segments))
        ref.future().add_done_callback(lambda future: self._ended.put((ref, future.result)))

    def _pending(self) -> list[Start | _Question]:
        return [call.command for call in list(self._calls.values())]

    @calls_ray
    def _sent(self, policy: PolicySnapshot) -> Any:
        """Return a policy as an argument: packed once if small, else put into the object store once."""
        if policy.version in self._policies:
            return self._policies[policy.version]
        asks = [command for command in self._pending() if isinstance(command, Ask | Play)]
        policies = [ask.policy for ask in asks if ask.process in self._handles]
        versions = [other.version for other in policies if isinstance(other, PolicySnapshot)]
        oldest = min(versions, default=policy.version)
        self._policies = {
            version: sent for version, sent in self._policies.items() if version >= oldest
        }
        put = pack if policy.weights.nbytes <= INLINE else ray.put
        try:
            self._policies[policy.version] = put(policy)
        except RayError as error:
            raise ClusterError(
                f"the weights could not be sent to the actors: {last_line(error)}. Free memory or disk space for "
                f"Ray's object store, then resume (--resume)."
            ) from None
        return self._policies[policy.version]

    @calls_ray
    def _kill(self, process: Process) -> None:
        handle = self._handles.pop(process, None)
        self._groups.pop(process, None)
        if handle is None:
            return
        is_idle = all(command.process != process for command in self._pending())
        # it leaves, or is recycled, and refuses what is left in its queue
        if is_idle or process in self._worn:
            ray.wait([handle.close.remote()], timeout=INTERRUPTED_S)
        # its calls end as well, and `events` drops them
        call_with_timeout(KILLING_S, partial(ray.kill, handle))
        reserved = self._reserved.pop(process, None)
        if reserved is not None:
            call_with_timeout(KILLING_S, partial(remove_placement_group, reserved))

    # ------------------------------------------------------------------ events

    def events(self, stop: StopSignals) -> list[Event]:
        """Return an event for each call that has ended; wait up to `TICK_S` for the first."""
        stop.check()
        events: list[Event] = [*self._watching.take_events(), *self._failed.take()]
        if self._pool is not None:
            joined, left = self._pool.changes(self._watching.homes)
            events += [*map(messages.Joined, joined), *map(messages.Left, left)]
        events += self._not_started()
        ended = self._ended_calls(0 if events else TICK_S)
        began = time.monotonic()
        if began - self._looked_at > POLL_S and not self._looking:
            self._looked_at = began
            self._looking = True
            self._link.calls.post(self._look, "looking at all actors")
        for ref, result in ended:
            call = self._calls.pop(ref, None)
            # otherwise it has been killed
            if call is not None and call.command.process in self._alive:
                events.append(self._event(call, result))
        self._receiving_s += time.monotonic() - began
        return events

    def _not_started(self) -> list[Event]:
        """Return the ends of processes that were requested before the network was silent, and did not start afterwards.

        Messages between other processes of Ray were lost as well, and Ray notices that after minutes.
        """
        silences = self._link.watch.silences
        now = self._link.clock.patience()
        starting = {command.process for command in self._pending() if isinstance(command, Start)}
        if silences != self._silences:
            self._silences = silences
            self._doubtful = dict.fromkeys(starting, now + START_AGAIN_S)
        late_processes = [process for process, until in self._doubtful.items() if now > until]
        for process in late_processes:
            del self._doubtful[process]
        return [
            messages.Died(process, NOT_STARTED) for process in late_processes if process in starting
        ]

    def _ended_calls(self, timeout_s: float) -> list[_Ended]:
        """Return all calls that have ended; wait up to `timeout_s` for the first."""
        if not self._calls:
            timeout_s = min(IDLE_S, timeout_s)
        ended = self._ended.take(timeout_s)
        while self._unreported:
            ended.append(self._unreported.popleft())
        return ended

    @calls_ray
    def _look(self) -> None:
        """Call each actor that has died without a pending call; look for calls whose end was not reported.

        Such a call ends at once; an actor that waits for others would be missed otherwise. Unlike `ray.wait`, reports
        cost the same with any number of pending calls; but the loop must not depend on every report.
        """
        refs = list(self._calls)
        busy_processes = {command.process for command in self._pending()}
        for process, handle in self._handles.items():
            if process not in busy_processes and handle._get_local_state() == ActorTableData.DEAD:
                self._expect(handle.close.remote(), Start(process))
        if refs and self._ended.is_empty:
            for ref in ray.wait(refs, num_returns=len(refs), timeout=0)[0]:
                self._unreported.append((ref, _result_of(ref)))
        self._looking = False

    def _event(self, call: _Call, result: Callable[[], Any]) -> Event:
        command = call.command
        try:
            message = result()
        except RayError as error:  # the process, its node or the segment in transit is lost
            reason = self._watching.cause_of_death(command.process, error)
            activity = self._watching.last_activity(command.process)
            return messages.Died(command.process, reason, fatal_error(error), activity)
        if isinstance(command, Start):
            return self._watching.started(command.process, message)
        if isinstance(command, Play):
            try:
                return messages.Answered(command.process, command.ask_id, unpack(message))
            except Exception as error:  # as of another version; an evaluation may be left out
                return messages.Died(command.process, f"failed: {in_a_line(error)}")
        if call.segments:
            message = [message, *call.segments]
        answer = decode_answer(message)
        if isinstance(answer, messages.Recycled):
            self._worn.add(command.process)
        return messages.Answered(command.process, command.ask_id, answer)

    @property
    def spent_s(self) -> float:
        """Seconds spent on sending questions and receiving answers so far."""
        return self._sending_s + self._receiving_s

    # ------------------------------------------------------------------ the end

    def close(self) -> None:
        """Give actors a few seconds to close their environments, then kill them."""
        for process in self._alive:
            self._watching.ended(process)
        timeout_s = LOST_S if self._link.watch.lost else CLOSING_S + 2 * KILLING_S
        with suppress(ClusterError):  # Ray does not answer
            self._link.calls.call(self._close, "closing the actors", timeout_s=timeout_s)

    @calls_ray
    def _close(self) -> None:
        pending = self._pending()
        interrupted = any(isinstance(command, Ask | Play) for command in pending)
        starting = {command.process for command in pending if isinstance(command, Start)}
        started = self._handles.keys() - starting
        closing = [self._handles[process].close.remote() for process in started]
        if closing:
            timeout_s = INTERRUPTED_S if interrupted else CLOSING_S
            ray.wait(closing, num_returns=len(closing), timeout=timeout_s)
        handles = [*self._handles.values(), *self._watching.take_witnesses()]
        self._handles = {}
        call_with_timeout(KILLING_S, lambda: [ray.kill(handle) for handle in handles])
        reserved = [*self._reserved.values()]
        call_with_timeout(KILLING_S, lambda: [*map(remove_placement_group, reserved)])


@calls_ray
def _result_of(ref: ObjectRef[Any]) -> Callable[[], Any]:
    """Return a function that returns the result of a call that has ended, or raises its error."""
    done = Future[Any]()
    try:
        done.set_result(ray.get(ref, timeout=FETCH_TIMEOUT_S))
    except RayError as error:
        done.set_exception(error)
    return done.result
