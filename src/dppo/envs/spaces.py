"""Gymnasium spaces as plain data; spaces that cannot be learnt on are refused with a line that repairs them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.leaves import categories_of, names_to_drop, one_of_names, parts_of
from dppo.errors import ConfigError
from dppo.spaces import BoxActions, DiscreteActions, Spaces, leaf_dtypes

MOST_CHOICES = 1000  # a Discrete of more is a worse example than rounding


def describe_spaces(env: gym.Env[Any, Any], *, drop_obs: Collection[str] = ()) -> Spaces:
    """Return the spaces of `env` as plain data.

    Args:
        drop_obs: names of leaves of the observation to leave out.

    Raises:
        ConfigError: a space that cannot be learnt on; names the part and a setting or wrapper that helps.
    """
    space = env.observation_space
    _check_package(space, f"observation_space={short(space)}")
    dropped = names_to_drop(space, drop_obs)
    obs = dtype_of(space, drop=dropped)
    names = leaf_dtypes(obs)
    spec = getattr(env, "spec", None)  # an environment that is none of Gymnasium's classes may have none
    return Spaces(
        obs,
        _actions(env.action_space),
        not getattr(spec, "nondeterministic", False),
        categories={name: found for name, found in categories_of(space) if name in names},
        one_of=one_of_names(space),
        dropped=dropped,
    )


def _actions(space: gym.Space[Any]) -> DiscreteActions | BoxActions:
    if isinstance(space, gym.spaces.Discrete):
        return DiscreteActions(int(space.n), int(space.start))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating) and 0 not in (space.shape or (0,)):
        return BoxActions(np.asarray(space.low), np.asarray(space.high))
    what = f"action_space={short(space)}"
    _check_package(space, what)
    raise ConfigError(
        f"{what}: {_culprit(space)}, and only Discrete and floating-point Box actions are supported so far. Wrap the "
        f"environment{_action_wrapper(space)}."
    )


def _action_wrapper(space: gym.Space[Any]) -> str:
    """Return the end of the sentence "Wrap the environment": for most spaces a line of Python that does it."""
    line, lead = _transformed(space), ""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        line, lead = (
            "lambda a: CHOICES[a], Discrete(len(CHOICES))",
            ", with a list CHOICES of the actions to choose from",
        )
    if not line:
        return " with an ActionWrapper of your own whose action_space is one of these"
    return f"{lead}: gymnasium.wrappers.TransformAction(env, {line}), with Box and Discrete of gymnasium.spaces"


def _transformed(space: gym.Space[Any]) -> str:
    """Return arguments of TransformAction for actions that are an array: few choices by number, others rounded."""
    if isinstance(space, gym.spaces.MultiDiscrete):
        choices = tuple(space.nvec.ravel().tolist())
        if space.nvec.ndim == 1 and not space.start.any() and math.prod(choices) <= MOST_CHOICES:
            return f"lambda a: np.array(np.unravel_index(a, {choices})), Discrete({math.prod(choices)})"
        low, high = "env.action_space.start", "env.action_space.start + env.action_space.nvec - 1"
        return f"lambda a: np.rint(a).astype(int), Box({low}, {high}, dtype=np.float32)"
    if isinstance(space, gym.spaces.MultiBinary):
        if len(space.shape) == 1 and 2 ** space.shape[0] <= MOST_CHOICES:
            return f"lambda a: (a >> np.arange({space.shape[0]})) & 1, Discrete({2 ** space.shape[0]})"
        return f"lambda a: np.rint(a).astype(int), Box(0, 1, {space.shape})"
    if isinstance(space, gym.spaces.Box) and space.shape and 0 not in space.shape:
        low, high = "env.action_space.low", "env.action_space.high"
        return f"lambda a: np.rint(a).astype(np.{space.dtype}), Box({low}, {high}, dtype=np.float32)"
    if isinstance(space, gym.spaces.Box) and space.shape == () and np.issubdtype(space.dtype, np.floating):
        return f"lambda a: a.reshape(()), Box({space.low}, {space.high}, (1,))"
    return ""


def _check_package(space: Any, what: str) -> None:
    if type(space).__module__.partition(".")[0] == "gym":
        raise ConfigError(
            f"{what}: is a space of the package gym, which Gymnasium has replaced. Import gymnasium in the "
            f"environment, or wrap it with shimmy.GymV21CompatibilityV0."
        )


def _culprit(space: gym.Space[Any]) -> str:
    """Name the kind of a space and of its parts."""
    if isinstance(space, gym.spaces.Dict):
        parts = ", ".join(f"{key!r} is {short(part)}" for key, part in space.spaces.items())
        return f"it is a Dict ({parts})"
    if isinstance(space, gym.spaces.Tuple):
        parts = ", ".join(f"[{index}] is {short(part)}" for index, part in enumerate(space.spaces))
        return f"it is a Tuple ({parts})"
    if isinstance(space, gym.spaces.Box):
        return f"it is a Box of {space.dtype} with shape {space.shape}"
    return f"it is a {type(space).__name__}"


def short(space: Any) -> str:
    """Return the text of a space, in one line of at most 80 characters."""
    text = " ".join(str(space).split())
    return text if len(text) <= 80 else text[:77] + "..."


# ------------------------------------------------------------------ space -> dtype


def dtype_of(space: gym.Space[Any], name: str = "", drop: Collection[str] = ()) -> np.dtype[Any]:
    """Return the dtype of which one observation of `space` is an element, without the leaves named in `drop`.

    A Box (and a Discrete, MultiDiscrete or MultiBinary) gives `(dtype, shape)`, a Dict or a Tuple a packed structured
    dtype: padding bytes would enter checksums. The fields of a Tuple are named "0", "1", ..., those of a OneOf
    `branch`, "0", "1", ...

    Raises:
        ConfigError: a leaf that is not an array of numbers, or has no elements; names the leaf.
    """
    inner = parts_of(space, name)
    if inner is not None:
        fields = [(part, dtype_of(one, leaf, drop)) for part, leaf, one in inner if leaf not in drop]
        return _structured(fields, name)
    if not isinstance(
        space, gym.spaces.Box | gym.spaces.Discrete | gym.spaces.MultiDiscrete | gym.spaces.MultiBinary
    ) or (space.shape is None or space.dtype is None):
        raise ConfigError(
            f"{_label(name)}: is {short(space)}, which is not an array of numbers. {_without(name)}encode it as a Box."
        )
    if 0 in space.shape:
        raise ConfigError(f"{_label(name)}: is {short(space)}, which has no elements. Give it at least one.")
    return np.dtype((_stored(np.dtype(space.dtype)), space.shape))  # with shape () this is the scalar dtype itself


def _without(name: str) -> str:
    """Return how to do without a leaf; the whole observation cannot be left out."""
    return f"Leave it out with drop_obs={name}, or " if name else "In a wrapper, "


def _stored(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the dtype in which numbers are stored: long floats as float32, in the byte order of this machine."""
    return np.dtype(np.float32) if dtype.kind == "f" and dtype.itemsize > 4 else dtype.newbyteorder("=")


def _structured(fields: list[tuple[str, np.dtype[Any]]], name: str) -> np.dtype[Any]:
    names = [part for part, _ in fields]
    if not names:
        raise ConfigError(f"{_label(name)}: has no parts. Give it at least one.")
    if "" in names or len(set(names)) < len(names):
        raise ConfigError(f"{_label(name)}: has the keys {names}. Use keys that are different and not empty.")
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
