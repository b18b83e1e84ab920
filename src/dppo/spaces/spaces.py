"""Observation and action spaces as plain data, from which networks and storage are built.

One observation is one element of a NumPy dtype. For a Box this is the sub-array dtype `(dtype, shape)`, so that
`np.empty((T + 1, E), spaces.obs)` is an array [T + 1, E, *shape]. For a Dict or Tuple it is a structured dtype
without padding. So the same code stores, slices, concatenates and sends observations of any space.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np

from dppo.spaces.actions import Actions

MASK = "action_mask"
MAX_WHOLE = 2**24  # float32 can tell apart all integers up to here
MaskSource = Literal["leaf", "method", "info"]
Tree = TypeVar("Tree")
PartsOf = Callable[[Any], list[tuple[str, Any]] | None]


@dataclass(frozen=True, slots=True)
class Categories:
    """The categories that the numbers of a leaf stand for, in a Discrete or a MultiDiscrete space."""

    counts: tuple[int, ...]
    """Number of categories of each element of the leaf, flat."""
    starts: tuple[int, ...]
    """The first category of each element."""

    def limits(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and the last category of each element, in the `shape` of the leaf."""
        first = np.reshape(self.starts, shape)
        return first, first + np.reshape(self.counts, shape) - 1


@dataclass(frozen=True, slots=True)
class Spaces:
    """Observation and action space of an environment."""

    obs: np.dtype[Any]
    """Dtype of one observation as it is stored and sent; float64 becomes `obs_dtype`. `obs.shape` is [*O]."""
    actions: Actions
    deterministic: bool = True
    """False if the environment's spec is `nondeterministic`; its episodes are not replayed."""
    categories: dict[str, Categories] = field(default_factory=dict)
    """The leaves that hold categories, by name; the other leaves hold continuous numbers."""
    one_of: tuple[str, ...] = ()
    """Names of the OneOf spaces: structured dtypes of the fields `branch`, "0", "1", ..."""
    dropped: tuple[str, ...] = ()
    """Names of leaves that the environment returns and the policy does not read."""
    normalized: tuple[str, ...] | None = None
    """Names of the leaves that `norm_obs` normalizes; None: all that hold floats."""
    critic_obs: tuple[str, ...] = ()
    """Names of the leaves that only the value network reads."""
    mask: MaskSource | None = None
    """Source of action masks, which are stored in `obs` in the field `action_mask`: a leaf of the observation, or the
    environment's `action_masks()` or `info["action_mask"]`; these two are stored beside the field `obs`. None: no
    masks."""

    def of_network(self) -> Spaces:
        """The spaces that a network is built for: without the mask."""
        if self.mask is None:
            return self
        if self._mask_is_apart:
            return replace(self, obs=self.obs["obs"], mask=None)
        fields = [(name, self.obs[name]) for name in self.obs.names or () if name != MASK]
        return replace(self, obs=np.dtype(fields), mask=None)

    def of_policy(self) -> Spaces:
        """Return the spaces of which the trained policy acts: without the leaves that only the value reads."""
        if not self.critic_obs:
            return self
        obs = _without(self.returned, self.critic_obs)
        remaining = {name for name, _, _ in walk(obs)}
        absent = [name for name, _, _ in walk(self.returned) if name not in remaining]
        if self._mask_is_apart:
            obs = np.dtype([("obs", obs), (MASK, self.obs[MASK])])
        return replace(self, obs=obs, dropped=(*self.dropped, *absent), critic_obs=())

    @property
    def returned(self) -> np.dtype[Any]:
        """The dtype of one observation as the environment returns it."""
        if self._mask_is_apart:
            return self.obs["obs"]
        return self.obs

    def as_returned(self, obs: np.ndarray) -> np.ndarray:
        """Return a view of stored observations [...] as the environment returned them."""
        returned: np.ndarray = obs[self.index_of_returned]
        return returned

    @property
    def index_of_returned(self) -> Any:
        """The index of stored observations [...] that gives a view of them as the environment returned them."""
        return "obs" if self._mask_is_apart else ...

    @property
    def _mask_is_apart(self) -> bool:
        """True if the mask is no part of the observation, and has a field of its own next to `obs`."""
        return self.mask in ("method", "info")

    @property
    def is_vector(self) -> bool:
        """True if an observation is a single array of numbers, neither an image nor categories."""
        return self.obs.names is None and not is_image(self.obs) and not self.categories

    def leaves(self) -> dict[str, np.dtype[Any]]:
        """The dtype of each leaf of an observation, by name."""
        return leaves(self.obs)


