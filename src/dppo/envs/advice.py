"""Advice on spaces that are not supported: for each, a line of code that wraps the environment."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import numpy as np

MOST_CHOICES = 1000  # with more choices, rounding real numbers learns faster than one Discrete
MOST_PARTS = 8  # of a space, listed in a message
EXACT = 2**24  # float32 holds all integers up to this
NUMBERS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)

# ------------------------------------------------------------------ naming spaces


def short(space: Any, most: int = 80) -> str:
    """Return the text of a space, in one line of at most `most` characters."""
    text = " ".join(str(space).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def kind_of(space: gym.Space[Any]) -> str:
    """Describe the kind of a space; if its text is too long, also its parts: "a Dict (['arm'] is Box(...), ...)"."""
    parts = _parts(space)
    if parts and short(space).endswith("..."):
        named = [f"[{key!r}] is {short(part, 40)}" for key, part in parts[:MOST_PARTS]]
        more = [f"{len(parts) - MOST_PARTS} more"] if len(parts) > MOST_PARTS else []
        return f"a {type(space).__name__} ({', '.join([*named, *more])})"
    if isinstance(space, gym.spaces.Box):
        return f"a Box of {space.dtype} with shape {space.shape}"
    return f"a {type(space).__name__}"


def _parts(space: gym.Space[Any]) -> list[tuple[Any, gym.Space[Any]]]:
    if isinstance(space, gym.spaces.Dict):
        return list(space.spaces.items())
    if isinstance(space, gym.spaces.Tuple):
        return list(enumerate(space.spaces))
    return []


def _leaves(
    space: gym.Space[Any], path: str = "", only: list[Any] | None = None
) -> Iterator[tuple[str, gym.Space[Any]]]:
    """Yield the leaves of a space, or of its parts `only`, with their paths in Python: ['arm']['camera']."""
    if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple):
        for key, part in _parts(space):
            if only is None or key in only:
                yield from _leaves(part, f"{path}[{key!r}]")
    else:
        yield path, space


# ------------------------------------------------------------------ observations


def encoded() -> str:
    """Return how to turn observations that are not arrays of numbers into a vector."""
    code = "TransformObservation(env, encode, gymnasium.spaces.Box(-np.inf, np.inf, (n,)))"
    return f"Write a function encode(obs) that returns n numbers in float32. {_wrapped(code, 'Then return')}"


# ------------------------------------------------------------------ actions


def chosen(space: gym.Space[Any]) -> str:
    """Return how to turn actions of `space` into those of a Discrete or of a floating-point Box."""
    for convert in (_array_of_choices, _rounded, _reshaped, _parts_numbered, _concatenated):
        code = convert(space)
        if code:
            return _wrapped(f"TransformAction(env, {code})")
    listed = "TransformAction(env, lambda a: CHOICES[a], gymnasium.spaces.Discrete(len(CHOICES)))"
    return f"Make a list CHOICES of the actions to choose from. {_wrapped(listed, 'Then return')}"


def _array_of_choices(space: gym.Space[Any]) -> str:
    """Number all values of a small MultiDiscrete or MultiBinary."""
    if isinstance(space, gym.spaces.MultiDiscrete):
        sizes = tuple(space.nvec.ravel().tolist())
        if space.nvec.ndim == 1 and math.prod(sizes) <= MOST_CHOICES:
            start = " + env.action_space.start" if space.start.any() else ""
            return f"lambda a: np.array(np.unravel_index(a, {sizes})){start}, {_discrete(math.prod(sizes))}"
    if isinstance(space, gym.spaces.MultiBinary) and len(space.shape) == 1 and 2 ** space.shape[0] <= MOST_CHOICES:
        return f"lambda a: (a >> np.arange({space.shape[0]})) & 1, {_discrete(2 ** space.shape[0])}"
    return ""


def _rounded(space: gym.Space[Any]) -> str:
    """Round real numbers to integers."""
    low, high = "env.action_space.low", "env.action_space.high"
    if isinstance(space, gym.spaces.MultiDiscrete):
        low, high = "env.action_space.start", "env.action_space.start + env.action_space.nvec - 1"
        return f"lambda a: np.rint(a).astype('{space.dtype}'), gymnasium.spaces.Box({low}, {high}, dtype=np.float32)"
    if isinstance(space, gym.spaces.MultiBinary):
        return f"lambda a: np.rint(a).astype('{space.dtype}'), gymnasium.spaces.Box(0, 1, {space.shape})"
    if isinstance(space, gym.spaces.Box) and space.shape and space.dtype.kind != "f" and _is_exact(space):
        return f"lambda a: np.rint(a).astype('{space.dtype}'), gymnasium.spaces.Box({low}, {high}, dtype=np.float32)"
    return ""


def _is_exact(space: gym.spaces.Box) -> bool:
    return bool(np.abs(np.array([space.low, space.high], np.float64)).max() <= EXACT)


def _reshaped(space: gym.Space[Any]) -> str:
    """Take one number from a vector, for a Box without axes."""
    if not isinstance(space, gym.spaces.Box) or space.shape != ():
        return ""
    box = "gymnasium.spaces.Box(env.action_space.low.item(), env.action_space.high.item(), (1,))"
    if space.dtype.kind == "f":
        return f"lambda a: a.reshape(()), {box}"
    return f"lambda a: np.array(np.rint(a[0]), '{space.dtype}'), {box}" if _is_exact(space) else ""


def _parts_numbered(space: gym.Space[Any]) -> str:
    """Number all combinations of a Dict or Tuple of a few Discrete parts."""
    parts = [part for _, part in _parts(space) if isinstance(part, gym.spaces.Discrete) and part.start == 0]
    sizes = tuple(int(part.n) for part in parts)
    if not parts or len(parts) < len(_parts(space)) or math.prod(sizes) > MOST_CHOICES:
        return ""
    combination = f"np.unravel_index(a, {sizes})"
    build = f"dict(zip(env.action_space, {combination}))" if isinstance(space, gym.spaces.Dict) else combination
    return f"lambda a: {build}, {_discrete(math.prod(sizes))}"


def _concatenated(space: gym.Space[Any]) -> str:
    """Concatenate the parts of a Dict or Tuple of floating-point Box spaces."""
    leaves = [leaf for _, leaf in _leaves(space)]
    if not _parts(space) or not all(isinstance(leaf, gym.spaces.Box) and leaf.dtype.kind == "f" for leaf in leaves):
        return ""
    own = "env.action_space"
    return f"lambda a: gymnasium.spaces.unflatten({own}, a), gymnasium.spaces.flatten_space({own})"


def _discrete(n: int) -> str:
    return f"gymnasium.spaces.Discrete({n})"


def _wrapped(code: str, verb: str = "Return") -> str:
    """Return a sentence that says where to use a wrapper."""
    return f"{verb} gymnasium.wrappers.{code} from a function that you pass as env_id (module:function)."
