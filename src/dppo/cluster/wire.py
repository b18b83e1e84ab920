"""Encoding of the messages between the learner and its actors.

Small arrays are pickled in one piece, which is faster than Ray's handling of each array. Messages are exchanged only
between processes of one run; nothing read from a file is unpickled.
"""

import pickle
from dataclasses import dataclass, field, replace
from typing import Any

from dppo.cluster.faults import Fault
from dppo.numerics.fingerprint import Expected
from dppo.ppo.exchange.records import Rebuild, SegmentReport, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces

SMALL = 128 * 1024  # bytes of weights or observations up to which a message is faster than a reference


@dataclass(frozen=True, slots=True)
class Question:
    """All segments requested from an actor at once."""

    index: int
    """Of the segments; -1 in a question for spaces."""
    samplers: tuple[int, ...]
    hosted: tuple[int, ...]
    """All samplers that the actor hosts now."""
    version: int = 0
    """Of the policy that comes with it."""
    rebuilds: dict[int, Rebuild] = field(default_factory=dict)
    """For samplers that are rebuilt first."""
    spaces: Spaces | None = None
    """Those that every sampler must have; None if none is built for this question."""
    expected: Expected | None = None
    """The numerics of the run; None as for `spaces`."""

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


def encode_answer(answer: Answer | Fault) -> bytes | list[Any]:
    """Return an answer ready to send; large segments are taken apart."""
    if isinstance(answer, Fault) or all(segment.obs.nbytes <= SMALL for _, segment in answer.made):
        return pack(answer)
    return take_apart(answer)


def take_apart(answer: Answer) -> list[Any]:
    """Return the pickled reports, then each segment, which Ray shares between the processes of a node without copying.

    Reports are always pickled, so that a kept report does not pin a segment.
    """
    reports = tuple((report, None) for report, _ in answer.made)
    return [pack(replace(answer, made=reports)), *(segment for _, segment in answer.made)]


def decode_answer(message: bytes | list[Any]) -> Answer | Fault:
    """Reverse `encode_answer` or `take_apart`; segments may be references."""
    head, *segments = message if isinstance(message, list) else [message]
    answer: Answer | Fault = unpack(head)
    if isinstance(answer, Fault) or not segments:
        return answer
    made = tuple((report, segment) for (report, _), segment in zip(answer.made, segments, strict=True))
    return replace(answer, made=made)
