"""Convert Gymnasium's action spaces to plain data, and refuse those that are not supported, with advice."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.spaces.advice import MOST_CHOICES, chosen, kind_of, short
from dppo.envs.spaces.leaves import space_parts
from dppo.errors import ConfigError
from dppo.spaces.actions import Actions, Bounds, BoxActions, DiscreteActions, MultiDiscreteActions, NestedActions, boxes


def actions_of(space: gym.Space[Any], bounds: Bounds = "clip") -> Actions:
    """Return an action space as plain data.

    Args:
        bounds: how real-valued actions are brought within their bounds.

    Raises:
        ConfigError: the space is not supported, or has no bounds that `bounds` needs. The text says what helps.
    """
    actions = _converted(space, bounds, "action_space")
    real = list(boxes(actions))
    if bounds != "clip" and not real:
        raise ConfigError(
            f"action_bounds={bounds}: has no effect on {actions} actions, which are not real numbers. Leave "
            f"action_bounds out."
        )
    for box in real:
        infinite = np.flatnonzero(~(np.isfinite(box.low) & np.isfinite(box.high)))
        if bounds != "clip" and len(infinite):
            at = int(infinite[0])
            raise ConfigError(
                f"action_bounds={bounds}: needs finite bounds, and element {at} of an action lies between "
                f"{box.low.flat[at]} and {box.high.flat[at]}. Use action_bounds=clip, or give the Box finite bounds."
            )
    return actions


def _converted(space: gym.Space[Any], bounds: Bounds, name: str) -> Actions:
    what = f"{name}={short(space)}"
    check_package(space, what)
    if 0 in (space.shape or ()):
        raise ConfigError(f"{what}: has no elements. Give it at least one.")
    if isinstance(space, gym.spaces.Discrete):
        return DiscreteActions(int(space.n), int(space.start))
    if isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating):
        return BoxActions(np.asarray(space.low), np.asarray(space.high), bounds)
    choices = _choices(space)
    if choices is not None:
        return choices
    inner = dict(space_parts(space) or ())
    keyed = isinstance(space, gym.spaces.Dict) and all(isinstance(key, str) for key in space.spaces)
    if inner and (keyed or isinstance(space, gym.spaces.Tuple)):
        parts = [_converted(part, bounds, f"{name}[{repr(key) if keyed else key}]") for key, part in inner.items()]
        return NestedActions(tuple(parts), tuple(inner) if keyed else None)
    raise ConfigError(f"{what}: it is {kind_of(space)}, which is not supported. {chosen(space)}")


def _choices(space: gym.Space[Any]) -> MultiDiscreteActions | None:
    """Return an array of choices as plain data; None if `space` is none, or a Box of too many numbers."""
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


def check_package(space: Any, what: str) -> None:
    """Refuse a space of the package gym.

    Raises:
        ConfigError: it is one.
    """
    if type(space).__module__.partition(".")[0] == "gym":
        raise ConfigError(
            f"{what}: is a space of the package gym, which Gymnasium has replaced. Import gymnasium in the "
            f"environment, or wrap it with shimmy.GymV26CompatibilityV0 (gym 0.26) or shimmy.GymV21CompatibilityV0 "
            f"(older)."
        )
