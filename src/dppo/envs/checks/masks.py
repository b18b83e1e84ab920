"""Masks of the allowed actions: where they come from, and the forms that they have. All become arrays of booleans."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
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


def mask_source(env: Any, obs: np.dtype[Any], actions: Actions, setting: MaskSetting) -> MaskSource | None:
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
            f"action_mask=auto: the method {METHOD}() of environments of several rows is not called. Return its result "
            f"as info[{MASK!r}] of reset and step, and use `action_mask=info`; or `action_mask=off`."
        )
    return None


def _is_in_observation(obs: np.dtype[Any], actions: Actions) -> bool:
    """Return whether a part of the observation is the mask; raise ConfigError for one of that name that is none."""
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
    names = tuple(parts) if actions.keys is not None else tuple(map(str, range(len(parts))))
    return leaf.names == names and all(map(_fits, (leaf[name] for name in names), parts.values()))


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
        self._actions, self._obs, self._in_obs = spaces.actions, spaces.obs, spaces.mask == "leaf"
        self._method: Callable[[], Any] | None = _method(env) if spaces.mask == "method" else None

    def attach_mask(self, seen: np.ndarray, info: Any, *, ended: bool) -> np.ndarray:
        """Return one observation with the mask of its state, as both are stored; raise as `read` does.

        If the episode has ended, no action follows, so that the mask is not read.
        """
        if self._in_obs:
            if not ended:
                check_allows(masks_of(seen), self._actions)
            return seen
        stored = np.empty((), self._obs)
        stored["obs"] = seen
        stored[MASK] = True if ended else self.read(info)
        return stored

    def read(self, info: Any) -> np.ndarray:
        """Return the mask [M] of the state that came with `info`; raise BadResult if there is none, or it is bad."""
        if self._method is not None:
            return checked_masks(self._method(), (), self._actions)
        given = info.get(MASK) if isinstance(info, Mapping) else None
        if given is None:
            raise BadResult(
                f"an info without {MASK!r}, which action_mask=info reads. Add it to the info of reset and step, or use "
                f"`action_mask=off`"
            )
        return checked_masks(given, (), self._actions)


# ------------------------------------------------------------------ their forms


def checked_masks(given: Any, rows: tuple[int, ...], actions: Actions) -> np.ndarray:
    """Return masks [*rows, M] as booleans; raise BadResult if they have no such form, or one allows no action.

    `given` is one array for all choices in their order; or one array for each element of the actions; or, of a Dict or
    Tuple, a dict or tuple of masks for its parts, as Gymnasium's `space.sample(mask)` takes it. None stands for a part
    of which everything is allowed, and for one without choices.
    """
    allowed = _read(given, rows, actions)
    check_allows(allowed, actions)
    return allowed


def _read(given: Any, rows: tuple[int, ...], actions: Actions, name: str = "") -> np.ndarray:
    """Return masks [*rows, M] as booleans, of the part of the actions with this name."""
    what = f"an action mask for {name!r}" if name else "an action mask"
    size = sum(actions.choices or ())
    if name and given is None:
        return np.ones((*rows, size), bool)
    if name and actions.choices is None:
        raise BadResult(f"{what}, which is {actions} and has no choices to allow. Pass None for it")
    if isinstance(actions, NestedActions) and _is_nested(given, rows, actions):
        parts = _parts_of(given, actions, what)
        return np.concatenate([_read(part, rows, own, joined(name, key)) for key, own, part in parts], axis=-1)
    try:
        masks = _side_by_side(given, len(rows))
    except Exception as error:
        raise BadResult(f"{what} that is not an array ({error})") from None
    if masks.dtype.kind not in "biuf":
        raise BadResult(f"{what} of dtype {masks.dtype} instead of bool")
    if masks.dtype.kind == "f" and np.isnan(masks).any():
        raise BadResult(f"{what} with NaN, which neither allows nor forbids")
    if _is_of_gymnasium(masks, rows, actions):
        both = np.stack([masks != GYMNASIUM_ONLY, masks != 0], axis=-1)
        return both.reshape(*rows, size)
    expected = (*rows, size)
    if masks.shape != expected:
        raise BadResult(f"{what} of shape {masks.shape} instead of {expected}, one element for each choice")
    return masks.astype(bool)


def _is_nested(given: Any, rows: tuple[int, ...], actions: NestedActions) -> bool:
    """Return whether `given` holds a mask for each part of a Dict or Tuple, rather than one array for all choices."""
    if isinstance(given, Mapping):
        return True
    if not isinstance(given, tuple | list) or len(given) != len(actions.parts):
        return False
    return any(_axes(part) > len(rows) for part in given)


def _axes(given: Any) -> float:
    """Return the number of axes of an array or of lists in lists; infinite for no mask at all, and for a dict."""
    if given is None or isinstance(given, Mapping):
        return math.inf
    if isinstance(given, tuple | list):
        return 1 + (_axes(given[0]) if given else 0)
    return np.ndim(given)


def _parts_of(given: Any, actions: NestedActions, what: str) -> Iterator[tuple[str, Actions, Any]]:
    """Yield name, actions and mask of each part; parts without choices may be left out of a dict."""
    parts = dict(_named_parts(actions))
    if not isinstance(given, Mapping):
        given = {str(index): part for index, part in enumerate(given)}
    elif actions.keys is None:
        raise BadResult(f"{what} that is a dict, and the actions are a {actions}. Pass a tuple")
    for key in given.keys() - parts.keys():
        raise BadResult(f"{what} with the unexpected part {key!r}")
    for key, part in parts.items():
        if key not in given and part.choices is not None:
            raise BadResult(f"{what} without part {key!r}")
        yield key, part, given.get(key)


def _named_parts(actions: NestedActions) -> list[tuple[str, Actions]]:
    keys: Sequence[str] = actions.keys if actions.keys is not None else [str(n) for n in range(len(actions.parts))]
    return list(zip(keys, actions.parts, strict=True))


def _side_by_side(given: Any, axes_of_rows: int) -> np.ndarray:
    """Return one array of masks; those for single elements are put side by side."""
    if isinstance(given, tuple | list) and given and _axes(given[0]) > axes_of_rows:
        return np.concatenate([_side_by_side(part, axes_of_rows) for part in given], axis=-1)
    return np.asarray(given)


def _is_of_gymnasium(masks: np.ndarray, rows: tuple[int, ...], actions: Actions) -> bool:
    """Return whether these are masks of Gymnasium for a MultiBinary, which say what an element has to be."""
    if not isinstance(actions, MultiDiscreteActions) or not actions.is_binary:
        return False
    return masks.dtype == np.int8 and masks.shape == (*rows, *actions.shape) and bool(np.isin(masks, (0, 1, 2)).all())


def check_allows(masks: np.ndarray, actions: Actions) -> None:
    """Raise BadResult unless masks [..., M] allow a choice for each element of an action."""
    choices = actions.choices or ()
    any_allowed = np.logical_or.reduceat(masks, np.cumsum((0, *choices[:-1])), axis=-1)
    if not any_allowed.all():
        element = int(np.argwhere(~any_allowed)[0][-1])
        where = f" for {_element_names(actions)[element]}" if len(choices) > 1 else ""
        raise BadResult(f"an action mask that allows no action{where}: all of it is zero")


def _element_names(actions: Actions, name: str = "") -> list[str]:
    """Return how messages call each element that has choices."""
    if isinstance(actions, NestedActions):
        parts = ((joined(name, key), part) for key, part in _named_parts(actions))
        return [element for key, part in parts for element in _element_names(part, key)]
    number = len(actions.choices or ())
    if not name:
        return [f"element {index}" for index in range(number)]
    return [repr(name)] if number == 1 else [f"element {index} of {name!r}" for index in range(number)]
