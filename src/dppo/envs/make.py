"""One environment from an id, `module:Name-v0`, `module:factory` or a callable; and what its spaces come to."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

from dppo.errors import ConfigError, unknown_name
from dppo.spaces import BoxActions, DiscreteActions, Spaces

EnvId = str | Callable[..., Any]


def check_env_id(env_id: EnvId) -> None:
    """See that `env_id` names an environment, without making one.

    Raises:
        ConfigError: it does not; with the nearest name, or the last line of the import's traceback.
    """
    if not isinstance(env_id, str):
        if not callable(env_id):
            raise ConfigError(f"env_id={env_id!r}: is neither a name nor callable. Give an id or a function.")
        return
    _factory(env_id)


def make_env(env_id: EnvId, env_kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    """Make one environment. Whatever its constructor raises goes through."""
    factory = env_id if callable(env_id) else _factory(env_id)
    env = factory(**env_kwargs)
    if not hasattr(env, "observation_space") or not hasattr(env, "action_space"):
        raise ConfigError(f"env_id={env_id}: gave {env!r}, which is no Gymnasium environment. Return one.")
    made: gym.Env[Any, Any] = env
    return made


def _factory(env_id: str) -> Callable[..., Any]:
    """What makes the environment of this name."""
    module_name, _, name = env_id.rpartition(":")
    module = None
    if module_name:
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit) as error:  # whatever a user's module raises while it is imported
            last = traceback.format_exception_only(error)[-1].strip()
            raise ConfigError(
                f"env_id={env_id}: importing {module_name} failed: {last}. Check the name, and that it is installed "
                f"(here, and on every node)."
            ) from None
    if name.startswith("dppo/"):
        importlib.import_module("dppo.envs.simulated")
    if module is not None and name not in gym.registry and hasattr(module, name):
        factory: Callable[..., Any] = getattr(module, name)
        return factory
    try:
        gym.spec(name)
    except gym.error.Error as error:
        raise ConfigError(_unknown_env(env_id, name, error)) from None
    return lambda **kwargs: gym.make(name, disable_env_checker=True, **kwargs)


def _unknown_env(env_id: str, name: str, error: Exception) -> str:
    if "<" in name:
        return (
            f"env_id={env_id}: was a function of a program, which a name cannot find. Go on in Python: "
            f"dppo.train(config, resume=...)."
        )
    known = unknown_name("environment id", env_id, gym.registry) if ":" not in env_id else ""
    if "Did you mean" in known:
        return f"env_id={known}"
    if ":" in env_id:
        return f"env_id={env_id}: its module has no {name}, and Gymnasium does not know it either. Check the spelling."
    hint = " ".join(str(error).split())
    return (
        f"env_id={env_id}: Gymnasium does not know it ({hint.rstrip('.')}). If a package registers it, write "
        f"package:{name}."
    )


def describe_spaces(env: gym.Env[Any, Any]) -> Spaces:
    """The spaces of `env` as plain data.

    Raises:
        ConfigError: a space that cannot be learnt on; says which part.
    """
    obs, act = env.observation_space, env.action_space
    if not isinstance(obs, gym.spaces.Box):
        raise ConfigError(
            f"observation_space={_short(obs)}: {_culprit(obs)}, and only Box observations are supported so far. "
            f"Wrap the environment with gymnasium.wrappers.FlattenObservation."
        )
    if obs.shape == () or 0 in obs.shape:
        raise ConfigError(f"observation_space={_short(obs)}: has no elements. Give it at least one.")
    actions: DiscreteActions | BoxActions
    if isinstance(act, gym.spaces.Discrete):
        actions = DiscreteActions(int(act.n), int(act.start))
    elif isinstance(act, gym.spaces.Box) and np.issubdtype(act.dtype, np.floating) and act.shape and 0 not in act.shape:
        actions = BoxActions(np.asarray(act.low), np.asarray(act.high))
    else:
        raise ConfigError(
            f"action_space={_short(act)}: {_culprit(act)}, and only Discrete and floating-point Box actions are "
            f"supported so far. Wrap the environment so that its actions are one of these."
        )
    deterministic = not (env.spec is not None and env.spec.nondeterministic)
    return Spaces(obs.shape, str(obs.dtype), actions, deterministic)


def _culprit(space: gym.Space[Any]) -> str:
    """Which part of a space is the unusual one."""
    if isinstance(space, gym.spaces.Dict):
        parts = ", ".join(f"{key!r} is {_short(part)}" for key, part in space.spaces.items())
        return f"it is a Dict ({parts})"
    if isinstance(space, gym.spaces.Tuple):
        parts = ", ".join(f"[{index}] is {_short(part)}" for index, part in enumerate(space.spaces))
        return f"it is a Tuple ({parts})"
    if isinstance(space, gym.spaces.Box):
        return f"it is a Box of {space.dtype} with shape {space.shape}"
    return f"it is a {type(space).__name__}"


def _short(space: gym.Space[Any]) -> str:
    text = " ".join(str(space).split())
    return text if len(text) <= 80 else text[:77] + "..."
