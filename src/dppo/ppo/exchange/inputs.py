"""Inputs of a network, made from observations as they are stored: normalized, or as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from dppo.ppo.exchange.scales import ObsScale
from dppo.spaces.spaces import holds_float64, is_image, leaves


def each_leaf(obs: Any, change: Callable[[Any], Any]) -> Any:
    """Return the result of `change` for an array or tensor, or of each leaf in a dict of them."""
    if isinstance(obs, dict):
        return {name: change(leaf) for name, leaf in obs.items()}
    return change(obs)


def network_inputs(
    obs: np.ndarray,
    obs_dtype: np.dtype[Any],
    dtype: str | np.dtype[Any],
    scale: ObsScale | None,
) -> np.ndarray | dict[str, np.ndarray]:
    """Return the inputs of a network in `dtype` for stored observations [..., *O]; of several leaves, each by its name.

    Pixels stay as they are, and so do integers beside other leaves.

    Args:
        obs_dtype: the dtype of one observation.
        scale: the result of `scale_for`; None: numbers are not normalized.
    """
    if obs_dtype.names is None:
        if is_image(obs_dtype):
            return obs
        if scale is None:
            return obs.astype(dtype, copy=False)
        return scale.normalize(obs, dtype)
    inputs = leaves(obs)
    scales = {} if scale is None else leaf_scales(scale, obs_dtype)
    for name, leaf in inputs.items():
        if name in scales:
            inputs[name] = scales[name].normalize(leaf, dtype)
        elif leaf.dtype.kind == "f":
            inputs[name] = leaf.astype(dtype, copy=False)
    return inputs


def leaf_scales(scale: ObsScale, obs_dtype: np.dtype[Any]) -> dict[str, ObsScale]:
    """Return the scale of each normalized leaf by name, in the shape of that leaf."""
    if obs_dtype.names is None:
        return {"": scale}
    leaf_dtypes = leaves(obs_dtype)
    scales: dict[str, ObsScale] = {}
    for name, columns in _columns(obs_dtype, scale.names):
        shape = leaf_dtypes[name].shape
        scales[name] = ObsScale(
            scale.mean[columns].reshape(shape),
            scale.std[columns].reshape(shape),
        )
    return scales


def scale_for(
    scale: ObsScale | None, obs_dtype: np.dtype[Any], dtype: str | np.dtype[Any]
) -> ObsScale | None:
    """Return the scale in the dtype in which observations are normalized: float64 if they hold any, else `dtype`."""
    if scale is None:
        return None
    return scale.astype("float64" if holds_float64(obs_dtype) else dtype)


def normalized_part(obs: np.ndarray, names: Collection[str] | None = None) -> np.ndarray:
    """Return the normalized part of stored observations [n]: the only leaf [n, *O], or leaves side by side [n, k].

    `names`: of several leaves, those to normalize; None: all that are continuous.
    """
    if obs.dtype.names is None:
        return obs
    by_name = leaves(obs)
    parts = [
        by_name[name].reshape(len(obs), columns.stop - columns.start)
        for name, columns in _columns(obs.dtype, names)
    ]
    return np.concatenate(parts, axis=1) if parts else np.zeros((len(obs), 0))


def _columns(
    obs_dtype: np.dtype[Any], names: Collection[str] | None
) -> Iterator[tuple[str, slice]]:
    """Yield the name of each normalized leaf, and its columns in the normalized part."""
    start = 0
    for name, leaf in leaves(obs_dtype).items():
        if leaf.base.kind == "f" and (names is None or name in names):
            end = start + int(np.prod(leaf.shape, dtype=int))
            yield name, slice(start, end)
            start = end
