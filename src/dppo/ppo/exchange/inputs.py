"""Inputs of a network: continuous numbers as normalized floats; images and categories as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from dppo.ppo.exchange.normalizer import Moments, ObsScale, Statistics
from dppo.spaces.spaces import Spaces, holds_float64, is_continuous, is_image, leaves

Inputs = np.ndarray | dict[str, np.ndarray]


def each_leaf(obs: Any, change: Callable[[Any], Any]) -> Any:
    """Return the result of `change` for an array or tensor, or of each leaf in a dict of them."""
    return {name: change(leaf) for name, leaf in obs.items()} if isinstance(obs, dict) else change(obs)


def unprocessed_inputs(obs: np.ndarray, dtype: str | np.dtype[Any], scale: ObsScale | None) -> Inputs:
    """Return the inputs that are not processed as a whole: pixels, or views of the leaves by name.

    Args:
        scale: of the continuous leaves, from `scale_for`; these become normalized arrays of `dtype`. None: no leaf
            changes.
    """
    if obs.dtype.names is None:
        return obs
    named = leaves(obs)
    if scale is not None:
        for name, columns in _columns(obs.dtype, scale.names):
            leaf, shape = named[name], leaves(obs.dtype)[name].shape
            part = ObsScale(scale.mean[columns].reshape(shape), scale.std[columns].reshape(shape))
            named[name] = part.normalize(leaf.astype(scale.mean.dtype)).astype(dtype, copy=False)
    return named


def scale_for(scale: ObsScale | None, obs: np.dtype[Any], dtype: str | np.dtype[Any]) -> ObsScale | None:
    """Return the scale in the dtype in which observations are normalized: float64 if they hold any, else `dtype`."""
    return None if scale is None else scale.astype(np.dtype(np.float64) if holds_float64(obs) else dtype)


def normalized(obs: np.ndarray, dtype: str | np.dtype[Any], scale: ObsScale | None) -> np.ndarray:
    """Return normalized observations of a single leaf [..., *O] in `dtype`; `scale` as from `scale_for`."""
    if scale is None:
        return obs.astype(dtype, copy=False)
    return scale.normalize(obs.astype(scale.mean.dtype)).astype(dtype, copy=False)


# ------------------------------------------------------------------ the normalized part


def normalized_shape(obs: np.dtype[Any], names: Collection[str] | None = None) -> tuple[int, ...]:
    """Return the shape of the normalized part of an observation.

    It is the whole leaf if there is only one, otherwise all continuous leaves, flat and concatenated. It is (0,) if
    there is nothing to normalize.

    Args:
        names: of several leaves, those to normalize; None: all that are continuous.
    """
    if obs.names is None:
        return (0,) if is_image(obs) else obs.shape
    return (sum(columns.stop - columns.start for _, columns in _columns(obs, names)),)


def no_statistics(spaces: Spaces, *, obs: bool, returns: bool) -> Statistics:
    """Return the statistics of a new run.

    Args:
        obs, returns: whether they are normalized.
    """
    of_network = spaces.of_network().obs
    return Statistics(
        obs=Moments.empty(normalized_shape(of_network, spaces.normalized)) if obs else None,
        returns=Moments.empty(()) if returns else None,
        obs_names=spaces.normalized,
    )


def normalized_part(obs: np.ndarray, names: Collection[str] | None = None) -> np.ndarray:
    """Return the normalized part of observations `obs` [n], as they are stored: [n, *`normalized_shape`]."""
    if obs.dtype.names is None:
        return obs
    named = leaves(obs)
    return np.concatenate([named[name].reshape(len(obs), -1) for name, _ in _columns(obs.dtype, names)], axis=1)


def _columns(obs: np.dtype[Any], names: Collection[str] | None) -> Iterator[tuple[str, slice]]:
    """Yield the name of each normalized leaf, and its columns in the normalized part."""
    start = 0
    for name, leaf in leaves(obs).items():
        if is_continuous(leaf) and (names is None or name in names):
            end = start + int(np.prod(leaf.shape, dtype=int))
            yield name, slice(start, end)
            start = end
