"""Refuse an environment that is in use already, such as one that a function of the user returns in each call."""

import weakref
from contextlib import suppress
from typing import Any

from dppo.errors import ConfigError

_in_use: dict[int, weakref.ref[Any]] = {}  # id of an unwrapped environment -> the environment


def begin_use(env: Any, fact: str, remedy: str = "Create a new environment in each call.") -> None:
    """Note that `env` is used from now on; raise ConfigError if it is in use already.

    Args:
        fact: the start of the error, such as "env_id=mysim:make: returned".
        remedy: the end of the error.
    """
    inner = _unwrapped(env)
    in_use = _in_use.get(id(inner))
    if in_use is not None and in_use() is inner:
        raise ConfigError(
            f"{fact} an environment that this process already uses, so that two episodes would share it. {remedy}"
        )
    with suppress(TypeError):  # a class with __slots__ has no weak references
        _in_use[id(inner)] = weakref.ref(inner)


def end_use(env: Any) -> None:
    """Note that `env` is closed, or used for something else."""
    _in_use.pop(id(_unwrapped(env)), None)


def _unwrapped(env: Any) -> Any:
    try:
        return env.unwrapped
    except Exception:  # it is no gymnasium.Env, or its property raises
        return env
