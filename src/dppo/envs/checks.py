"""Checks of observations against their space, and against the precision in which they are stored.

A check of each step would cost more than the step of a small environment, so whole segments are checked at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.spaces import leaves

LEAST_SPREAD = 1e-4  # what varies less is noise rather than information
LOST = 0.05  # share of its spread that rounding may take from a number


@dataclass(frozen=True, slots=True)
class Outside:
    """An observation outside its space."""

    row: tuple[int, ...]
    """Index of the observation."""
    description: str
    """Follows "returned": the leaf, the number, the limits."""
    whole_number: bool


@dataclass(frozen=True, slots=True)
class _Limits:
    """Limits of one leaf, in the dtype in which it is stored."""

    name: str
    low: np.ndarray
    high: np.ndarray


class Bounds:
    """The limits of the leaves of an observation space."""

    def __init__(self, space: gym.Space[Any], obs: np.dtype[Any]) -> None:
        """Take the limits of `space`, whose observations are stored as `obs`."""
        stored = leaves(np.empty(1, obs))
        self._limits = [one for one in _limits(space, "") if _applies(one, stored.get(one.name))]
        self._limits = [
            _Limits(one.name, one.low.astype(dtype), one.high.astype(dtype))
            for one in self._limits
            for dtype in [stored[one.name].dtype]
        ]

    def outside(self, obs: np.ndarray) -> Outside | None:
        """Return the first of the stored observations [...] that is outside its space; None where none is."""
        if not self._limits:
            return None
        columns = leaves(obs)
        for limits in self._limits:
            column = columns[limits.name]
            inside = (column >= limits.low) & (column <= limits.high)
            if not inside.all():
                return _first(limits, column, inside, obs.ndim if obs.dtype.names else column.ndim - limits.low.ndim)
        return None


def _limits(space: gym.Space[Any], name: str) -> Iterator[_Limits]:
    """Yield the limits of each leaf; leaves of other kinds have none."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces)
        for part, inner in parts:
            yield from _limits(inner, f"{name}.{part}" if name else str(part))
    elif isinstance(space, gym.spaces.Box):
        yield _Limits(name, space.low, space.high)
    elif isinstance(space, gym.spaces.Discrete):
        yield _Limits(name, np.asarray(space.start), np.asarray(space.start + space.n - 1))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        yield _Limits(name, np.asarray(space.start), np.asarray(space.start + space.nvec - 1))
    elif isinstance(space, gym.spaces.MultiBinary):
        yield _Limits(name, np.zeros(space.shape, np.int8), np.ones(space.shape, np.int8))


def _applies(limits: _Limits, stored: np.ndarray | None) -> bool:
    """Return whether a leaf is stored as in its space, and could be outside these limits at all."""
    if stored is None or stored.shape[1:] != limits.low.shape:
        return False
    if stored.dtype.kind == "f":
        return bool(np.isfinite(limits.low).any() or np.isfinite(limits.high).any())
    if stored.dtype.kind not in "iu":
        return False
    least, most = np.iinfo(stored.dtype).min, np.iinfo(stored.dtype).max
    return bool((limits.low > least).any() or (limits.high < most).any())


def _first(limits: _Limits, column: np.ndarray, inside: np.ndarray, leading: int) -> Outside:
    at = tuple(int(i) for i in np.argwhere(~inside)[0])
    row, index = at[:leading], at[leading:]
    what = f"observation leaf {limits.name!r}" if limits.name else "an observation"
    place = f" at index {index[0] if len(index) == 1 else index}" if index else ""
    low, high = limits.low[index], limits.high[index]
    return Outside(row, f"{what} that is {column[at]}{place}, its space has {low} to {high}", column.dtype.kind != "f")


# ------------------------------------------------------------------ precision


class PrecisionWatch:
    """Compares observations of float64 with the float32 in which they are stored."""

    def __init__(self) -> None:
        self._seen: dict[str, list[np.ndarray]] = {}

    def see(self, raw: Any) -> None:
        """Take in an observation as the environment returned it; only leaves of float64 matter."""
        for name, leaf in _raw_leaves(raw, ""):
            if isinstance(leaf, np.ndarray | np.floating | float) and np.asarray(leaf).dtype == np.float64:
                self._seen.setdefault(name, []).append(np.array(leaf))

    def finding(self, obs: np.dtype[Any]) -> str | None:
        """Describe the leaf that float32 cannot tell apart, with a remedy; None where there is none.

        Args:
            obs: how observations are stored; leaves that are not stored as float32 lose nothing.
        """
        stored = leaves(np.empty(1, obs))
        for name, seen in self._seen.items():
            if name in stored and stored[name].dtype == np.float32:
                lost = _indistinguishable(np.stack(seen))
                if lost:
                    return f"{f'observation leaf {name!r}' if name else 'the observation'} {lost}"
        return None


def _raw_leaves(raw: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(raw, Mapping):
        items: Sequence[tuple[Any, Any]] = list(raw.items())
    elif isinstance(raw, tuple):
        items = list(enumerate(raw))
    else:
        yield name, raw
        return
    for part, inner in items:
        yield from _raw_leaves(inner, f"{name}.{part}" if name else str(part))


def _indistinguishable(seen: np.ndarray) -> str | None:
    """Describe an element of `seen` [n, *shape] of whose spread float32 loses too much."""
    spread = seen.std(axis=0)
    lost = np.sqrt(np.square(seen - seen.astype(np.float32)).mean(axis=0))
    bad = np.argwhere((spread > LEAST_SPREAD) & (lost > LOST * spread))
    if not len(bad):
        return None
    index = tuple(int(i) for i in bad[0])
    numbers = seen[(slice(None), *index)]
    step = float(np.spacing(np.float32(np.abs(numbers).max())))
    place = f" at index {index[0] if len(index) == 1 else index}" if index else ""
    return (
        f"is from {numbers.min():.17g} to {numbers.max():.17g}{place}, and is stored as float32, whose steps are "
        f"{step:g} there. Subtract an offset in the environment (gymnasium.wrappers.TransformObservation); norm_obs "
        f"comes too late, after the rounding"
    )
