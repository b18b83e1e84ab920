"""Action masks: which of the choices of an action an environment allows in its current state."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from dppo.envs.checks.faults import BadResult
from dppo.errors import ConfigError
from dppo.spaces.actions import Actions
from dppo.spaces.spaces import MASK, MaskSource, Spaces, masks_of

MaskSetting = Literal["auto", "info", "off"]
METHOD = "action_masks"


def mask_source(env: Any, obs: np.dtype[Any], actions: Actions, setting: MaskSetting) -> MaskSource | None:
    """Return where the masks of `env` come from; None if it has none, or they are not used.

    The setting auto takes a leaf `action_mask` of a Dict observation, else the method `action_masks`. Raise ConfigError
    if masks are asked for, and these actions cannot have any.
    """
    choices = actions.choices
    if setting == "info":
        if choices is None:
            raise ConfigError(
                f"action_mask=info: has no effect on {actions} actions. Masks are for Discrete, MultiDiscrete "
                f"and MultiBinary. Leave `action_mask` out."
            )
        return "info"
    if choices is None or setting == "off":
        return None
    if obs.names is not None and MASK in obs.names and len(obs.names) > 1:
        leaf = obs[MASK]
        if leaf.names is None and leaf.base.kind in "biuf" and leaf.shape == (sum(choices),):
            return "leaf"
    return "method" if callable(_method(env)) else None


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

    def beside(self, seen: np.ndarray, info: Any, *, ended: bool) -> np.ndarray:
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


def checked_masks(given: Any, rows: tuple[int, ...], actions: Actions) -> np.ndarray:
    """Return masks [*rows, M] as booleans; raise BadResult if they are not such arrays, or one allows no action.

    `given` is one array, or one for each element of the actions.
    """
    try:
        several = isinstance(given, tuple | list) and len(given) > 0 and np.ndim(given[0]) == len(rows) + 1
        masks = np.concatenate([np.asarray(part) for part in given], axis=-1) if several else np.asarray(given)
    except Exception as error:
        raise BadResult(f"an action mask that is not an array ({error})") from None
    if masks.dtype.kind not in "biuf":
        raise BadResult(f"an action mask of dtype {masks.dtype} instead of bool")
    expected = (*rows, sum(actions.choices or ()))
    if masks.shape != expected:
        raise BadResult(f"an action mask of shape {masks.shape} instead of {expected}, one element for each choice")
    allowed: np.ndarray = masks.astype(bool)
    check_allows(allowed, actions)
    return allowed


def check_allows(masks: np.ndarray, actions: Actions) -> None:
    """Raise BadResult unless masks [..., M] allow a choice for each element of an action."""
    choices = actions.choices or ()
    any_allowed = np.logical_or.reduceat(masks, np.cumsum((0, *choices[:-1])), axis=-1)
    if not any_allowed.all():
        element = f" for element {int(np.argwhere(~any_allowed)[0][-1])}" if len(choices) > 1 else ""
        raise BadResult(f"an action mask that allows no action{element}: all of it is zero")
