"""Encoding of the messages between the learner and its actors.

Small arrays are pickled in one piece, which is faster than Ray's handling of each array. Messages are exchanged only
between processes of one run; nothing read from a file is unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dppo.cluster.faults import Fault
from dppo.ppo.exchange.records import PolicySnapshot, Segment, SegmentReport, SegmentRequest, Timings
from dppo.spaces.spaces import Spaces

SMALL = 128 * 1024  # bytes of weights or observations up to which a message is faster than a reference


@dataclass(frozen=True, slots=True)
class Question:
    """All segments requested from an actor at once."""

    requests: tuple[SegmentRequest, ...]
    hosted: tuple[int, ...]
    """All samplers that the actor hosts now."""
    spaces: Spaces | None = None
    """Those that every sampler must have; None if none is built for this question."""


@dataclass(frozen=True, slots=True)
class Answer:
    """All segments that an actor collected for one question."""

    made: tuple[tuple[SegmentReport, Any], ...]
    """A report and a `Segment` for each request, in the order of the question; a reference in place of the segment if
    the arrays stay with Ray."""
    timings: Timings


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message with separate large arrays, which Ray shares between the processes of a node without copying."""

    head: bytes
    segments: tuple[Segment, ...]


def pack(value: Any) -> bytes:
    """Pickle `value`."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def pack_code(value: Any) -> bytes:
    """Pickle `value`; classes and functions of the main program are pickled by value, not by name."""
    from ray import cloudpickle  # here, because processes without Ray import this module too

    data: bytes = cloudpickle.dumps(value)
    return data


def unpack(data: bytes) -> Any:
    """Reverse `pack` or `pack_code`."""
    return pickle.loads(data)


def encode_policy(policy: PolicySnapshot) -> bytes | PolicySnapshot:
    """Return the message for all actors: pickled if the weights are small, else the policy for the object store."""
    return pack(policy) if policy.weights.nbytes <= SMALL else policy


def decode_policy(message: bytes | PolicySnapshot) -> PolicySnapshot:
    """Return the policy in `message`."""
    policy = message if isinstance(message, PolicySnapshot) else unpack(message)
    assert isinstance(policy, PolicySnapshot)
    return policy


def encode_answer(answer: Answer | Fault) -> bytes | Parcel:
    """Return an answer ready to send; reports are always pickled, so that a kept report does not pin a segment."""
    if isinstance(answer, Fault) or all(segment.obs.nbytes <= SMALL for _, segment in answer.made):
        return pack(answer)
    return Parcel(*take_apart(answer))


def take_apart(answer: Answer) -> tuple[bytes, tuple[Any, ...]]:
    """Return the pickled reports, and the segments to send separately."""
    reports = tuple((report, None) for report, _ in answer.made)
    return pack(replace(answer, made=reports)), tuple(segment for _, segment in answer.made)


def put_together(head: bytes, segments: Sequence[Any]) -> Answer | Fault:
    """Reverse `take_apart`; segments may be references."""
    answer = unpack(head)
    if isinstance(answer, Fault):
        return answer
    assert isinstance(answer, Answer)
    made = tuple((report, segment) for (report, _), segment in zip(answer.made, segments, strict=True))
    return replace(answer, made=made)


def decode_answer(message: bytes | Parcel) -> Answer | Fault:
    """Return the answer in `message`."""
    if isinstance(message, Parcel):
        return put_together(message.head, message.segments)
    answer = unpack(message)
    assert isinstance(answer, Answer | Fault)
    return answer
