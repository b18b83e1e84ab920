"""RayTransport: actors as processes on Ray, any of which may die at any time."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from dppo.assemble import SamplerPlan
from dppo.cluster import wire
from dppo.cluster.collecting.actor import PPOActor
from dppo.cluster.collecting.messages import (
    Answered,
    Ask,
    Describe,
    Described,
    Died,
    Event,
    ForTransport,
    Kill,
    Look,
    Start,
    Started,
)
from dppo.cluster.collecting.watching import Watching
from dppo.cluster.faults import cause_of_death, incurable, last_line, within
from dppo.cluster.user_code import import_paths, packed_model
from dppo.cluster.wire import Question
from dppo.config.parts import Actors
from dppo.errors import ClusterError, ConfigError
from dppo.ppo.segment import PolicySnapshot
from dppo.signals import StopSignals

TICK_S = 0.5  # longest single wait: how fast a deadline or a due restart is noticed
IDLE_S = 0.05  # between two looks while nothing is on its way
FETCH_TIMEOUT_S = 120.0  # for a segment that is ready but has to cross the network
CLOSING_S = 5.0  # for actors to close their environments
KILLING_S = 2.0  # for Ray to take note of it
INTERRUPTED_S = 2.0  # the same for actors that are in the middle of a segment


@dataclass(frozen=True, slots=True)
class _Call:
    """A call to an actor that has not ended."""

    command: Start | Ask | Describe
    segments: tuple[ObjectRef[Any], ...] | None = None
    """References to the arrays, which stay with Ray; None where they come with the reports."""


class RayTransport:
    """Starts, asks and kills actors on Ray; the engine decides when."""

    parallel = True

    def __init__(
        self,
        plan: SamplerPlan,
        actors: Actors,
        *,
        by_reference: bool = False,
    ) -> None:
        """Args:
            by_reference: leave the arrays of segments with Ray, for learners that fetch them themselves.

        Raises:
            ConfigError: the environment, or the user's network, cannot be sent.
        """
        self._model = packed_model(plan.network.model)
        try:
            self._plan = wire.pack_code(replace(plan, network=replace(plan.network, model=None)))
        except Exception as error:  # whatever a user's object raises when it is pickled
            raise ConfigError(
                f"env_id={plan.env.env_name}: cannot be sent to actors: {error}. Give it as module:factory, or make it "
                f"a function that holds no open files, locks or simulators."
            ) from None
        self._remote_class = ray.remote(PPOActor).options(
            num_cpus=actors.cpus_per_actor,
            num_gpus=actors.actor_gpus,
            resources=actors.actor_resources or None,
            scheduling_strategy="SPREAD",
            max_restarts=0,  # the engine replaces actors, and sees every death
            max_task_retries=0,
            enable_task_events=False,
        )
        self._keep_gpus = actors.actor_gpus > 0
        self._by_reference = by_reference
        self._handles: dict[int, Any] = {}
        self._calls: dict[ObjectRef[Any], _Call] = {}
        self._watching = Watching()
        self._policy: tuple[PolicySnapshot, Any] | None = None
        self._seconds = 0.0

    # ------------------------------------------------------------------ commands

    def do(self, command: ForTransport) -> None:
        """Carry out a command.

        Raises:
            ClusterError: the policy cannot be put into Ray's object store.
        """
        began = time.monotonic()
        if isinstance(command, Kill):
            self._kill(command.actor_id)
        elif isinstance(command, Start):
            handle: Any = self._remote_class.remote(self._plan, import_paths(), self._model)
            self._handles[command.actor_id] = handle
            self._calls[handle.alone_in_process.remote(self._keep_gpus)] = _Call(command)
        elif isinstance(command, Look):
            self._watching.look(command)
        elif isinstance(command, Describe):
            self._calls[self._handles[command.actor_id].describe.remote(command.sampler_id)] = _Call(command)
        else:
            self._ask(command)
        self._seconds += time.monotonic() - began

    def _ask(self, ask: Ask) -> None:
        handle, policy = self._handles[ask.actor_id], self._sent(ask.policy)
        question = wire.encode_question(Question(ask.requests, ask.hosted, ask.spaces))
        if self._by_reference:
            method = handle.make_segments_apart.options(num_returns=1 + len(ask.requests))
            head, *segments = method.remote(question, policy)
            self._calls[head] = _Call(ask, tuple(segments))
        else:
            self._calls[handle.make_segments_packed.remote(question, policy)] = _Call(ask)

    def _sent(self, policy: PolicySnapshot) -> Any:
        """Return a policy as an argument: packed once, or put into the store once and fetched once by each node."""
        if self._policy is None or self._policy[0] is not policy:
            message = wire.encode_policy(policy)
            try:
                self._policy = policy, message if isinstance(message, bytes) else ray.put(message)
            except RayError as error:
                raise ClusterError(
                    f"the weights could not be sent to the actors: {last_line(error)}. Free memory or disk space for "
                    f"Ray's object store, then continue with --resume."
                ) from None
        return self._policy[1]

    def _kill(self, actor_id: int) -> None:
        handle = self._handles.pop(actor_id, None)
        if handle is not None:
            within(KILLING_S, lambda: ray.kill(handle))
        self._watching.ended(actor_id)
        self._calls = {ref: call for ref, call in self._calls.items() if call.command.actor_id != actor_id}

    # ------------------------------------------------------------------ events

    def events(self, stop: StopSignals) -> list[Event]:
        """Return the calls that have ended; waits a moment for the first, and for no other."""
        stop.check()
        seen: list[Event] = [*self._watching.seen()]
        if seen:
            return seen
        calls = list(self._calls)
        if not calls:
            time.sleep(IDLE_S)
            return []
        ready, _ = ray.wait(calls, num_returns=1, timeout=TICK_S)
        if ready and len(calls) > 1:
            ready, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        began = time.monotonic()
        events = [self._event(ref, self._calls.pop(ref)) for ref in ready]
        self._seconds += time.monotonic() - began
        return events

    def _event(self, ref: ObjectRef[Any], call: _Call) -> Event:
        command = call.command
        try:
            message = ray.get(ref, timeout=FETCH_TIMEOUT_S)
        except RayError as error:  # the process, the node, or the segment on its way is lost
            return Died(command.actor_id, command.process, cause_of_death(error), incurable(error))
        if isinstance(command, Start):
            self._watching.started(command.actor_id, message)
            return Started(command.actor_id, command.process)
        if isinstance(command, Describe):
            return Described(command.actor_id, command.process, command.ask_id, message)
        if call.segments is None:
            answer = wire.decode_answer(message)
        else:
            answer = wire.put_together(message, call.segments)
        return Answered(command.actor_id, command.process, command.ask_id, answer)

    def take_seconds(self) -> float:
        """Return the seconds spent since the last call on sending questions and taking in answers."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def close(self) -> None:
        """Let actors close their environments for a moment, then kill them."""
        patience_s = INTERRUPTED_S if any(isinstance(call.command, Ask) for call in self._calls.values()) else CLOSING_S
        starting = {call.command.actor_id for call in self._calls.values() if isinstance(call.command, Start)}
        closing = [handle.close.remote() for actor_id, handle in self._handles.items() if actor_id not in starting]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=patience_s)
        for actor_id in self._handles:
            self._watching.ended(actor_id)
        handles, self._handles = [*self._handles.values(), *self._watching.take_witnesses()], {}
        within(KILLING_S, lambda: [ray.kill(handle) for handle in handles])
