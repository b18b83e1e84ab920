"""Check observations and convert them to elements of a NumPy dtype, in which they are stored."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import numpy as np

from dppo.envs.checks.faults import BadResult
from dppo.spaces.spaces import joined, parts_of

LARGEST = np.finfo(np.float32).max  # observations are stored as float32
Pack = Callable[[Any], np.ndarray]


def leaf_named(name: str, whole: str = "an observation") -> str:
    """Return how messages call a leaf of observations, or all of it."""
    return f"observation leaf {name!r}" if name else whole


def packer(obs: np.dtype[Any], *, one_of: Collection[str] = (), dropped: Collection[str] = (), name: str = "") -> Pack:
    """Return a function that copies a returned observation, or a leaf of this `name`, into a new array, and checks it.

    For a Box, the array [*O] keeps the environment's own dtype, which checksums depend on. For a Dict or Tuple it is
    one packed element of shape (). The function raises BadResult if the shape or the kind of number is not that of
    the space, a number is not finite or does not fit into the dtype, or a leaf is missing. `one_of` and `dropped` are
    those of `Spaces`.
    """
    what, inside = leaf_named(name), joined(name, "")
    if obs.names is None:
        return leaf_packer(obs.base, obs.shape, what)
    packers = {part: packer(obs[part], one_of=one_of, dropped=dropped, name=joined(name, part)) for part in obs.names}
    unread = {one.removeprefix(inside) for one in dropped if one.startswith(inside)}
    parts = partial(_branch, what, packers) if name in one_of else partial(_parts, what, packers.keys(), unread)

    def pack(returned: Any) -> np.ndarray:
        row = np.zeros((), obs)  # a OneOf has one of its branches
        for part, value in parts(returned):
            row[part] = packers[part](value)
        return row

    return pack


def _parts(what: str, expected: Collection[str], unread: Collection[str], returned: Any) -> list[tuple[str, Any]]:
    """Return names and values of the parts of a Dict or Tuple that was returned."""
    if not isinstance(returned, Mapping | tuple | list):
        kind = type(returned).__name__
        raise BadResult(f"{what} of type {kind} instead of one with the parts {', '.join(expected)}")
    found = dict(parts_of(tuple(returned) if isinstance(returned, list) else returned) or ())
    for key in sorted(found.keys() ^ expected):
        if key not in unread:
            raise BadResult(f"{what} {'without' if key in expected else 'with the unexpected'} part {key!r}")
    return [(part, found[part]) for part in expected]


def _branch(what: str, packers: Mapping[str, Pack], returned: Any) -> list[tuple[str, Any]]:
    """Return the number of the branch of a OneOf that was returned, and its value, with their names."""
    if not (isinstance(returned, tuple | list) and len(returned) == 2):
        raise BadResult(f"{what} of type {type(returned).__name__} instead of (branch, value)")
    branch, branches = str(int(packers["branch"](returned[0]))), [part for part in packers if part != "branch"]
    if branch not in branches:
        raise BadResult(f"{what} of branch {branch} instead of one of {', '.join(branches)}")
    return [("branch", returned[0]), (branch, returned[1])]


def leaf_packer(dtype: np.dtype[Any], shape: tuple[int, ...], what: str = "an observation") -> Pack:
    """Return a function that copies and checks one leaf, with a short cut for arrays; `what` names it in errors."""
    shared = np.dtype(dtype.type)  # the object that arrays of this dtype share
    array, zeros = np.ndarray, np.zeros(shape, shared) if dtype.kind == "f" else None

    def pack(returned: Any) -> np.ndarray:
        if type(returned) is array and returned.dtype is shared and returned.shape == shape:
            copied = returned.copy()
            if zeros is None or not np.vdot(copied, zeros):  # 0 for finite numbers, NaN for all others
                return copied
        return _checked(returned, dtype, shape, what)

    return pack


def _checked(returned: Any, dtype: np.dtype[Any], shape: tuple[int, ...], what: str) -> np.ndarray:
    try:
        array = np.array(returned)  # a copy, because the environment may reuse its own
    except Exception as error:  # ragged, or not convertible, as a tensor on a GPU
        raise BadResult(f"{what} that is not an array ({error})") from None
    if array.shape != shape:
        raise BadResult(f"{what} of shape {array.shape} instead of {shape}")
    if not np.can_cast(array.dtype, dtype, "same_kind"):
        raise BadResult(f"{what} of dtype {array.dtype} instead of {dtype}")
    if dtype.kind in "iu" and array.dtype != dtype:  # one that is out of range would wrap around
        limits = np.iinfo(dtype)
        for extreme in int(array.min()), int(array.max()):
            if not limits.min <= extreme <= limits.max:
                index = int(np.flatnonzero(array == extreme)[0])
                of = f"{dtype} from {limits.min} to {limits.max}"
                raise BadResult(f"{what} that is {extreme} at index {index}, outside {of}")
    if array.dtype.kind == "f":
        flat = array.ravel()
        # Ten times as fast as isfinite for few numbers; only a large sum of squares needs a look at each.
        if not flat.dot(flat) <= LARGEST:
            wrong = np.flatnonzero(~(np.abs(flat) <= LARGEST))
            if len(wrong):
                raise BadResult(f"{what} that is {flat[wrong[0]]} at index {int(wrong[0])}")
    return array
