"""Inputs of a network, made from observations as they are stored: normalized, or as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from dppo.ppo.exchange.scales import Moments, ObsScale, Statistics
from dppo.spaces.spaces import Spaces, holds_float64, is_image, leaves


def each_leaf(obs: Any, change: Callable[[Any], Any]) -> Any:
    """Return the result of `change` for an array or tensor, or of each leaf in a dict of them."""
    if isinstance(obs, dict):
        return {name: change(leaf) for name, leaf in obs.items()}
    return change(obs)


class NumberReader:
    """Makes the inputs of a network from observations that are one array of numbers, as they are stored."""

    def __init__(self, obs_dtype: np.dtype[Any], dtype: str | np.dtype[Any]) -> None:
        """Read observations of `obs_dtype` for a network of `dtype`."""
        self._obs_dtype = obs_dtype
        self._dtype = dtype
        self._scale: ObsScale | None = None

    def load(self, scale: ObsScale | None) -> None:
        """Normalize with `scale` from now on, in float64 if observations hold it; None: leave them as they are."""
        self._scale = scale_for(scale, self._obs_dtype, self._dtype)

    def read(self, obs: np.ndarray) -> np.ndarray:
        """Convert stored observations [..., *O] to inputs of the network."""
        if self._scale is None:
            return obs.astype(self._dtype, copy=False)
        return self._scale.normalize(obs, self._dtype)


class PixelReader:
    """Leaves images as they are."""

    def load(self, scale: ObsScale | None) -> None:
        """Do nothing: pixels are not normalized."""

    def read(self, obs: np.ndarray) -> np.ndarray:
        return obs


class LeafReader:
    """Makes an input of each leaf of observations with several leaves; integers among them stay as they are."""

    def __init__(self, obs_dtype: np.dtype[Any], dtype: str | np.dtype[Any]) -> None:
        """Read observations of `obs_dtype` for a network of `dtype`."""
        self._obs_dtype = obs_dtype
        self._dtype = dtype
        self._scales: dict[str, ObsScale] = {}

    def load(self, scale: ObsScale | None) -> None:
        """Normalize with `scale` from now on; None: leave numbers as they are."""
        scale = scale_for(scale, self._obs_dtype, self._dtype)
        self._scales = {} if scale is None else leaf_scales(scale, self._obs_dtype)

    def read(self, obs: np.ndarray) -> dict[str, np.ndarray]:
        """Return the inputs for stored observations [...] by the names of the leaves."""
        inputs = leaves(obs)
        for name, leaf in inputs.items():
            if name in self._scales:
                inputs[name] = self._scales[name].normalize(leaf, self._dtype)
            elif leaf.dtype.kind == "f":
                inputs[name] = leaf.astype(self._dtype, copy=False)
        return inputs


InputReader = NumberReader | PixelReader | LeafReader


def reader_of(obs_dtype: np.dtype[Any], dtype: str | np.dtype[Any]) -> InputReader:
    """Return the reader of observations of `obs_dtype` for a network of `dtype`; it does not normalize yet."""
    if obs_dtype.names is not None:
        return LeafReader(obs_dtype, dtype)
    if is_image(obs_dtype):
        return PixelReader()
    return NumberReader(obs_dtype, dtype)


def leaf_scales(scale: ObsScale, obs_dtype: np.dtype[Any]) -> dict[str, ObsScale]:
    """Return the scale of each normalized leaf by name, in the shape of that leaf."""
    if obs_dtype.names is None:
        return {"": scale}
    leaf_dtypes = leaves(obs_dtype)
    scales: dict[str, ObsScale] = {}
    for name, columns in _columns(obs_dtype, scale.names):
        shape = leaf_dtypes[name].shape
        scales[name] = ObsScale(
            scale.mean[columns].reshape(shape), scale.std[columns].reshape(shape)
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
    return _side_by_side(obs, names)


def _side_by_side(obs: np.ndarray, names: Collection[str] | None) -> np.ndarray:
    by_name = leaves(obs)
    parts = [
        by_name[name].reshape(len(obs), columns.stop - columns.start)
        for name, columns in _columns(obs.dtype, names)
    ]
    if parts:
        return np.concatenate(parts, axis=1)
    return np.zeros((len(obs), 0))


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


def no_statistics(spaces: Spaces, *, obs: bool, returns: bool) -> Statistics:
    """Return the statistics of a new run that normalizes observations, as far as they are floats, and returns."""
    network_spaces = spaces.of_network()
    shape = normalized_part(np.zeros(1, network_spaces.obs), spaces.normalized).shape[1:]
    has_several_leaves = network_spaces.obs.names is not None
    is_continuous = 0 not in shape and (has_several_leaves or network_spaces.is_vector)
    return Statistics(
        obs=Moments.empty(shape) if obs and is_continuous else None,
        returns=Moments.empty(()) if returns else None,
        obs_names=spaces.normalized,
    )
