"""PPOActor: hosts samplers and collects their segments on request."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from typing import Any

from threadpoolctl import ThreadpoolController

from dppo.cluster import wire
from dppo.cluster.builders import BuiltSampler, build_sampler
from dppo.cluster.collecting.progress_file import make_progress_file, remove_progress_file
from dppo.cluster.faults import Fault
from dppo.cluster.plans import SamplerPlan
from dppo.cluster.user_code import PackedModel, import_also_from, unpacked_model
from dppo.cluster.wire import Answer, Parcel, Question
from dppo.envs.progress import Phase, ProgressRecord, place_of
from dppo.errors import ConfigError, DppoError, EnvironmentFault
from dppo.ppo.acting.sampler import PPOSampler, collect_together
from dppo.ppo.exchange.records import PolicySnapshot, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces
from dppo.user_code import in_a_line


@dataclass(frozen=True, slots=True)
class ProgressFile:
    """Location of the file in which a process records its progress."""

    node_id: str
    path: str
    """"" if there is no such file."""


class PPOActor:
    """Hosts samplers of one run, in its own process on Ray or in the learner's process.

    It keeps no weights and no random state: each question brings the policy, and everything else that a segment
    depends on is in the samplers' environments, which can be rebuilt elsewhere.
    """

    def __init__(
        self,
        plan: SamplerPlan | bytes,
        import_paths: tuple[str, ...] = (),
        model: PackedModel = None,
        progress: ProgressRecord | None = None,
    ) -> None:
        """Store the arguments. Nothing here can fail, because Ray reports a failing constructor badly.

        Args:
            plan: the plan, or the plan pickled; it is unpickled on first use, where a failure can be reported.
            import_paths: additional folders to import the user's modules from.
            model: the user's network, which a pickled plan does not contain.
            progress: records what the environments are doing.
        """
        self._model = model
        self._import_paths = import_paths
        self._plan = plan
        self._progress = progress or ProgressRecord()
        self._progress_file = ""
        self._samplers: dict[int, BuiltSampler] = {}
        self._next: dict[int, int] = {}  # index of each sampler's next segment, unless it is rebuilt

    def alone_in_process(self, keep_gpus: bool = False) -> ProgressFile:
        """Limit this process to one core and no GPU, and record progress in a file.

        Args:
            keep_gpus: leave the GPUs that Ray has assigned visible.
        """
        if not keep_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Ray's handler raises SystemExit, which in the middle of a step would look like a fault of the environment.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that an environment may import
        limit_to_one_thread()
        self._progress_file, self._progress = make_progress_file()
        return ProgressFile(_node_id(), self._progress_file)

    def describe(self, sampler_id: int) -> Spaces | Fault:
        """Create the environments of a sampler and return their spaces."""
        self._progress.begin()
        try:
            return self._sampler(sampler_id).spaces
        except (DppoError, KeyboardInterrupt) as error:
            return Fault.of(error)

    def make_segments(self, question: Question, policy: PolicySnapshot) -> Answer | Fault:
        """Collect all requested segments; return a fault if an environment fails."""
        began = time.perf_counter()
        self._progress.begin(sum(map(_steps_to_replay, question.requests)))
        self._close_all_but(question.hosted)
        try:
            samplers = [self._ready(request) for request in question.requests]
            if question.spaces is not None:
                self._check_spaces(question)
            made = collect_together(samplers, question.requests, policy)
        except (DppoError, KeyboardInterrupt) as error:
            return Fault.of(error)
        env_s = sum(report.env_s for report, _ in made)
        replayed, replay_s = self._progress.look().replayed, self._progress.replay_s
        self._progress.enter(place_of(Phase.IDLE))
        return Answer(tuple(made), Timings(time.perf_counter() - began, env_s, replayed, replay_s))

    def make_segments_packed(self, question: bytes, policy: bytes | PolicySnapshot) -> bytes | Parcel:
        """Do `make_segments` over Ray."""
        return wire.encode_answer(self.make_segments(wire.decode_question(question), wire.decode_policy(policy)))

    def make_segments_apart(self, question: bytes, policy: bytes | PolicySnapshot) -> Any:
        """Do `make_segments` over Ray with several return values: the packed reports, then each segment."""
        asked = wire.decode_question(question)
        answer = self.make_segments(asked, wire.decode_policy(policy))
        if isinstance(answer, Fault):
            return [wire.pack(answer), *(None for _ in asked.requests)]
        head, segments = wire.take_apart(answer)
        return [head, *segments]

    def close(self) -> None:
        """Close all environments."""
        self._close_all_but(())
        remove_progress_file(self._progress_file)

    def _close_all_but(self, hosted: tuple[int, ...]) -> None:
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

    def _check_spaces(self, question: Question) -> None:
        """Raise if a sampler that is asked has other spaces than the run: its policy would be another."""
        expected = question.spaces
        assert expected is not None
        for sampler_id in (request.sampler_id for request in question.requests):
            found = self._sampler(sampler_id).spaces
            for name in ("obs", "actions"):
                own, first = repr(getattr(found, name)), repr(getattr(expected, name))
                if own != first:
                    what = {"obs": "observation_space", "actions": "action_space"}[name]
                    raise EnvironmentFault(
                        f"sampler {sampler_id} ({self._load_plan().env.env_name}): its {what} gives {own}, that of "
                        f"the sampler described first {first}. All environments of a run must have equal spaces."
                    )

    def _sampler(self, sampler_id: int) -> BuiltSampler:
        if sampler_id not in self._samplers:
            self._samplers[sampler_id] = build_sampler(self._load_plan(), sampler_id, self._progress)
        return self._samplers[sampler_id]

    def _load_plan(self) -> SamplerPlan:
        if isinstance(self._plan, bytes):
            import_also_from(self._import_paths)
            try:
                plan = wire.unpack(self._plan)
            except Exception as error:  # importing a user's module may raise anything
                raise ConfigError(
                    f"env_id: the environment cannot be loaded in an actor: {in_a_line(error)}. It must be importable "
                    f"on every node; pass module:factory rather than a function of a script."
                ) from None
            assert isinstance(plan, SamplerPlan)
            self._plan = replace(plan, network=replace(plan.network, model=unpacked_model(self._model)))
        return self._plan


def _node_id() -> str:
    import ray  # loaded already: Ray has started this process

    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


def _steps_to_replay(request: SegmentRequest) -> int:
    return 0 if request.rebuild is None else sum(map(len, request.rebuild.actions))


def limit_to_one_thread() -> Any:
    """Limit NumPy's matrix products to one thread, so that sums have the same order on every machine.

    Returns: a handle whose `restore_original_limits()` undoes it.
    """
    return ThreadpoolController().select(internal_api="openblas").limit(limits=1)
