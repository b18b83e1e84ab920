"""Observations given by a user, one or many, as rows of the storage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from dppo.envs.checks.faults import BadResult
from dppo.envs.checks.observations import Limits, first_outside
from dppo.envs.spaces.packing import leaf_packer, packer
from dppo.spaces.spaces import Spaces, leaves, parts_of


def rows_of(obs: Any, spaces: Spaces) -> tuple[np.ndarray, bool]:
    """Return observations [n, *O] as they are stored in training, and whether `obs` is a single one.

    Args:
        obs: what an environment returns; or many of them: each leaf with an axis more, in front.

    Raises:
        ValueError: it is not an observation of `spaces`, with the reason.
    """
    try:
        rows, single = _array(obs, spaces.returned) if spaces.returned.names is None else _packed(obs, spaces)
    except BadResult as error:
        raise ValueError(f"obs is {error}.") from None
    outside = first_outside(_categories(spaces), rows) if spaces.categories else None
    if outside is not None:
        raise ValueError(f"obs is {outside.what}.")
    return rows, single


def _array(obs: Any, leaf: np.dtype[Any]) -> tuple[np.ndarray, bool]:
    """Return the rows of observations of a single leaf, checked all at once."""
    shape = np.shape(obs)
    single = shape == leaf.shape
    if not single and shape[1:] != leaf.shape:
        raise ValueError(f"obs has shape {shape}. Pass {leaf.shape}, or (n, {', '.join(map(str, leaf.shape))}).")
    rows = leaf_packer(leaf.base, shape)(obs).astype(leaf.base, copy=False)
    return rows[None] if single else rows, single


def _packed(obs: Any, spaces: Spaces) -> tuple[np.ndarray, bool]:
    """Return the rows of observations of several leaves, packed one by one."""
    pack = packer(spaces.returned, one_of=spaces.one_of, dropped=spaces.dropped)
    many = None if spaces.one_of else _several(obs, spaces)
    packed = [pack(one) for one in ([obs] if many is None else many)]
    return np.array(packed, spaces.returned), many is None


def _categories(spaces: Spaces) -> list[Limits]:
    """Return the limits of the leaves that hold categories, but for those of a OneOf, which are zero if not chosen."""
    found = []
    for name, leaf in leaves(spaces.returned).items():
        if name in spaces.categories and not any(name.startswith(f"{one}.") or not one for one in spaces.one_of):
            of = spaces.categories[name]
            low = np.reshape(of.starts, leaf.shape)
            found.append(Limits(name, low, low + np.reshape(of.counts, leaf.shape) - 1))
    return found


def _several(obs: Any, spaces: Spaces) -> list[Any] | None:
    """Return the observations in `obs`; None where it is a single one."""
    found, leaf = obs, spaces.returned
    while leaf.names is not None:
        found = dict(parts_of(tuple(found) if isinstance(found, list) else found) or ()).get(leaf.names[0])
        leaf = leaf[leaf.names[0]]
    if np.ndim(found) != len(leaf.shape) + 1:
        return None
    try:
        return [_row(obs, index) for index in range(len(found))]
    except (IndexError, TypeError):
        raise BadResult(f"{len(found)} observations in one leaf, and fewer in another") from None


def _row(obs: Any, index: int) -> Any:
    if isinstance(obs, Mapping):
        return {key: _row(value, index) for key, value in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_row(value, index) for value in obs)
    return obs[index]