def parts_of(tree: Any) -> list[tuple[str, Any]] | None:
    """Return name and value of each part of a nested array, dtype, dict or tuple; None for a leaf."""
    if isinstance(tree, np.ndarray | np.dtype):
        names = tree.names if isinstance(tree, np.dtype) else tree.dtype.names
        if names is None:
            return None
        return [(name, tree[name]) for name in names]
    if isinstance(tree, Mapping):
        return [(str(key), part) for key, part in tree.items()]
    if isinstance(tree, tuple):
        return [(str(index), part) for index, part in enumerate(tree)]
    return None


def _without(obs: np.dtype[Any], names: Collection[str], name: str = "") -> np.dtype[Any]:
    """Return the dtype of an observation without the leaves of these names; a part that loses all its leaves goes."""
    fields = []
    for part in obs.names or ():
        inner_name = joined(name, part)
        if inner_name in names:
            continue
        inner = obs[part]
        if inner.names is not None:
            inner = _without(inner, names, inner_name)
            if not inner.names:
                continue
        fields.append((part, inner))
    return np.dtype(fields)


def row_of(obs: Any, index: int, dropped: Collection[str] = (), name: str = "") -> Any:
    """Return one row of many observations, which hold an axis more in front of each leaf; leaves `dropped` are None."""
    if name in dropped:
        return None
    if not isinstance(obs, Mapping | tuple):
        return obs[index]
    rows = {
        key: row_of(part, index, dropped, joined(name, key)) for key, part in parts_of(obs) or ()
    }
    if isinstance(obs, Mapping):
        return rows
    return tuple(rows.values())


def joined(name: str, part: str) -> str:
    """Append to a dotted name; "" is the whole."""
    return f"{name}.{part}" if name else part


def walk(tree: Any, parts: PartsOf = parts_of, name: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield dotted name, value and "is a leaf" of `tree` and of all in it, outer parts first; `parts` finds them."""
    inner_parts = parts(tree)
    yield name, tree, inner_parts is None
    for key, part in inner_parts or ():
        yield from walk(part, parts, joined(name, key))


def leaves(tree: Tree, parts: PartsOf = parts_of, name: str = "") -> dict[str, Tree]:
    """Return the leaves of the tree `name` by dotted name; one without parts has a single leaf of that name.

    Of observations [...] the leaves are views, each [..., *shape].
    """
    return {key: leaf for key, leaf, is_leaf in walk(tree, parts, name) if is_leaf}


def masks_of(obs: np.ndarray) -> np.ndarray:
    """Return the masks [..., M] of observations [...] that are stored with them, as booleans."""
    masks = obs[MASK]
    if masks.dtype.names is not None:  # one for each part of a Dict or Tuple of actions
        masks = np.concatenate(
            [leaf.astype(bool, copy=False) for leaf in leaves(masks).values()], axis=-1
        )
    return masks.astype(bool, copy=False)


def is_image(leaf: np.dtype[Any]) -> bool:
    """Return whether a leaf holds pixels: bytes with three axes, or four for a stack of images."""
    return len(leaf.shape) in (3, 4) and leaf.base == np.uint8


def holds_float64(obs: np.dtype[Any]) -> bool:
    return any(leaf.base == np.float64 for leaf in leaves(obs).values())


def dtype_summary(dtype: np.dtype[Any]) -> str:
    """Return an observation dtype in short: `float32[4]`, or `{camera: uint8[84, 84, 3], speed: float32[]}`."""
    if dtype.names is None:
        return f"{dtype.base}{list(dtype.shape)}"
    fields = ", ".join(f"{name}: {dtype_summary(dtype[name])}" for name in dtype.names)
    return f"{{{fields}}}"


def dtype_as_json(dtype: np.dtype[Any]) -> dict[str, Any]:
    """Convert an observation dtype to JSON values with the same nesting."""
    if dtype.names is None:
        return {"dtype": str(dtype.base), "shape": list(dtype.shape)}
    return {"leaves": [[name, dtype_as_json(dtype[name])] for name in dtype.names]}


def dtype_from_json(described: dict[str, Any]) -> np.dtype[Any]:
    """Convert the result of `dtype_as_json` back; raise KeyError, TypeError or ValueError if it is not valid."""
    if "leaves" in described:
        return np.dtype([(name, dtype_from_json(part)) for name, part in described["leaves"]])
    # with shape () this is the scalar dtype itself
    return np.dtype((described["dtype"], tuple(described["shape"])))
