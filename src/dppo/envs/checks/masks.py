"""Masks of the allowed actions: where they come from, and the forms that they have. All become arrays of booleans."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from dppo.envs.checks.returned import BadResult
from dppo.errors import ConfigError
from dppo.spaces.actions import Actions, MultiDiscreteActions, NestedActions
from dppo.spaces.spaces import MASK, MaskSource, Spaces, joined, masks_of

MaskSetting = Literal["auto", "info", "off"]
METHOD = "action_masks"
OFF = "or use `action_mask=off` in a new run"
GYMNASIUM_ONLY = 1  # in a mask of Gymnasium for a MultiBinary: this element must be 1; 0: it must be 0; 2: both may be


def mask_source(
    env: Any, obs: np.dtype[Any], actions: Actions, setting: MaskSetting
) -> MaskSource | None:
    """Return where the masks of `env` come from; None if it has none, or they are not used.

    The setting auto takes a part `action_mask` of a Dict observation, else the method `action_masks`. Raise ConfigError
    if there is a mask that does not fit, or masks are asked for, and these actions cannot have any.
    """
    if setting == "off":
        return None
    if setting == "info":
        if actions.choices is None:
            raise ConfigError(
                f"action_mask=info: has no effect on {actions} actions. Masks are for Discrete, MultiDiscrete "
                f"and MultiBinary, also as parts of a Dict or Tuple. Leave `action_mask` out."
            )
        return "info"
    if _is_in_observation(obs, actions):
        return "leaf"
    method = _method(env)
    if method is not None:
        _check_method(method, actions)
        return "method"
    if getattr(env, "unread_masks", False):
        raise ConfigError(
            f"action_mask=auto: the method {METHOD}() of environments with sub-environments is not called. Return its "
            f"result as info[{MASK!r}] of reset and step, and use `action_mask=info`; or `action_mask=off`."
        )
    return None


def _is_in_observation(obs: np.dtype[Any], actions: Actions) -> bool:
    """Return whether a part of the observation is the mask; raise ConfigError if it is only named like one."""
    names = obs.names or ()
    if MASK not in names or len(names) == 1:
        return False
    if actions.choices is None:
        raise _without_choices(f"the part {MASK!r} of the observation", actions)
    if not _fits(obs[MASK], actions):
        raise ConfigError(
            f"action_mask=auto: the part {MASK!r} of the observation does not fit {actions} actions. Make it one array "
            f"of shape ({sum(actions.choices)},){_as_parts(actions)}, or use `action_mask=off` in a new run: an "
            f"observation like any other."
        )
    return True


def _as_parts(actions: Actions) -> str:
    if not isinstance(actions, NestedActions):
        return ""
    kind = "Tuple" if actions.keys is None else "Dict"
    return f", or a {kind} of one array for each part that has choices, in the order of the action"


def _fits(leaf: np.dtype[Any], actions: Actions) -> bool:
    """Return whether a part of the observation holds one number for each choice, nested as the actions are or flat."""
    if leaf.names is None:
        return leaf.base.kind in "biuf" and leaf.shape == (sum(actions.choices or ()),)
    if not isinstance(actions, NestedActions):
        return False
    parts = {key: part for key, part in _named_parts(actions) if part.choices is not None}
    names = list(parts)
    if actions.keys is None:
        names = [str(index) for index in range(len(parts))]
    if list(leaf.names) != names:
        return False
    return all(_fits(leaf[name], part) for name, part in zip(names, parts.values(), strict=True))


def _check_method(method: Any, actions: Actions) -> None:
    """Raise ConfigError for what is called `action_masks` and is not a method, or for actions without choices."""
    if actions.choices is None:
        raise _without_choices(f"the method {METHOD}() of the environment", actions)
    if not callable(method):
        raise ConfigError(
            f"action_mask=auto: {METHOD} of the environment is a {type(method).__name__}, and not a method. Make it a "
            f"method without arguments that returns the mask, {OFF}."
        )


def _without_choices(mask: str, actions: Actions) -> ConfigError:
    return ConfigError(
        f"action_mask=auto: {mask} has no effect on {actions} actions, which have no choices to allow. Leave it out of "
        f"the environment, {OFF}."
    )


def _method(env: Any) -> Any:
    try:
        return env.get_wrapper_attr(METHOD)
    except AttributeError:
        return getattr(env, METHOD, None)


class MaskReader:
    """Reads and checks the masks of one environment."""

    def __init__(self, env: Any, spaces: Spaces) -> None:
        self._actions = spaces.actions
        self._obs = spaces.obs
        self._in_obs = spaces.mask == "leaf"
        self._method: Callable[[], Any] | None = None
        if spaces.mask == "method":
            self._method = _method(env)

    def attach_mask(self, obs: np.ndarray, info: Any, *, ended: bool) -> np.ndarray:
        """Return one observation with the mask of its state, as both are stored; raise as `read` does.

        If the episode has ended, no action follows, so that the mask is not read.
        """
        if self._in_obs:
            if not ended:
                check_allows(masks_of(obs), self._actions)
            return obs
        stored = np.empty((), self._obs)
        stored["obs"] = obs
        stored[MASK] = ended or self.read(info)
        return stored

    def read(self, info: Any) -> np.ndarray:
        """Return the mask [M] of the state that came with `info`; raise BadResult if there is none, or it is bad."""
        if self._method is not None:
            return checked_masks(self._method(), (), self._actions)
        mask = None
        if isinstance(info, Mapping):
            mask = info.get(MASK)
        if mask is None:
            raise BadResult(
                f"an info without {MASK!r}, which action_mask=info reads. Add it to the info of reset and step, or use "
                f"`action_mask=off`"
            )
        return checked_masks(mask, (), self._actions)


# ------------------------------------------------------------------ their forms


def checked_masks(masks: Any, rows: tuple[int, ...], actions: Actions) -> np.ndarray:
    """Return masks [*rows, M] as booleans; raise BadResult if they have no such form, or one allows no action.

    `masks` is one array for all choices in their order; or one array for each element of the actions; or, of a Dict or
    Tuple, a dict or tuple of masks for its parts, as Gymnasium's `space.sample(mask)` takes it. None stands for a part
    of which everything is allowed, and for one without choices.
    """
    allowed = _read(masks, rows, actions)
    check_allows(allowed, actions)
    return allowed


def _read(masks: Any, rows: tuple[int, ...], actions: Actions, name: str = "") -> np.ndarray:
    """Return masks [*rows, M] as booleans, of the part of the actions with this name."""
    label = "an action mask"
    if name:
        label += f" for {name!r}"
    expected = (*rows, sum(actions.choices or ()))
    if name and masks is None:
        return np.ones(expected, bool)
    if name and actions.choices is None:
        raise BadResult(
            f"{label}, which is {actions} and has no choices to allow. Pass None for it"
        )
    if isinstance(actions, NestedActions) and _is_nested(masks, rows, actions):
        parts = [
            _read(part, rows, inner, joined(name, key))
            for key, inner, part in _parts_of(masks, actions, label)
        ]
        return np.concatenate(parts, axis=-1)
    try:
        array = _side_by_side(_completed(masks, rows, actions), len(rows))
    except Exception as error:
        raise BadResult(f"{label} that is not an array ({error})") from None
    if array.dtype.kind not in "biuf":
        raise BadResult(f"{label} of dtype {array.dtype} instead of bool")
    if array.dtype.kind == "f" and np.isnan(array).any():
        raise BadResult(f"{label} with NaN, which neither allows nor forbids")
    if _is_of_gymnasium(array, rows, actions):
        return np.stack([array != GYMNASIUM_ONLY, array != 0], axis=-1).reshape(expected)
    if array.shape != expected:
        raise BadResult(
            f"{label} of shape {array.shape} instead of {expected}, one element for each choice"
        )
    return array.astype(bool)


def _completed(masks: Any, rows: tuple[int, ...], actions: Actions) -> Any:
    """Return masks of which None, for an element that may have any choice, is replaced."""
    choices = actions.choices or ()
    if not isinstance(masks, tuple | list) or len(masks) != len(choices):
        return masks
    return [
        np.ones((*rows, number), bool) if mask is None else mask
        for mask, number in zip(masks, choices, strict=True)
    ]


def _is_nested(masks: Any, rows: tuple[int, ...], actions: NestedActions) -> bool:
    """Return whether `masks` holds a mask for each part of a Dict or Tuple, rather than one array for all choices."""
    if isinstance(masks, Mapping):
        return True
    if not isinstance(masks, tuple | list) or len(masks) != len(actions.parts):
        return False
    return any(_num_axes(part) > len(rows) for part in masks)


def _num_axes(masks: Any) -> float:
    """Return the number of axes of an array or of lists in lists; infinite for no mask at all, and for a dict."""
    if masks is None or isinstance(masks, Mapping):
        return math.inf
    if isinstance(masks, tuple | list) and masks:
        return 1 + _num_axes(masks[0])
    return np.ndim(masks)


def _parts_of(masks: Any, actions: NestedActions, label: str) -> Iterator[tuple[str, Actions, Any]]:
    """Yield name, actions and mask of each part; parts without choices may be left out of a dict."""
    parts = dict(_named_parts(actions))
    if not isinstance(masks, Mapping):
        masks = {str(index): part for index, part in enumerate(masks)}
    elif actions.keys is None:
        raise BadResult(f"{label} that is a dict, and the actions are a {actions}. Pass a tuple")
    for key in masks.keys() - parts.keys():
        raise BadResult(f"{label} with the unexpected part {key!r}")
    for key, part in parts.items():
        if key not in masks and part.choices is not None:
            raise BadResult(f"{label} without part {key!r}")
        yield key, part, masks.get(key)


def _named_parts(actions: NestedActions) -> list[tuple[str, Actions]]:
    keys = actions.keys
    if keys is None:
        keys = tuple(map(str, range(len(actions.parts))))
    return list(zip(keys, actions.parts, strict=True))


def _side_by_side(masks: Any, axes_of_rows: int) -> np.ndarray:
    """Return one array of masks; masks for single elements are put side by side."""
    if isinstance(masks, tuple | list) and masks and _num_axes(masks[0]) > axes_of_rows:
        return np.concatenate([_side_by_side(part, axes_of_rows) for part in masks], axis=-1)
    return np.asarray(masks)


def _is_of_gymnasium(masks: np.ndarray, rows: tuple[int, ...], actions: Actions) -> bool:
    """Return whether these are masks of Gymnasium for a MultiBinary, which fix the value of an element."""
    if not isinstance(actions, MultiDiscreteActions) or not actions.is_binary:
        return False
    return (
        masks.dtype == np.int8
        and masks.shape == (*rows, *actions.shape)
        and bool(np.isin(masks, (0, 1, 2)).all())
    )


def check_allows(masks: np.ndarray, actions: Actions) -> None:
    """Raise BadResult unless masks [..., M] allow a choice for each element of an action."""
    choices = actions.choices or ()
    any_allowed = np.logical_or.reduceat(masks, np.cumsum((0, *choices[:-1])), axis=-1)
    if not any_allowed.all():
        element = int(np.argwhere(~any_allowed)[0][-1])
        mask = "an action mask that allows no action"
        if len(choices) > 1:
            mask += f" for {_element_names(actions)[element]}"
        raise BadResult(f"{mask}: all of it is zero")


def _element_names(actions: Actions, name: str = "") -> list[str]:
    if isinstance(actions, NestedActions):
        parts = ((joined(name, key), part) for key, part in _named_parts(actions))
        return [element for key, part in parts for element in _element_names(part, key)]
    num_elements = len(actions.choices or ())
    if name and num_elements == 1:
        return [repr(name)]
    elements = [f"element {index}" for index in range(num_elements)]
    if not name:
        return elements
    return [f"{element} of {name!r}" for element in elements]
