"""Check observations and convert them to elements of a NumPy dtype, in which they are stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dppo.envs.checks.results import BadResult

LARGEST = np.finfo(np.float32).max  # observations are stored as float32


def packer(
    obs: np.dtype[Any], *, one_of: Collection[str] = (), dropped: Collection[str] = ()
) -> Callable[[Any], np.ndarray]:
    """Return a function that copies a returned observation into a new array, and checks it.

    For a Box, the array [*O] keeps the environment's own dtype, which checksums depend on. For a Dict or Tuple it is
    one packed element of shape (). The function raises BadResult if the shape or the kind of number is not that of
    the space, a number is not finite or does not fit into the dtype, or a leaf is missing.

    Args:
        one_of, dropped: as in `dppo.spaces.spaces.Spaces`.
    """
    if obs.names is None:
        return leaf_packer(obs.base, obs.shape)
    fill = _Filling(frozenset(one_of), frozenset(dropped)).filler(obs, "")

    def pack(raw: Any) -> np.ndarray:
        row = np.empty((), obs)
        fill(row, raw)
        return row

    return pack


def leaf_packer(
    dtype: np.dtype[Any], shape: tuple[int, ...], what: str = "an observation"
) -> Callable[[Any], np.ndarray]:
    """Return a function that copies and checks one leaf; `what` names it in errors."""
    whole = dtype.kind in "iu"

    def pack(raw: Any) -> np.ndarray:
        try:
            array = np.array(raw)  # a copy, because the environment may reuse its own
        except Exception as error:  # ragged, or not convertible, as a tensor on a GPU
            raise BadResult(f"{what} that is not an array ({error})") from None
        if array.shape != shape:
            raise BadResult(f"{what} of shape {array.shape} instead of {shape}")
        if array.dtype != dtype:
            if not np.can_cast(array.dtype, dtype, "same_kind"):
                raise BadResult(f"{what} of dtype {array.dtype} instead of {dtype}")
            # There and back again takes a sixth of the time of a minimum and a maximum, but does not show a lost sign.
            if whole and (
                array.dtype.kind != dtype.kind or array.astype(dtype).astype(array.dtype).tobytes() != array.tobytes()
            ):
                _check_range(what, array, np.iinfo(dtype))
        if array.dtype.kind == "f":
            flat = array.ravel()
            # Ten times as fast as isfinite for few numbers; only a large sum of squares needs a look at each.
            if not flat.dot(flat) <= LARGEST:
                wrong = np.flatnonzero(~(np.abs(flat) <= LARGEST))
                if len(wrong):
                    raise BadResult(f"{what} that is {flat[wrong[0]]} at index {int(wrong[0])}")
        return array

    return pack


def _check_range(what: str, array: np.ndarray, limits: np.iinfo[Any]) -> None:
    """Check that a cast changes no integer: one that is out of range would wrap around."""
    for extreme in int(array.min()), int(array.max()):
        if not limits.min <= extreme <= limits.max:
            index = int(np.flatnonzero(array == extreme)[0])
            raise BadResult(
                f"{what} that is {extreme} at index {index}, outside {limits.dtype} from {limits.min} to {limits.max}"
            )


Fill = Callable[[np.ndarray, Any], None]


@dataclass(frozen=True, slots=True)
class _Filling:
    """Makes the functions that write a raw observation into one element of a structured dtype."""

    one_of: frozenset[str]
    dropped: frozenset[str]

    def filler(self, obs: np.dtype[Any], name: str) -> Fill:
        """Return the function for the part `name` of an observation, of dtype `obs`."""
        if obs.names is None:
            return _leaf_filler(leaf_packer(obs.base, obs.shape, f"observation leaf {name!r}"))
        what = f"observation leaf {name!r}" if name else "an observation"
        parts = {part: self.filler(obs[part], _joined(name, part)) for part in obs.names}
        if name in self.one_of:
            return _one_of_filler(what, parts)
        return _nest_filler(what, parts, _dropped_parts(self.dropped, name))


def _nest_filler(what: str, parts: dict[str, Fill], dropped: frozenset[str]) -> Fill:
    """Return the function that writes a raw Dict or Tuple, without its `dropped` parts."""
    expected, fills = set(parts), list(parts.items())

    def fill(row: np.ndarray, raw: Any) -> None:
        if isinstance(raw, Mapping):
            found = {str(key): value for key, value in raw.items()}
        elif isinstance(raw, tuple | list):
            found = {str(index): value for index, value in enumerate(raw)}
        else:
            raise BadResult(f"{what} of type {type(raw).__name__} instead of one with the parts {', '.join(parts)}")
        for key in sorted((found.keys() ^ expected) - dropped):
            raise BadResult(f"{what} {'without' if key in expected else 'with the unexpected'} part {key!r}")
        for part, fill_part in fills:
            fill_part(row[part], found[part])

    return fill


def _one_of_filler(what: str, parts: dict[str, Fill]) -> Fill:
    """Return the function that writes a raw OneOf, (branch, value); the other branches become zeros."""
    branches = [part for part in parts if part != "branch"]

    def fill(row: np.ndarray, raw: Any) -> None:
        if not (isinstance(raw, tuple | list) and len(raw) == 2):
            raise BadResult(f"{what} of type {type(raw).__name__} instead of (branch, value)")
        row[...] = np.zeros((), row.dtype)
        parts["branch"](row["branch"], raw[0])
        branch = str(int(row["branch"]))
        if branch not in branches:
            raise BadResult(f"{what} of branch {branch} instead of one of {', '.join(branches)}")
        parts[branch](row[branch], raw[1])

    return fill


def _joined(name: str, part: str) -> str:
    return f"{name}.{part}" if name else part


def _dropped_parts(dropped: frozenset[str], name: str) -> frozenset[str]:
    """Return the parts of `name` that are dropped."""
    inside = f"{name}." if name else ""
    return frozenset(one.removeprefix(inside) for one in dropped if one.startswith(inside))


def _leaf_filler(pack: Callable[[Any], np.ndarray]) -> Fill:
    def fill(row: np.ndarray, raw: Any) -> None:
        row[...] = pack(raw)

    return fill
