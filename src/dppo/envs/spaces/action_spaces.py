"""Convert Gymnasium's action spaces to plain data, and refuse those that are not supported, with advice."""

from __future__ import annotations

from typing import Any, Literal

import gymnasium as gym
import numpy as np

from dppo.envs.spaces.leaves import check_package, short, space_parts, wrapped
from dppo.errors import ConfigError
from dppo.spaces.actions import Actions, Bounds, BoxActions, DiscreteActions, MultiDiscreteActions, NestedActions, boxes
from dppo.spaces.spaces import MOST_WHOLE

MOST_CHOICES = 1000  # of one number; with more, rounding real numbers learns faster
NEAR = 2.0  # a fresh policy, of mean 0 and deviation 1, reaches bounds up to here by itself
NO_BOUND = 1e9  # a finite bound beyond this, such as the largest float32, stands for none
MOST_PARTS = 8  # of a space, listed in a message


def actions_of(space: gym.Space[Any], bounds: Bounds | Literal["auto"] = "clip") -> Actions:
    """Return an action space as plain data; raise ConfigError, with a remedy, if it or its `bounds` do not fit."""
    actions = _converted(space, bounds, "action_space")
    real = list(boxes(actions))
    if bounds not in ("auto", "clip") and not real:
        raise ConfigError(
            f"action_bounds={bounds}: has no effect on {actions} actions, which are not real numbers. Leave "
            f"`action_bounds` out."
        )
    for box in real:
        infinite = np.flatnonzero(~(np.isfinite(box.low) & np.isfinite(box.high)))
        if box.bounds != "clip" and len(infinite):
            at = int(infinite[0])
            raise ConfigError(
                f"action_bounds={bounds}: needs finite bounds, and element {at} of an action lies between "
                f"{box.low.flat[at]} and {box.high.flat[at]}. Use `action_bounds=clip`, or give the Box finite bounds."
            )
    return actions


def _converted(space: gym.Space[Any], bounds: Bounds | Literal["auto"], name: str) -> Actions:
    what = f"{name}={short(space)}"
    check_package(space, what)
    if 0 in (space.shape or ()):
        raise ConfigError(f"{what}: has no elements. Give it at least one.")
    if isinstance(space, gym.spaces.Discrete):
        return DiscreteActions(int(space.n), int(space.start))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        if bounds == "auto":
            bounds = "rescale" if NEAR < np.abs([space.low, space.high]).max() <= NO_BOUND else "clip"
        return BoxActions(np.asarray(space.low), np.asarray(space.high), bounds)
    choices = _choices(space)
    if choices is not None:
        return choices
    inner = dict(space_parts(space) or ())
    keyed = isinstance(space, gym.spaces.Dict) and all(isinstance(key, str) for key in space.spaces)
    if inner and (keyed or isinstance(space, gym.spaces.Tuple)):
        parts = [_converted(part, bounds, f"{name}[{repr(key) if keyed else key}]") for key, part in inner.items()]
        return NestedActions(tuple(parts), tuple(inner) if keyed else None)
    raise ConfigError(f"{what}: it is {_kind_of(space)}, which is not supported. {_chosen(space)}")


def _choices(space: gym.Space[Any]) -> MultiDiscreteActions | None:
    if isinstance(space, gym.spaces.MultiDiscrete):
        counts, starts = space.nvec, space.start
    elif isinstance(space, gym.spaces.MultiBinary):
        counts, starts = np.full(space.shape, 2), np.zeros(space.shape, int)
    elif isinstance(space, gym.spaces.Box):
        counts, starts = space.high.astype(float) - space.low.astype(float) + 1, space.low
        if counts.max() > MOST_CHOICES:
            return None
    else:
        return None
    flat = [tuple(int(number) for number in np.ravel(numbers)) for numbers in (counts, starts)]
    return MultiDiscreteActions(flat[0], flat[1], space.shape, str(space.dtype))


def _kind_of(space: gym.Space[Any]) -> str:
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


def _chosen(space: gym.Space[Any]) -> str:
    """Return how to turn actions of `space` into those of a Discrete or of a floating-point Box."""
    if isinstance(space, gym.spaces.Box) and np.abs(np.array([space.low, space.high], np.float64)).max() <= MOST_WHOLE:
        box = "gymnasium.spaces.Box(env.action_space.low, env.action_space.high, dtype=np.float32)"
        return wrapped(f"TransformAction(env, lambda a: np.array(np.rint(a), '{space.dtype}'), {box})")
    listed = "TransformAction(env, lambda a: CHOICES[a], gymnasium.spaces.Discrete(len(CHOICES)))"
    return f"Make a list CHOICES of the actions to choose from. {wrapped(listed, 'Then return')}"
