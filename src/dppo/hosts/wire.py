"""Messages between the processes of a run: plans, questions, answers and failures; and the meaning of Ray's errors.

Small arrays are pickled in one piece, which is faster than Ray's handling of each array. Messages are exchanged only
between processes of one run; nothing read from a file is unpickled.
"""

import math
import os
import pickle
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from dppo.config import Config
from dppo.config.parts import PPO, Env, Learners, Network, ResolvedPPO, Sampling, Sizes
from dppo.errors import ClusterError, ConfigError, DppoError, EnvironmentFault, OutOfMemory, TrainingDiverged
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Rebuild, SegmentReport, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces
from dppo.transports.ray.calls import RayThread
from dppo.user_code import in_a_line

SMALL = 128 * 1024  # bytes of weights or observations up to which a message is faster than a reference
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
FETCH_TIMEOUT_S = 120.0  # to transfer a finished result over the network
UNREACHABLE = "cannot be reached: its connection to this process was lost"
UNKNOWN = "died: its process crashed, exited or was killed (out of memory?)"

Model = str | Callable[..., Any] | None
PackedModel = tuple[tuple[str, ...], bytes | None, tuple[str, ...]]
"""The folders from which the sending process imports, the pickled network, and the words of its command line."""
UPLOADED = "DPPO_UPLOADED"  # a variable of processes whose current folder has the files that were sent
NO_MODEL: PackedModel = ((), None, ())


# ------------------------------------------------------------------ plans


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """Settings from which a sampler is built: plain parts, so that an actor imports neither pydantic nor torch."""

    env: Env
    sampling: Sampling
    ppo: PPO
    network: Network
    sizes: Sizes
    seed: int
    recycling: tuple[float, float] = (math.inf, math.inf)  # bytes and segments after which an actor is replaced


@dataclass(frozen=True, slots=True)
class TrainerPlan:
    """Settings from which a trainer or rank is built; without the environment, whose module it need not import."""

    ppo: ResolvedPPO
    network: Network
    learners: Learners
    sizes: Sizes
    seed: int


def sampler_plan(config: Config) -> SamplerPlan:
    """Return the parts of `config` that samplers are built from."""
    sampling = config.sampling
    if sampling.licences is not None:  # those of evaluations are set aside
        sampling = replace(sampling, licences=sampling.licences - config.evaluators)
    parts = config.env, sampling, config.ppo, config.network, config.sizes, config.seed
    return SamplerPlan(*parts, config.actors.recycling)


def trainer_plan(config: Config) -> TrainerPlan:
    """Return the parts of `config`, which must be resolved, that trainers are built from."""
    ppo = ResolvedPPO(**vars(config.ppo))
    return TrainerPlan(ppo, config.network, config.learners, config.sizes, config.seed)


# ------------------------------------------------------------------ messages


@dataclass(frozen=True, slots=True)
class Question:
    """All segments requested from an actor at once."""

    index: int  # of the segments; -1 in a question for spaces
    samplers: tuple[int, ...]
    hosted: tuple[int, ...]  # all samplers that the actor hosts now
    version: int = 0  # of the policy that comes with it
    rebuilds: dict[int, Rebuild] = field(default_factory=dict)  # for samplers that are rebuilt first
    spaces: Spaces | None = None  # those that every sampler must have; None if none is built for this question
    expected: Expected | None = None  # the numerics of the run; None as for `spaces`

    @property
    def requests(self) -> tuple[SegmentRequest, ...]:
        """The request for each segment."""
        return tuple(SegmentRequest(one, self.index, self.rebuilds.get(one)) for one in self.samplers)


@dataclass(frozen=True, slots=True)
class Answer:
    """All segments that an actor collected for one question."""

    made: tuple[tuple[SegmentReport, Any], ...]
    """A report and a `Segment` for each request, in the order of the question; a reference in place of the segment if
    the arrays stay with Ray."""
    timings: Timings
    used: float | None = None
    """With threads: the share of a CPU that the process used while all samplers worked side by side."""

    def mismatch(self, question: Question) -> str:
        """Return how this differs from what was asked for, "" if it does not."""
        asked = [(sampler, question.index, question.version) for sampler in question.samplers]
        got = [(report.sampler_id, report.index, report.policy_version) for report, _ in self.made]
        if got == asked:
            return ""
        return f"sent the wrong segments: {got} instead of {asked} (sampler, segment, policy version)"


# ------------------------------------------------------------------ encoding


