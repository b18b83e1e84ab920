"""Check the actions that a user's controller returns, and convert them to the form that `env.step` takes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.envs.checks.observations import at_index
from dppo.envs.checks.returned import BadResult, leaf_packer
from dppo.envs.spaces import ARRAYS, limits_of, short
from dppo.spaces.spaces import joined

CheckAction = Callable[[Any], Any]
"""Returns an action in the form of its space; raises BadResult, which continues "... returned", if it is invalid."""
CLIP = "Return actions in the units of the environment, and clip them to these bounds"


def action_checker(space: gym.Space[Any], name: str = "") -> CheckAction:
    """Return a function that checks actions of `space`, which is the part with this dotted name of a nested space.

    It accepts lists and other sizes of floats and integers, as long as the numbers are in the space.
    """
    label = "an action"
    if name:
        label = f"an action with a part {name!r}"
    if isinstance(space, gym.spaces.Dict):
        parts = {key: action_checker(part, joined(name, str(key))) for key, part in space.items()}
        return _dict_checker(parts, label)
    if isinstance(space, gym.spaces.Tuple):
        items = [
            action_checker(part, joined(name, str(index)))
            for index, part in enumerate(space.spaces)
        ]
        return _tuple_checker(items, label)
    if isinstance(space, gym.spaces.Discrete):
        check = _array_checker(space, np.dtype(np.int64), label)
        return lambda returned: int(check(returned))
    if isinstance(space, ARRAYS):
        return _array_checker(space, np.dtype(space.dtype), label)
    return _other_checker(space, label)


def _array_checker(space: gym.Space[Any], dtype: np.dtype[Any], label: str) -> CheckAction:
    shape = space.shape or ()
    pack = leaf_packer(dtype, shape, label)
    low, high = limits_of(space)

    def check(returned: Any) -> np.ndarray:
        # rounded before it is compared: 0.1 in float64 is less than a bound of 0.1 in float32
        action = pack(returned).astype(dtype, copy=False)
        is_outside = (action < low) | (action > high)
        if is_outside.any():
            first_outside = np.argwhere(is_outside)[0]
            index = tuple(int(place) for place in first_outside)
            raise BadResult(
                f"{label} that is {action[index]}{at_index(index)}, outside its bounds from {low[index]} to "
                f"{high[index]}. {CLIP}"
            )
        return action

    return check


def _dict_checker(parts: Mapping[Any, CheckAction], label: str) -> CheckAction:
    expected = ", ".join(map(repr, parts))

    def check(returned: Any) -> dict[Any, Any]:
        if not isinstance(returned, Mapping):
            raise BadResult(f"{label} of type {type(returned).__name__} instead of a dict")
        if returned.keys() != parts.keys():
            keys = ", ".join(map(repr, returned))
            raise BadResult(f"{label} with the keys {keys} instead of {expected}")
        return {key: check_part(returned[key]) for key, check_part in parts.items()}

    return check


def _tuple_checker(items: Sequence[CheckAction], label: str) -> CheckAction:
    def check(returned: Any) -> tuple[Any, ...]:
        if not isinstance(returned, tuple | list):
            raise BadResult(f"{label} of type {type(returned).__name__} instead of a tuple")
        if len(returned) != len(items):
            raise BadResult(f"{label} of {len(returned)} items instead of {len(items)}")
        checked = zip(items, returned, strict=True)
        return tuple(check_item(item) for check_item, item in checked)

    return check


def _other_checker(space: gym.Space[Any], label: str) -> CheckAction:
    """Return a check for spaces that are neither arrays nor nested, such as Text, by their own method."""

    def check(returned: Any) -> Any:
        if not space.contains(returned):
            raise BadResult(f"{label} that is {short(returned)}, which is not in {short(space)}")
        return returned

    return check


def action_nearest_zero(space: gym.Space[Any]) -> Any:
    """Return the action of `space` whose numbers are nearest to zero; raise TypeError for other kinds of spaces."""
    if isinstance(space, gym.spaces.Dict):
        return {key: action_nearest_zero(part) for key, part in space.items()}
    if isinstance(space, gym.spaces.Tuple):
        return tuple(action_nearest_zero(part) for part in space.spaces)
    if isinstance(space, ARRAYS):
        nearest = np.clip(0, *limits_of(space)).astype(space.dtype)
        if isinstance(space, gym.spaces.Discrete):
            return int(nearest)
        return nearest
    raise TypeError(f"{short(space)} has no zero")
