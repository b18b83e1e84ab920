"""Check observations and convert them to elements of a NumPy dtype, in which they are stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dppo.envs.results import BadResult

LARGEST = np.finfo(np.float32).max  # observations are stored as float32


def packer(obs: np.dtype[Any]) -> Callable[[Any], np.ndarray]:
    """Return a function that copies a returned observation into a new array, and checks it.

    For a Box, the array [*O] keeps the environment's own dtype, which checksums depend on. For a Dict or Tuple it is
    one packed element of shape (). The function raises BadResult if the shape or the kind of number is not that of
    the space, a number is not finite, or a leaf is missing.
    """
    if obs.names is None:
        return _leaf_packer("an observation", obs.base, obs.shape)
    fill = _filler(obs, "")

    def pack(raw: Any) -> np.ndarray:
        row = np.empty((), obs)
        fill(row, raw)
        return row

    return pack


def _leaf_packer(what: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Callable[[Any], np.ndarray]:
    """Return a function that copies and checks one leaf; `what` names it in errors."""

    def pack(raw: Any) -> np.ndarray:
        try:
            array = np.array(raw)  # a copy, because the environment may reuse its own
        except Exception as error:  # ragged, or not convertible, as a tensor on a GPU
            raise BadResult(f"{what} that is not an array ({error})") from None
        if array.shape != shape:
            raise BadResult(f"{what} of shape {array.shape} instead of {shape}")
        if array.dtype != dtype and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise BadResult(f"{what} of dtype {array.dtype} instead of {dtype}")
        if array.dtype.kind == "f":
            flat = array.ravel()
            # Ten times as fast as isfinite for few numbers; only a large sum of squares needs a look at each.
            if not flat.dot(flat) <= LARGEST:
                wrong = np.flatnonzero(~(np.abs(flat) <= LARGEST))
                if len(wrong):
                    raise BadResult(f"{what} that is {flat[wrong[0]]} at index {int(wrong[0])}")
        return array

    return pack


def _filler(obs: np.dtype[Any], name: str) -> Callable[[np.ndarray, Any], None]:
    """Return a function that writes an observation of a Dict or Tuple into one element of `obs`."""
    names = obs.names
    assert names is not None
    expected = set(names)
    what = f"observation leaf {name!r}" if name else "an observation"
    parts: list[tuple[str, Callable[[np.ndarray, Any], None]]] = []
    for part in names:
        inner, leaf = obs[part], f"{name}.{part}" if name else part
        if inner.names is not None:
            parts.append((part, _filler(inner, leaf)))
        else:
            parts.append((part, _leaf_filler(_leaf_packer(f"observation leaf {leaf!r}", inner.base, inner.shape))))

    def fill(row: np.ndarray, raw: Any) -> None:
        if isinstance(raw, Mapping):
            found = {str(key): value for key, value in raw.items()}
        elif isinstance(raw, tuple | list):
            found = {str(index): value for index, value in enumerate(raw)}
        else:
            raise BadResult(f"{what} of type {type(raw).__name__} instead of one with the parts {', '.join(names)}")
        for key in sorted(found.keys() ^ expected):
            raise BadResult(f"{what} {'without' if key in expected else 'with the unexpected'} part {key!r}")
        for part, fill_part in parts:
            fill_part(row[part], found[part])

    return fill


def _leaf_filler(pack: Callable[[Any], np.ndarray]) -> Callable[[np.ndarray, Any], None]:
    def fill(row: np.ndarray, raw: Any) -> None:
        row[...] = pack(raw)

    return fill
