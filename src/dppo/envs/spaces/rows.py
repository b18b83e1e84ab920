"""Observations given by a user, one or many, as rows of the storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dppo.envs.checks.results import BadResult
from dppo.envs.spaces.packing import packer
from dppo.spaces.spaces import Spaces, leaf_dtypes


def rows_of(raw: Any, spaces: Spaces) -> tuple[np.ndarray, bool]:
    """Return observations [n] of a structured dtype, and whether `raw` is a single one.

    Args:
        raw: what an environment returns; or many of them: each leaf with an axis more, in front.

    Raises:
        ValueError: it is not an observation of `spaces`, with the reason.
    """
    pack = packer(spaces.returned, one_of=spaces.one_of, dropped=spaces.dropped)
    many = None if spaces.one_of else _several(raw, spaces)
    try:
        packed = [pack(one) for one in ([raw] if many is None else many)]
    except BadResult as error:
        raise ValueError(f"obs is {error}.") from None
    return np.array(packed, spaces.returned), many is None


def _several(raw: Any, spaces: Spaces) -> list[Any] | None:
    """Return the observations in `raw`; None where it is a single one."""
    leaf = next(iter(leaf_dtypes(spaces.returned).values()))
    found, parts, dtype = raw, [], spaces.returned
    while dtype.names is not None:
        part = dtype.names[0]
        parts.append(part)
        dtype = dtype[part]
        if isinstance(found, Mapping):
            found = {str(key): value for key, value in found.items()}.get(part)
        elif isinstance(found, tuple | list) and int(part) < len(found):
            found = found[int(part)]
        else:
            return None
    shape = np.shape(found)
    if len(shape) != len(leaf.shape) + 1:
        return None
    return [_row(raw, index) for index in range(shape[0])]


def _row(raw: Any, index: int) -> Any:
    if isinstance(raw, Mapping):
        return {key: _row(value, index) for key, value in raw.items()}
    if isinstance(raw, tuple):
        return tuple(_row(value, index) for value in raw)
    return raw[index]
