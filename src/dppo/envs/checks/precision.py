"""PrecisionWatch: find observations that float32, in which they are stored or read, cannot tell apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dppo.spaces.spaces import leaves

LEAST_SPREAD = 1e-4  # less variation is noise rather than information
LOST = 0.05  # share of its standard deviation that rounding may take from a number


class PrecisionWatch:
    """Collect observations as the environment returned them, and compare them with their rounded form."""

    def __init__(self, *, integers: bool) -> None:
        """Watch float64, and integers if the network reads them as float32."""
        self._kinds = "fiu" if integers else "f"
        self._seen: dict[str, list[np.ndarray]] = {}

    def see(self, raw: Any) -> None:
        """Copy the leaves of an observation that hold numbers of more digits than float32."""
        for name, leaf in _raw_leaves(raw, ""):
            if isinstance(leaf, np.ndarray | np.number | float | int):
                dtype = np.asarray(leaf).dtype
                if dtype.kind in self._kinds and dtype.itemsize > (4 if dtype.kind == "f" else 3):
                    self._seen.setdefault(name, []).append(np.array(leaf))

    def finding(self, obs: np.dtype[Any]) -> str | None:
        """Describe the first leaf that loses its information, with a remedy; None if there is none.

        Args:
            obs: how observations are stored. Floats that are not stored as float32 lose nothing.
        """
        stored = leaves(np.empty(1, obs))
        for name, seen in self._seen.items():
            alike = name in stored and {one.shape for one in seen} == {stored[name].shape[1:]}  # not those of a OneOf
            if alike and stored[name].dtype != np.float64:
                loss = _loss(np.stack(seen), "read by the network" if stored[name].dtype.kind in "iu" else "stored")
                if loss:
                    return f"{f'observation leaf {name!r}' if name else 'the observation'} {loss}"
        return None


def _raw_leaves(raw: Any, name: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(raw, Mapping | tuple):
        yield name, raw
        return
    for part, inner in raw.items() if isinstance(raw, Mapping) else enumerate(raw):
        yield from _raw_leaves(inner, f"{name}.{part}" if name else str(part))


def _loss(seen: np.ndarray, done: str) -> str | None:
    """Describe an element of `seen` [n, *shape] of whose variation float32 loses too much when it is `done` so."""
    spread = seen.std(axis=0)
    error = np.sqrt(np.square(seen - seen.astype(np.float32)).mean(axis=0))
    bad = np.argwhere((spread > LEAST_SPREAD) & (error > LOST * spread))
    if not len(bad):
        return None
    index = tuple(int(i) for i in bad[0])
    numbers = np.array([one[index] for one in seen])
    step = float(np.spacing(np.float32(np.abs(numbers).max())))
    place = f" at index {index[0] if len(index) == 1 else index}" if index else ""
    return (
        f"is from {numbers.min():.17g} to {numbers.max():.17g}{place}, and is {done} as float32, whose steps are "
        f"{step:g} there. Use obs_dtype=float64 with norm_obs=True, or subtract an offset in the environment "
        f"(gymnasium.wrappers.TransformObservation); norm_obs alone comes too late, after the rounding"
    )
