"""Inputs of a network: amounts as normalised floats; images and categories as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np

from dppo.ppo.exchange.normalizer import Moments, ObsScale, Statistics
from dppo.spaces.spaces import Spaces, holds_float64, is_amount, is_image, leaf_dtypes, leaves

Inputs = np.ndarray | dict[str, np.ndarray]


def each_leaf(obs: Any, change: Callable[[Any], Any]) -> Any:
    """Return the result of `change` for an array or tensor, or of each leaf in a dict of them."""
    return {name: change(leaf) for name, leaf in obs.items()} if isinstance(obs, dict) else change(obs)


def stays_raw(obs: np.dtype[Any]) -> bool:
    """Return whether observations of this dtype, of one leaf or several, are left to the network as they are stored."""
    return obs.names is not None or is_image(obs)


def raw_inputs(obs: np.ndarray, dtype: str | np.dtype[Any], scale: ObsScale | None) -> Inputs:
    """Return what a network reads of observations that stay raw: pixels, or views of the leaves by name.

    Args:
        scale: of the leaves that `measured` returns, from `scale_for`; those become arrays of `dtype`. None: nothing
            changes.
    """
    if obs.dtype.names is None:
        return obs
    named = leaves(obs)
    if scale is not None:
        for name, columns in _columns(obs.dtype, scale.names):
            leaf, shape = named[name], leaf_dtypes(obs.dtype)[name].shape
            part = ObsScale(scale.mean[columns].reshape(shape), scale.std[columns].reshape(shape))
            named[name] = part.normalize(leaf.astype(scale.mean.dtype)).astype(dtype, copy=False)
    return named


def scale_for(scale: ObsScale | None, obs: np.dtype[Any], dtype: str | np.dtype[Any]) -> ObsScale | None:
    """Return the scale in the dtype in which observations are normalised: float64 if any are, else the network's."""
    return None if scale is None else scale.astype(np.dtype(np.float64) if holds_float64(obs) else dtype)


def amounts(obs: np.ndarray, dtype: str | np.dtype[Any], scale: ObsScale | None) -> np.ndarray:
    """Return normalised observations of a single leaf [..., *O] in `dtype`; `scale` as from `scale_for`."""
    if scale is None:
        return obs.astype(dtype, copy=False)
    return scale.normalize(obs.astype(scale.mean.dtype)).astype(dtype, copy=False)


# ------------------------------------------------------------------ what is normalised


def measured_shape(obs: np.dtype[Any], names: Collection[str] | None = None) -> tuple[int, ...]:
    """Return the shape of what is normalised of one observation: all of a single leaf, the floats of several.

    It is (0,) where there is nothing to normalise.

    Args:
        names: of several leaves, those to normalise; None: all that hold floats.
    """
    if obs.names is None:
        return (0,) if is_image(obs) else obs.shape
    return (sum(columns.stop - columns.start for _, columns in _columns(obs, names)),)


def no_statistics(spaces: Spaces, *, obs: bool, returns: bool) -> Statistics:
    """Return the statistics of a new run.

    Args:
        obs, returns: the normaliser is on.
    """
    of_network = spaces.of_network().obs
    return Statistics(
        obs=Moments.empty(measured_shape(of_network, spaces.normalized)) if obs else None,
        returns=Moments.empty(()) if returns else None,
        obs_names=spaces.normalized,
    )


def measured(obs: np.ndarray, names: Collection[str] | None = None) -> np.ndarray:
    """Return what is normalised of `obs` [n]: of several leaves, those of `measured_shape` side by side."""
    if obs.dtype.names is None:
        return obs
    named = leaves(obs)
    return np.concatenate([named[name].reshape(len(obs), -1) for name, _ in _columns(obs.dtype, names)], axis=1)


def _columns(obs: np.dtype[Any], names: Collection[str] | None) -> Iterator[tuple[str, slice]]:
    """Yield the name of each leaf that is normalised, and its columns in `measured`."""
    start = 0
    for name, leaf in leaf_dtypes(obs).items():
        if is_amount(leaf) and (names is None or name in names):
            end = start + int(np.prod(leaf.shape, dtype=int))
            yield name, slice(start, end)
            start = end
