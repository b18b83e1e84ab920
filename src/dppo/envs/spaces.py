"""Convert Gymnasium spaces to plain data, and refuse those that are not supported, with advice."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.advice import NUMBERS, chosen, flattened, is_image, kind_of, short
from dppo.errors import ConfigError
from dppo.spaces import BoxActions, DiscreteActions, Spaces


def describe_spaces(env: gym.Env[Any, Any], *, own_network: bool = False) -> Spaces:
    """Return the spaces of `env` as plain data.

    Args:
        own_network: accept images, which the default network cannot read.

    Raises:
        ConfigError: a space is not supported. The text names the part, and a wrapper that helps.
    """
    _check_observations(env.observation_space, own_network)
    spec = getattr(env, "spec", None)  # an environment that does not inherit from gymnasium.Env may have none
    return Spaces(
        dtype_of(env.observation_space), _actions(env.action_space), not getattr(spec, "nondeterministic", False)
    )


def _check_observations(space: gym.Space[Any], own_network: bool) -> None:
    what = f"observation_space={short(space)}"
    if not isinstance(space, gym.spaces.Box):
        _check_package(space, what)
        raise ConfigError(
            f"{what}: it is {kind_of(space)}, and only Box observations are supported. {flattened(space)}"
        )
    if 0 in space.shape:
        raise ConfigError(f"{what}: has no elements. Give it at least one.")
    if space.shape == ():
        raise ConfigError(f"{what}: has no dimensions. {flattened(space)}")
    if is_image(space) and not own_network:
        raise ConfigError(
            f"{what}: is an image, and the default network has no layers for images. Set model to a network of your "
            f"own (module:Class). To pass all {math.prod(space.shape):,} pixels to the default network as single "
            f"numbers, use gymnasium.wrappers.FlattenObservation."
        )


def _actions(space: gym.Space[Any]) -> DiscreteActions | BoxActions:
    if isinstance(space, gym.spaces.Discrete):
        return DiscreteActions(int(space.n), int(space.start))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and 0 not in (space.shape or (0,)):
        return BoxActions(np.asarray(space.low), np.asarray(space.high))
    what = f"action_space={short(space)}"
    _check_package(space, what)
    if 0 in (space.shape or ()):
        raise ConfigError(f"{what}: has no elements. Give it at least one.")
    raise ConfigError(
        f"{what}: it is {kind_of(space)}, and only Discrete and floating-point Box actions are supported. "
        f"{chosen(space)}"
    )


def _check_package(space: Any, what: str) -> None:
    if type(space).__module__.partition(".")[0] == "gym":
        raise ConfigError(
            f"{what}: is a space of the package gym, which Gymnasium has replaced. Import gymnasium in the "
            f"environment, or wrap it with shimmy.GymV26CompatibilityV0 (gym 0.26) or shimmy.GymV21CompatibilityV0 "
            f"(older)."
        )


# ------------------------------------------------------------------ space -> dtype


def dtype_of(space: gym.Space[Any], name: str = "") -> np.dtype[Any]:
    """Return the dtype in which one observation of `space` is stored.

    For a Box, Discrete, MultiDiscrete or MultiBinary it is `(dtype, shape)`. For a Dict or Tuple it is a structured
    dtype, packed because checksums must not include padding. The fields of a Tuple are named "0", "1", ...

    Raises:
        ConfigError: a leaf is not an array of numbers, or has no elements. The text names it.
    """
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        parts = space.spaces.items() if isinstance(space, gym.spaces.Dict) else enumerate(space.spaces)
        fields = [(str(part), dtype_of(inner, f"{name}.{part}" if name else str(part))) for part, inner in parts]
        return _structured(fields, name)
    if not isinstance(space, NUMBERS) or space.shape is None or space.dtype is None:
        raise ConfigError(
            f"{_label(name)}: is {short(space)}, which is not an array of numbers. Leave it out, or encode it as a Box."
        )
    if 0 in space.shape:
        raise ConfigError(f"{_label(name)}: is {short(space)}, which has no elements. Give it at least one.")
    return np.dtype((_stored(np.dtype(space.dtype)), space.shape))  # with shape () this is the scalar dtype itself


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers are stored: float64 becomes float32, and the byte order is native."""
    return np.dtype(np.float32) if dtype.kind == "f" and dtype.itemsize > 4 else dtype.newbyteorder("=")


def _structured(fields: list[tuple[str, np.dtype[Any]]], name: str) -> np.dtype[Any]:
    names = [part for part, _ in fields]
    if not names:
        raise ConfigError(f"{_label(name)}: has no parts. Give it at least one.")
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"{_label(name)}: has the keys {names}. Keys must be different and not empty.")
    dtype = np.dtype(fields)
    flat = list(_leaf_names(dtype, ""))
    if len(set(flat)) < len(flat):
        twice = next(leaf for leaf in flat if flat.count(leaf) > 1)
        raise ConfigError(f"{_label(name)}: two leaves are named {twice!r} when nested keys are joined. Rename a key.")
    return dtype


def _leaf_names(dtype: np.dtype[Any], name: str) -> Iterator[str]:
    if dtype.names is None:
        yield name
    for part in dtype.names or ():
        yield from _leaf_names(dtype[part], f"{name}.{part}" if name else part)


def _label(name: str) -> str:
    return f"observation_space, leaf {name!r}" if name else "observation_space"
