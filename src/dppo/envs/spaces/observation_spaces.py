"""Convert Gymnasium spaces to plain data, and refuse those that are not supported, with advice."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal

import gymnasium as gym
import numpy as np

from dppo.envs.masks import MaskSetting, mask_source
from dppo.envs.spaces.action_spaces import actions_of
from dppo.envs.spaces.leaves import (
    NUMBERS,
    categories_of,
    check_package,
    leaf_spaces,
    names_to_drop,
    names_to_normalize,
    short,
    space_parts,
    wrapped,
)
from dppo.errors import ConfigError
from dppo.spaces.actions import Bounds
from dppo.spaces.spaces import MASK, MOST_WHOLE, Spaces, joined, leaves, walk

ENCODED = "Write a function encode(obs) that returns n numbers in float32. " + wrapped(
    "TransformObservation(env, encode, gymnasium.spaces.Box(-np.inf, np.inf, (n,)))", "Then return"
)


def describe_spaces(
    env: gym.Env[Any, Any],
    *,
    drop_obs: Collection[str] = (),
    norm_obs_keys: Collection[str] = (),
    action_bounds: Bounds | Literal["auto"] = "clip",
    action_mask: MaskSetting = "auto",
    obs_dtype: str = "float32",
) -> Spaces:
    """Return the spaces of `env` as plain data; the other arguments are the settings of these names.

    Raise ConfigError if a space is not supported. The text names the part, and a setting or wrapper that helps.
    """
    space = env.observation_space
    check_package(space, f"observation_space={short(space)}")
    dropped = names_to_drop(space, drop_obs)
    _check_leaves(space, dropped)
    obs = dtype_of(space, drop=dropped, floats=obs_dtype)
    actions = actions_of(env.action_space, action_bounds)
    mask = mask_source(env, obs, actions, action_mask)
    names = leaves(obs).keys() - ({MASK} if mask == "leaf" else set())
    beside = np.dtype([("obs", obs), (MASK, np.bool_, (sum(actions.choices or ()),))])
    spec = getattr(env, "spec", None)  # an environment that does not inherit from gymnasium.Env may have none
    return Spaces(
        beside if mask in ("method", "info") else obs,
        actions,
        not getattr(spec, "nondeterministic", False),
        categories={name: found for name, found in categories_of(space).items() if name in names},
        one_of=tuple(name for name, part, _ in walk(space, space_parts) if isinstance(part, gym.spaces.OneOf)),
        dropped=dropped,
        normalized=names_to_normalize(obs, norm_obs_keys),
        mask=mask,
    )


def _check_leaves(space: gym.Space[Any], dropped: Collection[str]) -> None:
    """Refuse leaves that are not arrays of numbers, if the others can do without them."""
    named = leaf_spaces(space, dropped=dropped)
    odd = [name for name, leaf in named.items() if not isinstance(leaf, (*NUMBERS, gym.spaces.OneOf))]
    if odd and len(odd) < len(named):
        out = "it" if len(odd) == 1 else "them"
        raise ConfigError(
            f"observation_space, leaf {odd[0]!r}: is {short(named[odd[0]])}, which is not an array of numbers. Use "
            f"`drop_obs={' '.join([*dropped, *odd])}` to leave {out} out."
        )


def dtype_of(
    space: gym.Space[Any], name: str = "", drop: Collection[str] = (), floats: str = "float32"
) -> np.dtype[Any]:
    """Return the dtype in which one observation of `space` is stored, without the leaves named in `drop`.

    For a Box, Discrete, MultiDiscrete or MultiBinary it is `(dtype, shape)`. For a Dict or Tuple it is a structured
    dtype, packed because checksums must not include padding. The fields of a Tuple are named "0", "1", ..., those of a
    OneOf "branch", "0", "1", ... Floats of 64 bits or more are stored as `floats`; if that is float64, so are integers
    of a Box that float32 cannot tell apart. Raise ConfigError for a leaf that is not an array of numbers, or has none.
    """
    parts = space_parts(space)
    if parts is not None:
        named = [(part, joined(name, part), one) for part, one in parts]
        return _structured(
            [(part, dtype_of(one, leaf, drop, floats)) for part, leaf, one in named if leaf not in drop], name
        )
    if not isinstance(space, NUMBERS) or space.shape is None or space.dtype is None:
        raise ConfigError(f"{_label(name)}: is {short(space)}, which is not an array of numbers. {ENCODED}")
    if 0 in space.shape:
        raise ConfigError(f"{_label(name)}: is {short(space)}, which has no elements. Give it at least one.")
    return np.dtype((_stored(space, floats), space.shape))  # with shape () this is the scalar dtype itself


def _stored(space: gym.Space[Any], floats: str) -> np.dtype[Any]:
    """Return the dtype in which the numbers of `space` are stored; the byte order is native."""
    dtype = np.dtype(space.dtype)
    rounded = dtype.kind == "f" and dtype.itemsize > 4
    if floats == "float64" and dtype.kind in "iu" and isinstance(space, gym.spaces.Box):
        rounded = max(-int(space.low.min()), int(space.high.max())) > MOST_WHOLE
    return np.dtype(floats) if rounded else dtype.newbyteorder("=")


def _structured(fields: list[tuple[str, np.dtype[Any]]], name: str) -> np.dtype[Any]:
    names = [part for part, _ in fields]
    if not names:
        raise ConfigError(f"{_label(name)}: has no parts. Give it at least one.")
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"{_label(name)}: has the keys {names}. Keys must be different and not empty.")
    dtype = np.dtype(fields)
    flat = [leaf for leaf, _, is_leaf in walk(dtype) if is_leaf]
    if len(set(flat)) < len(flat):
        twice = next(leaf for leaf in flat if flat.count(leaf) > 1)
        raise ConfigError(f"{_label(name)}: two leaves are named {twice!r} when nested keys are joined. Rename a key.")
    return dtype


def _label(name: str) -> str:
    return f"observation_space, leaf {name!r}" if name else "observation_space"
