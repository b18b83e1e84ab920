"""The parts of a space by name, which hold categories, which are left out; and spaces in messages."""

from collections.abc import Collection
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.errors import ConfigError
from dppo.spaces.spaces import Categories, leaves, parts_of, walk

NUMBERS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


def space_parts(space: gym.Space[Any]) -> list[tuple[str, gym.Space[Any]]] | None:
    """Return name and space of each part of a nested space, of a OneOf first the number of its branch; else None."""
    if isinstance(space, gym.spaces.OneOf):
        return [("branch", gym.spaces.Discrete(len(space.spaces))), *(parts_of(space.spaces) or ())]
    return parts_of(space.spaces) if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple) else None


def droppable_parts(space: gym.Space[Any]) -> list[tuple[str, gym.Space[Any]]] | None:
    """Return the parts of a space that can be left out: a OneOf is whole, as a leaf is."""
    return None if isinstance(space, gym.spaces.OneOf) else space_parts(space)


def leaf_spaces(space: gym.Space[Any], dropped: Collection[str] = ()) -> dict[str, gym.Space[Any]]:
    """Return the leaves by name, without those `dropped`; a OneOf counts as one leaf."""
    named = leaves(space, droppable_parts)
    return {name: leaf for name, leaf in named.items() if not any(_is_in(name, part) for part in dropped)}


def categories_of(space: gym.Space[Any]) -> dict[str, Categories]:
    """Return the categories of each leaf that holds some, by name."""
    found = {}
    for name, leaf in leaves(space, space_parts).items():
        if isinstance(leaf, gym.spaces.Discrete | gym.spaces.MultiDiscrete):
            counts = leaf.n if isinstance(leaf, gym.spaces.Discrete) else leaf.nvec
            found[name] = Categories(*(tuple(np.ravel(numbers).tolist()) for numbers in (counts, leaf.start)))
    return found


def names_to_drop(space: gym.Space[Any], drop_obs: Collection[str]) -> tuple[str, ...]:
    """Return the names in `drop_obs` in dotted form; "a/b" is accepted for "a.b".

    Raise ConfigError if one of them is not a part of the observation, or nothing is left.
    """
    if not drop_obs:
        return ()
    known, all_leaves = [name for name, _, _ in walk(space, droppable_parts)], list(leaf_spaces(space))
    found = [_known(name, known, all_leaves, "drop_obs") for name in drop_obs]
    kept = leaf_spaces(space, found)
    if not kept:
        raise ConfigError(f"drop_obs={' '.join(found)}: leaves nothing of the observation. Keep at least one leaf.")
    empty = [part for part in sorted(set(known) - {"", *found}) if not any(_is_in(leaf, part) for leaf in kept)]
    return (*found, *(part for part in empty if part not in all_leaves))


def names_to_normalize(obs: np.dtype[Any], norm_obs_keys: Collection[str]) -> tuple[str, ...] | None:
    """Return the names of the leaves of floats that `norm_obs_keys` selects; None for all.

    Raise ConfigError if one of them is not a part of the observation, or holds no floats.
    """
    if not norm_obs_keys:
        return None
    known, found = leaves(obs), set()
    for name in norm_obs_keys:
        part = _known(name, [one for one, _, _ in walk(obs)], list(known), "norm_obs_keys")
        inside = [leaf for leaf in known if _is_in(leaf, part)]
        floats = [leaf for leaf in inside if known[leaf].base.kind == "f"]
        if not floats:
            raise ConfigError(
                f"norm_obs_keys={name}: has no floating-point numbers ({known[inside[0]].base}), and only those are "
                f"normalized. Leave it out."
            )
        found.update(floats)
    return tuple(leaf for leaf in known if leaf in found)


def _is_in(leaf: str, part: str) -> bool:
    return leaf == part or leaf.startswith(f"{part}.")


def _known(name: str, parts: Collection[str], all_leaves: list[str], setting: str) -> str:
    """Return the dotted form of a name in a setting; raise ConfigError if it is none of the `parts`."""
    for one in (name, name.replace("/", ".")):
        if one and one in parts:
            return one
    single = f"It is a single array, which has no names: leave `{setting}` out."
    choices = single if all_leaves == [""] else f"Its leaves are {', '.join(all_leaves)}."
    raise ConfigError(f"{setting}={name}: is not a leaf of the observation. {choices}")


def short(space: Any, most: int = 80) -> str:
    """Return the text of a space, in one line of at most `most` characters."""
    text = " ".join(str(space).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def wrapped(code: str, verb: str = "Return") -> str:
    """Return a sentence that says where to use a wrapper."""
    return f"{verb} gymnasium.wrappers.{code} from a function that you pass as `env_id` (module:function)."


def check_package(space: Any, what: str) -> None:
    """Raise ConfigError for a space of the package gym."""
    if type(space).__module__.partition(".")[0] == "gym":
        raise ConfigError(
            f"{what}: is a space of the package gym, which Gymnasium has replaced. Import gymnasium in the "
            f"environment, or wrap it with shimmy.GymV26CompatibilityV0 (gym 0.26) or shimmy.GymV21CompatibilityV0 "
            f"(older)."
        )
