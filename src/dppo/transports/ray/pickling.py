"""Pickle what processes of a run send to each other: plans, networks, questions, answers and errors.

Small arrays are pickled in one piece, which is faster than Ray's handling of each array. Messages are exchanged only
between processes of one run; nothing read from a file is unpickled.
"""

import os
import pickle
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dppo.engine.messages import Recycled
from dppo.errors import (
    ClusterError,
    ConfigError,
    ControllerFault,
    DppoError,
    EnvironmentFault,
    OutOfMemory,
    TrainingDiverged,
)
from dppo.ppo.exchange.questions import Answer
from dppo.user_code import in_a_line

# bytes of weights or observations up to which a message is faster than a reference
SMALL = 128 * 1024

Model = str | Callable[..., Any] | None
PackedModel = tuple[tuple[str, ...], bytes | None, tuple[str, ...]]
"""The folders from which the sending process imports, the pickled network, and the words of its command line."""
# a variable of processes whose current folder has the files that were sent
UPLOADED = "DPPO_UPLOADED"
NO_MODEL: PackedModel = ((), None, ())


def pack(value: Any) -> bytes:
    """Pickle `value`."""
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def pack_code(value: Any) -> bytes:
    """Pickle `value`; classes and functions of the main program are pickled by value, not by name."""
    from ray import cloudpickle  # here, because processes without Ray import this module too

    return bytes(cloudpickle.dumps(value))


def unpack(data: Any) -> Any:
    """Reverse `pack` or `pack_code`; return what is not packed unchanged."""
    if isinstance(data, bytes):
        return pickle.loads(data)
    return data


def packed_model(model: Any, label: str = "") -> PackedModel:
    """Return a user's object, such as a network, ready to send; raise ConfigError with `label` if it cannot be pickled.

    It is sent beside the plan, so that an error can name it.
    """
    try:
        return tuple(path for path in sys.path if path), pack_code(model), tuple(sys.argv)
    except Exception as error:  # pickling a user's class may raise anything
        fact = f"cannot be sent to other processes: {error}"
        if label:
            raise ConfigError(f"{label}: {fact}. Use plain data.") from None
        raise ConfigError(f"model={model!r}: {fact}. Pass it as module:Class.") from None


def unpacked_model(packed: PackedModel) -> Model:
    """Reverse `packed_model`, importing from the sender's folders, too; `ConfigError` if a module is missing.

    A module that reads the command line as it is imported gets the sender's command line, not Ray's.
    """
    paths, pickled, words = packed
    sys.path += [path for path in paths if path not in sys.path]
    # before a folder of the sender that a node has, too
    if os.environ.get(UPLOADED) and sys.path[0] != os.getcwd():
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


def encode_answer(answer: Answer | DppoError, *, by_reference: bool) -> bytes | list[Any]:
    """Return an answer ready to send; segments follow the reports if they are large, or sent `by_reference`.

    Ray shares them between the processes of a node without copying. Reports are always pickled, so that a kept report
    does not pin a segment.
    """
    if isinstance(answer, DppoError) or not (
        by_reference or any(segment.obs.nbytes > SMALL for _, segment in answer.results)
    ):
        return pack(answer)
    reports = tuple((report, None) for report, _ in answer.results)
    return [pack(replace(answer, results=reports)), *(segment for _, segment in answer.results)]


def decode_answer(message: bytes | list[Any]) -> Answer | DppoError:
    """Reverse `encode_answer`; segments may be references."""
    head, *segments = message if isinstance(message, list) else [message]
    answer: Answer | DppoError = unpack(head)
    if isinstance(answer, DppoError) or not segments:
        return answer
    results = tuple(
        (report, segment) for (report, _), segment in zip(answer.results, segments, strict=True)
    )
    return replace(answer, results=results)


def sendable(error: DppoError) -> DppoError:
    """Return one of our own exceptions for `error`, so that no user-defined class has to be unpickled."""
    for fault in (EnvironmentFault, ControllerFault):
        if isinstance(error, fault):
            return fault(*error.args)
    for kind in (TrainingDiverged, OutOfMemory, Recycled, ClusterError):
        if isinstance(error, kind):
            return kind(str(error))
    return ConfigError(str(error))
