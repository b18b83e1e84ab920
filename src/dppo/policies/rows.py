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
    limits = []
    for name, of in spaces.categories.items():
        if not any(name.startswith(f"{one}.") or not one for one in spaces.one_of):  # zero where not chosen
            shape = leaves(spaces.returned)[name].shape
            low, count = np.reshape(of.starts, shape), np.reshape(of.counts, shape)
            limits.append(Limits(name, low, low + count - 1))
    outside = first_outside(limits, rows)
    if outside is not None:
        raise ValueError(f"obs is {outside.what}.")
    return rows, single


def _array(obs: Any, leaf: np.dtype[Any]) -> tuple[np.ndarray, bool]:
    shape = np.shape(obs)
    single = shape == leaf.shape
    if not single and shape[1:] != leaf.shape:
        raise ValueError(f"obs has shape {shape}. Pass {leaf.shape}, or (n, {', '.join(map(str, leaf.shape))}).")
    rows = leaf_packer(leaf.base, shape)(obs).astype(leaf.base, copy=False)
    return rows[None] if single else rows, single


def _packed(obs: Any, spaces: Spaces) -> tuple[np.ndarray, bool]:
    found, leaf = obs, spaces.returned
    while leaf.names is not None:  # the first leaf, whose axes say whether there are many
        found = dict(parts_of(tuple(found) if isinstance(found, list) else found) or ()).get(leaf.names[0])
        leaf = leaf[leaf.names[0]]
    single = bool(spaces.one_of) or np.ndim(found) != len(leaf.shape) + 1
    try:
        many = [obs] if single else [_row(obs, index) for index in range(len(found))]
    except (IndexError, TypeError):
        raise BadResult(f"{len(found)} observations in one leaf, and fewer in another") from None
    pack = packer(spaces.returned, one_of=spaces.one_of, dropped=spaces.dropped)
    return np.array([pack(one) for one in many], spaces.returned), single


def _row(obs: Any, index: int) -> Any:
    if isinstance(obs, Mapping):
        return {key: _row(value, index) for key, value in obs.items()}
    return tuple(_row(value, index) for value in obs) if isinstance(obs, tuple) else obs[index]
