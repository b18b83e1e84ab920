"""The messages between dppo and a solver: docs/SOLVERS.md describes them. client.py and dppo.h are the other side."""

import math
import re
import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dppo.remote.client import VERSION
from dppo.slots.program import SolverError

MAGIC = b"DPPO"
MAX_TEXT = 2**20  # bytes of an opening
OPENING = "4sII"  # magic, version, bytes of the text
STATE = "IId"  # end, number of infos, reward
REPLY = "IIQ"  # kind, bytes that follow, seed
INFO = "32sd"  # name, number
PART = re.compile(
    r"(?P<name>[A-Za-z_][\w.-]*)(?:\[(?P<shape>[\d,]+)\])?(?:\((?P<bounds>[^()]*)\))?"
)
EXAMPLE = "`temperature[64]`, `jets[2](-1:1)`"


class Part(NamedTuple):
    """A named part of observations or actions."""

    name: str
    shape: tuple[int, ...]
    low: float
    high: float

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Opening:
    """Declaration of a solver when it connects."""

    byte_order: str
    """`<` or `>`, the same in all messages."""
    dtype: np.dtype
    """Dtype of observations and actions."""
    observation: tuple[Part, ...]
    action: tuple[Part, ...]
    restarts: bool = False
    """The solver writes and reads restart files."""


def byte_order_of(header: bytes) -> str:
    """Return the byte order of an opening's header; raise SolverError if it is not one of this version."""
    if header[:4] not in (MAGIC, MAGIC[::-1]):
        raise SolverError("is not a solver with dppo.h: its first bytes are " + repr(header[:4]))
    byte_order = "<" if struct.unpack("<I", header[4:8])[0] < 2**16 else ">"
    version = struct.unpack(f"{byte_order}I", header[4:8])[0]
    if version != VERSION:
        raise SolverError(
            f"speaks version {version} of the protocol, and this dppo speaks {VERSION}. Compile it with the dppo.h "
            f"that `python -m dppo.remote` names"
        )
    return byte_order


def opening_of(byte_order: str, text: bytes) -> tuple[str, Opening]:
    """Return secret and declarations of an opening; raise SolverError if a line is missing or wrong."""
    lines = dict(line.partition("=")[::2] for line in text.decode("utf-8", "replace").splitlines())
    missing = [name for name in ("secret", "bytes", "observation", "action") if name not in lines]
    if missing:
        raise SolverError(f"left out {missing[0]}= in its opening")
    if lines["bytes"] not in ("4", "8"):
        raise SolverError(f"has numbers of {lines['bytes']} bytes, and only 4 and 8 are known")
    dtype = np.dtype(f"{byte_order}f{lines['bytes']}")
    observation = parts_of(lines["observation"])
    action = parts_of(lines["action"])
    for part in action:
        if not (math.isfinite(part.low) and math.isfinite(part.high)):
            raise SolverError(
                f"gives its action {part.name} no bounds. Write them behind it, such as {part.name}(-1:1)"
            )
    restarts = lines.get("restart") == "1"
    return lines["secret"], Opening(byte_order, dtype, observation, action, restarts)


def parts_of(text: str) -> tuple[Part, ...]:
    """Return the parts of a text such as `temperature[64] jets[2](-1:1)`; raise SolverError if it is not one."""
    parts = []
    for word in text.split():
        match = PART.fullmatch(word)
        if match is None:
            raise SolverError(f"declares {word!r}. A part is written as {EXAMPLE}")
        shape = tuple(int(length) for length in (match["shape"] or "").split(",") if length)
        if 0 in shape:
            raise SolverError(f"declares {word!r}, which holds no number")
        low, high = _bounds(word, match["bounds"])
        parts.append(Part(match["name"], shape, low, high))
    names = [part.name for part in parts]
    if not parts or len(set(names)) < len(names):
        raise SolverError(
            f"declares {text!r}. It needs parts of different names, written as {EXAMPLE}"
        )
    return tuple(parts)


def _bounds(word: str, text: str | None) -> tuple[float, float]:
    if text is None:
        return -math.inf, math.inf
    low, _, high = text.partition(":")
    try:
        bounds = float(low), float(high)
    except ValueError:
        raise SolverError(f"declares {word!r}. Bounds are written as (low:high)") from None
    if not bounds[0] < bounds[1]:
        raise SolverError(f"declares {word!r}, whose lower bound is not below the upper one")
    return bounds


def answer_message(byte_order: str, refusal: str = "") -> bytes:
    """Encode the answer to an opening: accepted, or refused for a reason."""
    reason = refusal.encode()
    # dppo.h compares the magic as a number in its byte order, which reads as DPPO in little-endian order
    magic = MAGIC if byte_order == "<" else MAGIC[::-1]
    return struct.pack(f"{byte_order}{OPENING}", magic, VERSION, len(reason)) + reason
