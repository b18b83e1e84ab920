"""Check observations and convert them to elements of a NumPy dtype, in which they are stored."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from dppo.envs.checks.faults import BadResult
from dppo.spaces.spaces import joined, parts_of

LARGEST = np.finfo(np.float32).max  # observations are stored as float32
Fill = Callable[[np.ndarray, Any], None]


def leaf_named(name: str, whole: str = "an observation") -> str:
    """Return how messages call a leaf of observations, or all of it."""
    return f"observation leaf {name!r}" if name else whole


def packer(
    obs: np.dtype[Any], *, one_of: Collection[str] = (), dropped: Collection[str] = ()
) -> Callable[[Any], np.ndarray]:
    """Return a function that copies a returned observation into a new array, and checks it.

    For a Box, the array [*O] keeps the environment's own dtype, which checksums depend on. For a Dict or Tuple it is
    one packed element of shape (). The function raises BadResult if the shape or the kind of number is not that of
    the space, a number is not finite or does not fit into the dtype, or a leaf is missing. `one_of` and `dropped` are
    those of `Spaces`.
    """
    if obs.names is None:
        return leaf_packer(obs.base, obs.shape)
    fill = _filler(obs, "", frozenset(one_of), frozenset(dropped))

    def pack(returned: Any) -> np.ndarray:
        row = np.zeros((), obs)  # a OneOf fills one of its branches
        fill(row, returned)
        return row

    return pack


def leaf_packer(
    dtype: np.dtype[Any], shape: tuple[int, ...], what: str = "an observation"
) -> Callable[[Any], np.ndarray]:
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


def _filler(obs: np.dtype[Any], name: str, one_of: frozenset[str], dropped: frozenset[str]) -> Fill:
    what = leaf_named(name)
    if obs.names is None:
        pack = leaf_packer(obs.base, obs.shape, what)

        def fill(row: np.ndarray, returned: Any) -> None:
            row[...] = pack(returned)

        return fill
    parts = {part: _filler(obs[part], joined(name, part), one_of, dropped) for part in obs.names}
    if name in one_of:
        return _one_of_filler(what, parts)
    inside = joined(name, "")
    return _nest_filler(what, parts, {one.removeprefix(inside) for one in dropped if one.startswith(inside)})


def _nest_filler(what: str, parts: dict[str, Fill], dropped: set[str]) -> Fill:
    expected, fills = set(parts), list(parts.items())

    def fill(row: np.ndarray, returned: Any) -> None:
        if not isinstance(returned, Mapping | tuple | list):
            kind = type(returned).__name__
            raise BadResult(f"{what} of type {kind} instead of one with the parts {', '.join(parts)}")
        found = dict(parts_of(tuple(returned) if isinstance(returned, list) else returned) or ())
        for key in sorted((found.keys() ^ expected) - dropped):
            raise BadResult(f"{what} {'without' if key in expected else 'with the unexpected'} part {key!r}")
        for part, fill_part in fills:
            fill_part(row[part], found[part])

    return fill


def _one_of_filler(what: str, parts: dict[str, Fill]) -> Fill:
    branches = [part for part in parts if part != "branch"]

    def fill(row: np.ndarray, returned: Any) -> None:
        if not (isinstance(returned, tuple | list) and len(returned) == 2):
            raise BadResult(f"{what} of type {type(returned).__name__} instead of (branch, value)")
        parts["branch"](row["branch"], returned[0])
        branch = str(int(row["branch"]))
        if branch not in branches:
            raise BadResult(f"{what} of branch {branch} instead of one of {', '.join(branches)}")
        parts[branch](row[branch], returned[1])

    return fill
