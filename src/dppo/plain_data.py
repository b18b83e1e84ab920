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
from pathlib import Path
from typing import Any, Literal

import numpy as np

PLAIN = "None, bool, int, float, str, bytes, list, tuple, deque, dict, NumPy arrays and numbers"
DTYPE = re.compile(r"[<>|][biufcSmM]\d{1,9}(\[\w{1,9}\])?")  # those whose bytes may be anything
SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple", deque: "deque"}
LENGTH = 8  # bytes


class NotPlain(TypeError):
    """A value that is not plain data; the message names its place and type."""


def packed(value: Any, name_of: Callable[[Path], str] | None = None) -> bytes:
    """Return plain data as bytes, which are equal for equal data; raise `NotPlain` if it is something else.

    `name_of`: returns the text that is stored in place of a path; None: paths are no plain data.
    """
    blobs: list[bytes] = []
    try:
        tree = json.dumps(_tree(value, "", blobs, name_of)).encode()
    except (RecursionError, ValueError) as error:
        # it contains itself; an integer of thousands of digits
        raise NotPlain(f"cannot be stored ({error})") from None
    return b"".join([len(tree).to_bytes(LENGTH, "little"), tree, *blobs])


def unpacked(data: bytes, path_of: Callable[[str], Path] | None = None) -> Any:
    """Reverse `packed`; raise ValueError if `data` is something else. Runs no code.

    `path_of`: returns the path for a text that is stored in place of one.
    """
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
        return _value(json.loads(data[LENGTH:end]), take, path_of)
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        MemoryError,
    ) as error:
        raise ValueError(f"not packed plain data ({error})") from None


def _tree(value: Any, place: str, blobs: list[bytes], name_of: Callable[[Path], str] | None) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is dict:
        tree: list[Any] = ["dict"]
        for key, item in value.items():
            tree.append(_tree(key, place, blobs, name_of))
            tree.append(_tree(item, f"{place}[{key!r}]", blobs, name_of))
        return tree
    if kind in SEQUENCES:
        tree = [SEQUENCES[kind]]
        if kind is deque:
            tree.append(value.maxlen)
        for index, item in enumerate(value):
            tree.append(_tree(item, f"{place}[{index}]", blobs, name_of))
        return tree
    return _leaf(value, place, blobs, name_of)


def _leaf(
    value: Any, place: str, blobs: list[bytes], name_of: Callable[[Path], str] | None
) -> list[Any]:
    kind = type(value)
    if kind is bytes:
        blobs.append(value)
        return ["bytes", len(value)]
    if name_of is not None and isinstance(value, Path):
        return ["path", name_of(value)]
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


def _value(
    tree: Any, take: Callable[[int], memoryview], path_of: Callable[[str], Path] | None
) -> Any:
    """Return the value of what `_tree` returned; `take` returns the next bytes of its blobs."""
    if not isinstance(tree, list):
        return tree
    kind, *items = tree
    if kind == "bytes":
        return bytes(take(items[0]))
    if kind == "path" and path_of is not None:
        return path_of(str(items[0]))
    if kind in ("array", "number"):
        array = _array(take, *items)
        return array if kind == "array" else array[()]  # a NumPy scalar
    if kind == "deque":
        max_length, *items = items
        return deque((_value(item, take, path_of) for item in items), max_length)
    values = [_value(item, take, path_of) for item in items]
    containers: dict[str, Callable[[list[Any]], Any]] = {
        "list": list,
        "tuple": tuple,
        "dict": _dict_of,
    }
    return containers[kind](values)


def _dict_of(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))


def _array(
    take: Callable[[int], memoryview], text: str, order: Literal["C", "F"], *shape: int
) -> np.ndarray:
    if not DTYPE.fullmatch(text) or min(shape, default=0) < 0:
        raise ValueError(f"an array of dtype {text} and shape {shape}")
    dtype = np.dtype(text)
    data = bytes(take(math.prod(shape) * dtype.itemsize))
    return np.ndarray(shape, dtype, data, order=order).copy(order)
