"""Messages between the learner and its actors, in the fewest pieces: Ray takes longer over many small arrays
than pickle does over all of them.

Only processes of one run talk to each other here; nothing that was read from a file is unpickled.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dppo.cluster.faults import Fault
from dppo.ppo.segment import PolicySnapshot, Segment, SegmentReport, SegmentRequest, Timings
from dppo.spaces import Spaces

SMALL = 128 * 1024  # bytes of weights, or of observations, that travel faster inside a message than by reference


@dataclass(frozen=True, slots=True)
class Question:
    """All that an actor is asked for in one round."""

    requests: tuple[SegmentRequest, ...]
    hosted: tuple[int, ...]
    """All samplers that are the actor's at present."""
    spaces: Spaces | None = None
    """Those that every sampler must have; None where none is built for this question."""


@dataclass(frozen=True, slots=True)
class Answer:
    """All that an actor made in one round."""

    made: tuple[tuple[SegmentReport, Any], ...]
    """A report and a `Segment` for each request, in the order of the question; or in place of the segment a reference
    to it, where the arrays stay with Ray."""
    timings: Timings
    """Of the whole answer."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A message with large arrays beside it, which Ray shares between the processes of a node without copying."""

    head: bytes
    segments: tuple[Segment, ...]


def pack(value: Any) -> bytes:
    """Return `value` in one piece."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def pack_code(value: Any) -> bytes:
    """Return `value` in one piece; classes and functions of the main program travel whole, not by their names."""
    from ray import cloudpickle  # not in a process without Ray

    data: bytes = cloudpickle.dumps(value)
    return data


def unpack(data: bytes) -> Any:
    """Return the value that `pack` made `data` from."""
    return pickle.loads(data)


def encode_policy(policy: PolicySnapshot) -> bytes | PolicySnapshot:
    """Return what to send to every actor: small weights in one piece, large ones for Ray's object store."""
    return pack(policy) if policy.weights.nbytes <= SMALL else policy


def decode_policy(message: bytes | PolicySnapshot) -> PolicySnapshot:
    """Return the policy in `message`."""
    if isinstance(message, PolicySnapshot):
        return message
    policy = unpack(message)
    assert isinstance(policy, PolicySnapshot)
    return policy


def encode_question(question: Question) -> bytes:
    """Return a question in one piece."""
    return pack(question)


def decode_question(message: bytes) -> Question:
    """Return the question in `message`."""
    question = unpack(message)
    assert isinstance(question, Question)
    return question


def encode_answer(answer: Answer | Fault) -> bytes | Parcel:
    """Return an answer ready to send; reports are always packed, so that keeping one pins no segment."""
    if isinstance(answer, Fault) or all(segment.obs.nbytes <= SMALL for _, segment in answer.made):
        return pack(answer)
    return Parcel(*take_apart(answer))


def take_apart(answer: Answer) -> tuple[bytes, tuple[Any, ...]]:
    """Return the packed reports, and the segments, which may go another way."""
    reports = tuple((report, None) for report, _ in answer.made)
    return pack(replace(answer, made=reports)), tuple(segment for _, segment in answer.made)


def put_together(head: bytes, segments: Sequence[Any]) -> Answer | Fault:
    """Return the answer whose parts these are; segments may be references to them."""
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
