"""Plain data as bytes, for states of environments: in checkpoints, where nothing that is read may run code.

    length of the tree, 8 bytes | the tree, as JSON | the bytes of all arrays and byte strings, one after the other

In the tree, a list stands for a container, an array or a byte string, and begins with its kind.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

PLAIN = "None, bool, int, float, str, bytes, list, tuple, deque, dict, NumPy arrays and numbers"
DTYPE = re.compile(r"[<>|][biufcSmM]\d{1,9}(\[\w{1,9}\])?")  # those whose bytes may be anything
SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", deque: "deque"}
LENGTH = 8  # bytes


class NotPlain(TypeError):
    """A value that is not plain data; the message names its place and type."""


def packed(value: Any) -> bytes:
    """Return plain data as bytes, which are equal for equal data; raise `NotPlain` if it is something else."""
    blobs: list[bytes] = []
    try:
        tree = json.dumps(_tree(value, "", blobs)).encode()
    except (
        RecursionError,
        ValueError,
    ) as error:  # it contains itself; an integer of thousands of digits
        raise NotPlain(f"cannot be stored ({error})") from None
    return b"".join([len(tree).to_bytes(LENGTH, "little"), tree, *blobs])


def unpacked(data: bytes) -> Any:
    """Reverse `packed`; raise ValueError if `data` is something else. Runs no code."""
    end = LENGTH + int.from_bytes(data[:LENGTH], "little")
    blobs = memoryview(data)[end:]

    def take(count: int) -> memoryview:
        nonlocal blobs
        if not 0 <= count <= len(blobs):
            raise ValueError(f"{count} bytes of {len(blobs)}")
        blob = blobs[:count]
        blobs = blobs[count:]
        return blob

    try:
        return _value(json.loads(data[LENGTH:end]), take)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        MemoryError,
    ) as error:
        raise ValueError(f"not packed plain data ({error})") from None


def _tree(value: Any, place: str, blobs: list[bytes]) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is dict:
        tree: list[Any] = ["dict"]
        for key, item in value.items():
            tree.append(_tree(key, place, blobs))
            tree.append(_tree(item, f"{place}[{key!r}]", blobs))
        return tree
    if kind in SEQUENCES:
        tree = [SEQUENCES[kind]]
        if kind is deque:
            tree.append(value.maxlen)
        for index, item in enumerate(value):
            tree.append(_tree(item, f"{place}[{index}]", blobs))
        return tree
    if kind is bytes:
        blobs.append(value)
        return ["bytes", len(value)]
    where = f" at {place}" if place else ""
    if kind is np.ndarray or isinstance(value, np.generic):
        array = np.asarray(value)
        if not DTYPE.fullmatch(array.dtype.str):
            raise NotPlain(f"holds an array of dtype {array.dtype}{where}")
        # a sum over it may depend on that
        order: Literal["C", "F"] = "F" if array.flags.fnc else "C"
        blobs.append(array.tobytes(order))
        name = "array" if kind is np.ndarray else "number"
        return [name, array.dtype.str, order, *array.shape]
    hint = ": return its bit_generator.state" if kind is np.random.Generator else ""
    raise NotPlain(f"holds a {kind.__module__}.{kind.__qualname__}{where}{hint}")


def _value(tree: Any, take: Callable[[int], memoryview]) -> Any:
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "bytes":
        return bytes(take(items[0]))
    if kind in ("array", "number"):
        text, order, *shape = items
        if not DTYPE.fullmatch(text) or min(shape, default=0) < 0:
            raise ValueError(f"an array of dtype {text} and shape {shape}")
        dtype = np.dtype(text)
        data = bytes(take(math.prod(shape) * dtype.itemsize))
        array = np.ndarray(shape, dtype, data, order=order).copy(order)
        return array if kind == "array" else array[()]
    if kind == "deque":
        max_length, *items = items
        return deque((_value(item, take) for item in items), max_length)
    values = [_value(item, take) for item in items]
    if kind == "dict":
        return dict(zip(values[::2], values[1::2], strict=True))
    return {"list": list, "tuple": tuple}[kind](values)
