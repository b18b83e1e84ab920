"""PPOActor, which hosts samplers in a process of its own on Ray; SamplerHost, which does so in any process."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from dppo.cluster import wire
from dppo.cluster.builders import BuiltSampler, build_sampler
from dppo.cluster.collecting.progress_file import ProgressFile, make_progress_file, remove_progress_file
from dppo.cluster.faults import Fault, sendable
from dppo.cluster.plans import PackedModel, SamplerPlan, unpacked_model
from dppo.cluster.wire import Answer, Question
from dppo.envs.activity import ActivityRecord, Phase, place_of
from dppo.errors import ConfigError, DppoError, EnvironmentFault
from dppo.numerics.fingerprint import Expected
from dppo.numerics.portable import limit_blas
from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.records import Incident, IncidentKind, PolicySnapshot, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces
from dppo.user_code import in_a_line


class PPOActor:
    """Collects segments of its samplers on request, and sends faults as plain data."""

    def __init__(self, plan: bytes, model: PackedModel = ((), None)) -> None:
        """Store the arguments. Nothing here can fail, because Ray reports a failing constructor badly.

        Args:
            plan: the pickled plan; it is unpickled on first use, where a failure can be reported.
            model: the user's network, which the plan does not contain.
        """
        self._plan = plan
        self._model = model
        self._progress = ActivityRecord()
        self._progress_file = ""
        self._host: SamplerHost | None = None
        self._fault: Fault | None = None

    def alone_in_process(self, keep_gpus: bool = False) -> ProgressFile:
        """Limit this process to one core and, without `keep_gpus`, no GPU; record progress in a file."""
        if not keep_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Ray's handler raises SystemExit, which in the middle of a step would look like a fault of the environment.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that an environment may import
        limit_blas(1)
        self._progress_file, self._progress = make_progress_file()
        import ray  # loaded already: Ray has started this process

        return ProgressFile(ray.get_runtime_context().get_node_id(), self._progress_file, socket.gethostname())

    def describe(self, sampler_id: int) -> Spaces | Fault:
        """Create the environments of a sampler and return their spaces."""
        try:
            return self._hosted().spaces(sampler_id)
        except (DppoError, KeyboardInterrupt) as error:
            return sendable(error)

    def make_segments(self, question: Question, policy: PolicySnapshot) -> Answer | Fault:
        """Collect all requested segments; return a fault if an environment fails, also for all later questions."""
        if self._fault is not None:
            return self._fault
        try:
            host = self._hosted()
            host.close_all_but(question.hosted)
            answer = host.collect(question.requests, policy, question.spaces)
            return answer if question.expected is None else _compared(answer, question.expected)
        except (DppoError, KeyboardInterrupt) as error:
            self._fault = sendable(error)
            return self._fault

    def make_segments_packed(self, question: bytes, policy: bytes | PolicySnapshot) -> bytes | list[Any]:
        """Do `make_segments` over Ray."""
        return wire.encode_answer(self.make_segments(wire.unpack(question), wire.unpack(policy)))

    def make_segments_apart(self, question: bytes, policy: bytes | PolicySnapshot) -> list[Any]:
        """Do `make_segments` over Ray with several return values: the packed reports, then each segment."""
        asked: Question = wire.unpack(question)
        answer = self.make_segments(asked, wire.unpack(policy))
        if isinstance(answer, Fault):
            return [wire.pack(answer), *(None for _ in asked.requests)]
        return wire.take_apart(answer)

    def close(self) -> None:
        """Close all environments."""
        if self._host is not None:
            self._host.close_all_but()
        remove_progress_file(self._progress_file)

    def _hosted(self) -> SamplerHost:
        if self._host is None:
            model = unpacked_model(self._model)
            try:
                plan: SamplerPlan = wire.unpack(self._plan)
            except Exception as error:  # importing a user's module may raise anything
                raise ConfigError(
                    f"env_id: the environment cannot be loaded in an actor: {in_a_line(error)}. It must be importable "
                    f"on every node; pass module:factory rather than a function of a script."
                ) from None
            self._host = SamplerHost(replace(plan, network=replace(plan.network, model=model)), self._progress)
        return self._host


class SamplerHost:
    """Hosts samplers of a run and collects their segments.

    It keeps no weights and no random state: each call brings the policy, and everything else that a segment depends on
    is in the samplers' environments, which can be rebuilt elsewhere.
    """

    def __init__(self, plan: SamplerPlan, progress: ActivityRecord) -> None:
        self._plan = plan
        self._progress = progress
        self._samplers: dict[int, BuiltSampler] = {}
        self._next: dict[int, int] = {}  # index of each sampler's next segment, unless it is rebuilt

    def spaces(self, sampler_id: int) -> Spaces:
        """Create the environments of a sampler and return their spaces."""
        self._progress.begin()
        return self._sampler(sampler_id).spaces

    def collect(self, requests: Sequence[SegmentRequest], policy: PolicySnapshot, spaces: Spaces | None) -> Answer:
        """Collect all requested segments, with all samplers acting together; `spaces` as in `Question`.

        Raises:
            EnvironmentFault: an environment failed, or has other spaces.
        """
        began = time.perf_counter()
        rebuilds = [request.rebuild for request in requests if request.rebuild is not None]
        self._progress.begin(sum(len(actions) for rebuild in rebuilds for actions in rebuild.actions))
        samplers = [self._ready(request) for request in requests]
        if spaces is not None:
            self._check_spaces(requests, spaces)
        made = collect_together(samplers, requests, policy)
        env_s = sum(report.env_s for report, _ in made)
        replayed, replay_s = self._progress.look().replayed, self._progress.replay_s
        self._progress.enter(place_of(Phase.IDLE))
        return Answer(tuple(made), Timings(time.perf_counter() - began, env_s, replayed, replay_s))

    def close_all_but(self, hosted: Collection[int] = ()) -> None:
        """Close the environments of all samplers except `hosted`."""
        for sampler_id in self._samplers.keys() - set(hosted):
            self._samplers.pop(sampler_id).envs.close()
            self._next.pop(sampler_id, None)

    def _ready(self, request: SegmentRequest) -> PPOSampler:
        """Return the requested sampler, which must be at the requested segment unless the request rebuilds it."""
        holds = self._next.get(request.sampler_id, 0)
        assert request.rebuild is not None or holds == request.index, (
            f"{request}, but the sampler is at segment {holds}"
        )
        self._next[request.sampler_id] = request.index + 1
        return self._sampler(request.sampler_id).sampler

    def _sampler(self, sampler_id: int) -> BuiltSampler:
        if sampler_id not in self._samplers:
            self._samplers[sampler_id] = build_sampler(self._plan, sampler_id, self._progress)
        return self._samplers[sampler_id]

    def _check_spaces(self, requests: Sequence[SegmentRequest], expected: Spaces) -> None:
        """Raise if a requested sampler has other spaces than the run: its policy would be another."""
        for sampler_id in (request.sampler_id for request in requests):
            found = self._sampler(sampler_id).spaces
            for name, what in (("obs", "observation_space"), ("actions", "action_space")):
                own, first = repr(getattr(found, name)), repr(getattr(expected, name))
                if own != first:
                    raise EnvironmentFault(
                        f"sampler {sampler_id} ({self._plan.env.env_name}): its {what} gives {own}, that of the "
                        f"sampler described first {first}. All environments of a run must have equal spaces."
                    )


def _compared(answer: Answer, expected: Expected) -> Answer:
    """Add an incident if this process computes other bits than `expected`, or raise `ClusterError` if that is asked."""
    problem = expected.problem(torch="torch" in sys.modules)  # loaded by now if the network acts with it
    if not problem:
        return answer
    (first, segment), *others = answer.made
    first = replace(first, incidents=(*first.incidents, Incident(IncidentKind.OTHER_CPU, problem)))
    return replace(answer, made=((first, segment), *others))