def pack(value: Any) -> bytes:
    """Pickle `value`."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def pack_code(value: Any) -> bytes:
    """Pickle `value`; classes and functions of the main program are pickled by value, not by name."""
    from ray import cloudpickle  # here, because processes without Ray import this module too

    return bytes(cloudpickle.dumps(value))


def unpack(data: Any) -> Any:
    """Reverse `pack` or `pack_code`; return what is not packed unchanged."""
    return pickle.loads(data) if isinstance(data, bytes) else data


def packed_model(model: Any, named: str = "") -> PackedModel:
    """Return a user's network, or something `named` so, ready to send; `ConfigError` if it cannot be pickled.

    It is sent beside the plan, so that an error can name it.
    """
    try:
        return tuple(path for path in sys.path if path), pack_code(model), tuple(sys.argv)
    except Exception as error:  # pickling a user's class may raise anything
        what, use = (named, "Use plain data") if named else (f"model={model!r}", "Pass it as module:Class")
        raise ConfigError(f"{what}: cannot be sent to other processes: {error}. {use}.") from None


def unpacked_model(packed: PackedModel) -> Model:
    """Reverse `packed_model`, importing from the sender's folders, too; `ConfigError` if a module is missing.

    A module that reads the command line as it is imported gets that of the sender, not Ray's.
    """
    paths, pickled, words = packed
    sys.path += [path for path in paths if path not in sys.path]
    if os.environ.get(UPLOADED) and sys.path[0] != os.getcwd():  # before a folder of the sender that a node has, too
        sys.path.insert(0, os.getcwd())
    if words:
        sys.argv = [*words]
    try:
        model: Model = unpack(pickled)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        raise ConfigError(
            f"model: cannot be loaded on node {socket.gethostname()}: {in_a_line(error)}. It must be importable on "
            f"every node."
        ) from None
    return model


def encode_answer(answer: Answer | DppoError, *, apart: bool = False) -> bytes | list[Any]:
    """Return an answer ready to send; large segments, or with `apart` all, follow the reports.

    Ray shares them between the processes of a node without copying. Reports are always pickled, so that a kept report
    does not pin a segment.
    """
    if isinstance(answer, DppoError) or not (apart or any(segment.obs.nbytes > SMALL for _, segment in answer.made)):
        return pack(answer)
    reports = tuple((report, None) for report, _ in answer.made)
    return [pack(replace(answer, made=reports)), *(segment for _, segment in answer.made)]


def decode_answer(message: bytes | list[Any]) -> Answer | DppoError:
    """Reverse `encode_answer`; segments may be references."""
    head, *segments = message if isinstance(message, list) else [message]
    answer: Answer | DppoError = unpack(head)
    if isinstance(answer, DppoError) or not segments:
        return answer
    made = tuple((report, segment) for (report, _), segment in zip(answer.made, segments, strict=True))
    return replace(answer, made=made)


# ------------------------------------------------------------------ failures


class Recycled(ClusterError):
    """An actor is to be replaced before it makes the next segment: see the setting recycle_after."""


def sendable(error: DppoError) -> DppoError:
    """Return one of our own exceptions for `error`, so that no user-defined class has to be unpickled."""
    if isinstance(error, EnvironmentFault):
        return EnvironmentFault(*error.args)
    own = next(
        (kind for kind in (TrainingDiverged, OutOfMemory, Recycled, ClusterError) if isinstance(error, kind)),
        ConfigError,
    )
    return own(str(error))


def delay_before(replacement: int) -> float:
    """Return the seconds to wait before the 1st, 2nd ... replacement of a process in a row: 0, 1, 2, 4 ... 30."""
    return 0.0 if replacement == 1 else min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** (replacement - 2))


def within(timeout_s: float, call: Callable[[], object]) -> None:
    """Run a call of Ray's that has no timeout of its own, in a thread; return when it ends or time is up.

    Killing an actor that was never registered and removing a placement group wait without limit if the GCS is gone.
    """
    thread = RayThread(call, "dppo-call")
    thread.start()
    thread.join(timeout_s)


# ------------------------------------------------------------------ errors of Ray


def cause(error: Exception) -> str:
    """Return in one line why a call to another process failed, to follow its name: "died: ..."."""
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

    if isinstance(error, GetTimeoutError):
        return "did not start or answer in time"
    if isinstance(error, TimeoutError):
        return str(error)
    verb = "failed" if isinstance(error, RayTaskError) else "died" if isinstance(error, RayActorError) else "is lost"
    return f"{verb}: {last_line(error)}"


def cause_of_death(error: Exception) -> str:
    """Return in one line why a process died: the last line of `error` about a worker, a node or an exit."""
    lines = _lines(error)
    if type(error).__name__ == "ActorUnavailableError":
        return UNREACHABLE
    if any("low on memory" in line or "OutOfMemory" in line for line in lines):
        return "died: killed because its node ran out of memory. Use fewer actors there, or set recycle_after"
    if any("Worker unexpectedly exits with a connection error" in line for line in lines):
        return UNKNOWN  # as Ray guesses, in a paragraph
    clues = [line for line in lines if any(word in line.lower() for word in ("worker", "node", "exit"))]
    return f"died: {(clues or lines)[-1][:300]}"


def last_line(error: Exception) -> str:
    """Return the last line of an error of Ray, which names the original exception."""
    return _lines(error)[-1][:300]


def incurable(error: Exception) -> ClusterError | None:
    """Return the error that ends the run if a new process would fail in the same way; else None."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError):
        return ClusterError(f"An actor failed in dppo itself; please report this.\n{error}")
    if getattr(error, "actor_init_failed", False) or "failed to import" in str(error):
        return ClusterError(f"An actor could not be created: {_lines(error)[-1]}. Install the same dppo on every node.")
    return None


def _lines(error: Exception) -> list[str]:
    return [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
