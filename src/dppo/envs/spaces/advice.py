"""Advice on spaces that are not supported: for each, a line of code that wraps the environment."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from dppo.spaces.spaces import MOST_WHOLE

MOST_CHOICES = 1000  # of one number; with more, rounding real numbers learns faster
MOST_PARTS = 8  # of a space, listed in a message
NUMBERS = (gym.spaces.Box, gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)


def short(space: Any, most: int = 80) -> str:
    """Return the text of a space, in one line of at most `most` characters."""
    text = " ".join(str(space).split())
    return text if len(text) <= most else text[: most - 3] + "..."


def kind_of(space: gym.Space[Any]) -> str:
    """Describe the kind of a space; if its text is too long, also its parts: "a Dict (['arm'] is Box(...), ...)"."""
    inner = space.spaces if isinstance(space, gym.spaces.Dict | gym.spaces.Tuple) else ()
    parts: list[tuple[Any, Any]] = list(inner.items() if isinstance(inner, dict) else enumerate(inner))
    if parts and short(space).endswith("..."):
        named = [f"[{key!r}] is {short(part, 40)}" for key, part in parts[:MOST_PARTS]]
        more = [f"{len(parts) - MOST_PARTS} more"] if len(parts) > MOST_PARTS else []
        return f"a {type(space).__name__} ({', '.join([*named, *more])})"
    if isinstance(space, gym.spaces.Box):
        return f"a Box of {space.dtype} with shape {space.shape}"
    return f"a {type(space).__name__}"


def encoded() -> str:
    """Return how to turn observations that are not arrays of numbers into a vector."""
    code = "TransformObservation(env, encode, gymnasium.spaces.Box(-np.inf, np.inf, (n,)))"
    return f"Write a function encode(obs) that returns n numbers in float32. {_wrapped(code, 'Then return')}"


def chosen(space: gym.Space[Any]) -> str:
    """Return how to turn actions of `space` into those of a Discrete or of a floating-point Box."""
    if isinstance(space, gym.spaces.Box) and np.abs(np.array([space.low, space.high], np.float64)).max() <= MOST_WHOLE:
        box = "gymnasium.spaces.Box(env.action_space.low, env.action_space.high, dtype=np.float32)"
        return _wrapped(f"TransformAction(env, lambda a: np.array(np.rint(a), '{space.dtype}'), {box})")
    listed = "TransformAction(env, lambda a: CHOICES[a], gymnasium.spaces.Discrete(len(CHOICES)))"
    return f"Make a list CHOICES of the actions to choose from. {_wrapped(listed, 'Then return')}"


def _wrapped(code: str, verb: str = "Return") -> str:
    return f"{verb} gymnasium.wrappers.{code} from a function that you pass as env_id (module:function)."
