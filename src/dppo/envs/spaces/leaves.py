"""The parts of an observation space by name: which hold categories, which are left out."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.errors import ConfigError
from dppo.spaces.spaces import Categories, is_continuous, leaf_dtypes

Part = tuple[str, str, gym.Space[Any]]


def parts_of(space: gym.Space[Any], name: str = "") -> list[Part] | None:
    """Return field, full name and space of each part of the nested space `name`; None for a leaf.

    A OneOf has the number of its branch as its first part.
    """
    if isinstance(space, gym.spaces.Dict):
        parts = [(str(key), inner) for key, inner in space.spaces.items()]
    elif isinstance(space, gym.spaces.Tuple):
        parts = [(str(index), inner) for index, inner in enumerate(space.spaces)]
    elif isinstance(space, gym.spaces.OneOf):
        branches = [(str(index), inner) for index, inner in enumerate(space.spaces)]
        parts = [("branch", gym.spaces.Discrete(len(branches))), *branches]
    else:
        return None
    return [(field, f"{name}.{field}" if name else field, inner) for field, inner in parts]


def categories_of(space: gym.Space[Any], name: str = "") -> Iterator[tuple[str, Categories]]:
    """Yield the name of each leaf that holds categories, with these."""
    if isinstance(space, gym.spaces.Discrete):
        yield name, Categories((int(space.n),), (int(space.start),))
    elif isinstance(space, gym.spaces.MultiDiscrete):
        yield name, Categories(_flat(space.nvec), _flat(space.start))
    for _, part, inner in parts_of(space, name) or ():
        yield from categories_of(inner, part)


def one_of_names(space: gym.Space[Any], name: str = "") -> tuple[str, ...]:
    """Return the names of the OneOf spaces in `space`."""
    inner = [found for _, part, one in parts_of(space, name) or () for found in one_of_names(one, part)]
    return (name, *inner) if isinstance(space, gym.spaces.OneOf) else tuple(inner)


def leaf_spaces(space: gym.Space[Any], name: str = "", dropped: Collection[str] = ()) -> dict[str, gym.Space[Any]]:
    """Return the leaves that can be left out, by name, without those that are: a OneOf counts as one leaf."""
    parts = None if isinstance(space, gym.spaces.OneOf) else parts_of(space, name)
    if parts is None:
        return {name: space}
    kept = [(part, inner) for _, part, inner in parts if part not in dropped]
    return {found: leaf for part, inner in kept for found, leaf in leaf_spaces(inner, part, dropped).items()}


def names_to_drop(space: gym.Space[Any], drop_obs: Collection[str]) -> tuple[str, ...]:
    """Return the names in `drop_obs` as observations have them: of a nested leaf, "a.b", also where it says "a/b".

    Raises:
        ConfigError: one of them is not a part of the observation, or nothing is left.
    """
    if not drop_obs:
        return ()
    known, all_leaves = _names(space, ""), list(leaf_spaces(space))
    found = []
    for name in drop_obs:
        if name not in known and name.replace("/", ".") not in known:
            raise ConfigError(f"drop_obs={name}: is not a leaf of the observation. {_choices(all_leaves)}")
        found.append(name if name in known else name.replace("/", "."))
    kept = [leaf for leaf in all_leaves if not any(_is_in(leaf, one) for one in found)]
    if not kept:
        raise ConfigError(f"drop_obs={' '.join(found)}: leaves nothing of the observation. Keep at least one leaf.")
    empty = [part for part in sorted(known - set(found)) if not any(_is_in(leaf, part) for leaf in kept)]
    return (*found, *(part for part in empty if part not in all_leaves))


def names_to_normalize(obs: np.dtype[Any], norm_obs_keys: Collection[str]) -> tuple[str, ...] | None:
    """Return the names of the leaves of floats that `norm_obs_keys` selects; None for all.

    Raises:
        ConfigError: one of them is not a part of the observation, or holds no floats.
    """
    if not norm_obs_keys:
        return None
    known, found = leaf_dtypes(obs), set()
    for name in norm_obs_keys:
        inside = [leaf for leaf in known if leaf and (_is_in(leaf, name) or _is_in(leaf, name.replace("/", ".")))]
        if not inside:
            raise ConfigError(
                f"norm_obs_keys={name}: is not a leaf of the observation. {_choices(list(known), 'norm_obs_keys')}"
            )
        floats = [leaf for leaf in inside if is_continuous(known[leaf])]
        if not floats:
            raise ConfigError(
                f"norm_obs_keys={name}: has no floating-point numbers ({known[inside[0]].base}), and only those are "
                f"normalised. Leave it out."
            )
        found.update(floats)
    return tuple(leaf for leaf in known if leaf in found)


def _is_in(leaf: str, part: str) -> bool:
    return leaf == part or leaf.startswith(f"{part}.")


def _choices(names: list[str], setting: str = "drop_obs") -> str:
    if names == [""]:
        return f"It is a single array, which has no names: leave {setting} out."
    return f"Its leaves are {', '.join(names)}."


def _names(space: gym.Space[Any], name: str) -> set[str]:
    """Return the names of all parts that may be left out: neither the whole, nor the number of a OneOf's branch."""
    parts = [] if isinstance(space, gym.spaces.OneOf) else parts_of(space, name) or []
    return {part for _, part, _ in parts} | {found for _, part, inner in parts for found in _names(inner, part)}


def _flat(numbers: np.ndarray) -> tuple[int, ...]:
    return tuple(int(number) for number in numbers.ravel())
