"""PPOActor: hosts samplers, and makes a segment on each request of the learner."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from threadpoolctl import ThreadpoolController

from dppo.assemble import BuiltSampler, SamplerPlan, build_sampler
from dppo.errors import ConfigError, DppoError, EnvironmentFault, TrainingDiverged
from dppo.ppo.segment import PolicySnapshot, Segment, SegmentReport, SegmentRequest, Timings
from dppo.spaces import Spaces


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception in an actor, as plain data: no class of the user's has to be unpickled to tell of it."""

    kind: str
    """Which exception of `dppo.errors` to raise: "config", "environment" or "diverged"."""
    message: str
    remote_traceback: str = ""

    @staticmethod
    def of(error: DppoError) -> Fault:
        if isinstance(error, EnvironmentFault):
            return Fault("environment", error.message, error.remote_traceback)
        return Fault("diverged" if isinstance(error, TrainingDiverged) else "config", str(error))

    def as_error(self) -> DppoError:
        if self.kind == "environment":
            return EnvironmentFault(self.message, self.remote_traceback)
        return TrainingDiverged(self.message) if self.kind == "diverged" else ConfigError(self.message)


T = TypeVar("T")
SMALL = 128 * 1024  # bytes of weights, or of observations, that travel faster inside a message than by reference


class PPOActor:
    """Hosts samplers of one run, in a process of its own (on Ray) or in the learner's.

    It keeps no weights and no random state: each request brings the policy, and all else that a segment depends
    on is in its samplers' environments, which can be rebuilt elsewhere.
    """

    def __init__(self, plan: SamplerPlan | bytes, import_paths: tuple[str, ...] = ()) -> None:
        """Do nothing that can fail: Ray does not restart an actor whose constructor raised, nor says why well.

        Args:
            plan: may come pickled, and is then unpickled on first use, where a failure can be told.
            import_paths: folders that the environment may be imported from, beside this process's own.
        """
        self._import_paths = import_paths
        self._plan = plan
        self._samplers: dict[int, BuiltSampler] = {}

    def alone_in_process(self, keep_gpus: bool = False) -> None:
        """Keep to one core and away from GPUs; not for an actor in the learner's process."""
        if not keep_gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        # Ray's handler raises SystemExit, which would look like the environment's own doing in the middle of a step.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.environ["OMP_NUM_THREADS"] = "1"  # for a torch that an environment may import
        limit_to_one_thread()

    def describe(self, sampler_id: int) -> Spaces | Fault:
        """The spaces of the environment, from making those of `sampler_id`."""
        try:
            return self._sampler(sampler_id).spaces
        except DppoError as error:
            return Fault.of(error)

    def make_segment(
        self, request: SegmentRequest, snapshot: PolicySnapshot
    ) -> tuple[SegmentReport | Fault, Segment | None]:
        """One segment of one sampler under the given policy; (fault, None) if its environment failed."""
        began = time.perf_counter()
        try:
            segment, report = self._sampler(request.sampler_id).sampler.collect(request, snapshot)
        except DppoError as error:
            return Fault.of(error), None
        timings = Timings(total_s=time.perf_counter() - began, env_s=report.timings.env_s)
        return replace(report, timings=timings), segment

    def make_segment_packed(self, asked: bytes, snapshot: PolicySnapshot | None, apart: bool) -> Any:
        """`make_segment` for Ray, which takes longer over many small arrays than pickle does over all of them.

        Args:
            asked: (request, snapshot), packed; the snapshot in there is None if `snapshot` came by reference.
            apart: two return values, so that arrays can go elsewhere than reports.
        """
        request, small = unpacked(asked)
        answer, segment = self.make_segment(request, small if snapshot is None else snapshot)
        if apart:
            return packed(answer), segment
        if segment is not None and segment.obs.nbytes > SMALL:
            return answer, segment
        return packed((answer, segment))

    def close(self) -> None:
        """Close all environments."""
        while self._samplers:
            self._samplers.popitem()[1].envs.close()

    def _sampler(self, sampler_id: int) -> BuiltSampler:
        if sampler_id not in self._samplers:
            self._samplers[sampler_id] = build_sampler(self._load_plan(), sampler_id)
        return self._samplers[sampler_id]

    def _load_plan(self) -> SamplerPlan:
        if isinstance(self._plan, bytes):
            sys.path += [path for path in self._import_paths if path not in sys.path]
            try:
                self._plan = pickle.loads(self._plan)
            except Exception as error:  # whatever a user's module raises while it is imported
                last = traceback.format_exception_only(error)[-1].strip()
                raise ConfigError(
                    f"env_id: the environment cannot be loaded in an actor: {last}. It must be importable on every "
                    f"node; give it as module:factory rather than as a function of a script."
                ) from None
        assert isinstance(self._plan, SamplerPlan)
        return self._plan


def limit_to_one_thread() -> Any:
    """Let NumPy's matrix products use one thread, whatever the machine: the same sums in the same order everywhere.

    Returns: a handle whose `restore_original_limits()` undoes it.
    """
    return ThreadpoolController().select(internal_api="openblas").limit(limits=1)


def packed(value: Any) -> bytes:
    """In one piece, for the way between actors and learner."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpacked(value: Any) -> Any:
    """What was sent, packed or not."""
    return pickle.loads(value) if isinstance(value, bytes) else value


def or_raise(answer: T | Fault) -> T:
    """`answer`, or the exception that it tells of."""
    if isinstance(answer, Fault):
        raise answer.as_error()
    return answer
