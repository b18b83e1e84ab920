"""Make one environment from an id, `module:Name-v0`, `module:factory` or a callable; close environments."""

from __future__ import annotations

import copy
import importlib
import inspect
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from dppo.errors import ConfigError, unknown_name

EnvId = str | Callable[..., Any]


def check_env_id(env_id: EnvId) -> None:
    """Check that `env_id` names an environment, without making one.

    Raises:
        ConfigError: it does not; with the nearest name, or the last line of the import's traceback.
    """
    if not isinstance(env_id, str):
        if not callable(env_id):
            raise ConfigError(f"env_id={env_id!r}: is neither a name nor callable. Give an id or a function.")
        return
    _factory(env_id)


def make_env(env_id: EnvId, env_kwargs: dict[str, Any]) -> gym.Env[Any, Any]:
    """Make one environment, with its own copy of `env_kwargs`. Whatever its constructor raises goes through.

    Raises:
        ConfigError: a setting that cannot be copied, or something made that is not one Gymnasium environment.
    """
    factory = env_id if callable(env_id) else _factory(env_id)
    env: Any = factory(**_own_copy(env_kwargs))
    problem = _not_one_environment(env)
    if problem:
        if hasattr(env, "close"):
            close_all([env])
        raise ConfigError(f"env_id={env_id}: made {problem}")
    made: gym.Env[Any, Any] = env
    return made


def close_all(envs: Sequence[gym.Env[Any, Any]]) -> None:
    """Close environments, and print the traceback of each that raises; one that calls sys.exit does not end the run."""
    for env in envs:
        try:
            env.close()
        except (Exception, SystemExit):
            traceback.print_exc()


def _own_copy(env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Copy settings deeply: an environment that changes its own must not change those of another."""
    copied: dict[str, Any] = {}
    memo: dict[int, Any] = {}
    for name, value in env_kwargs.items():
        try:
            copied[name] = copy.deepcopy(value, memo)
        except Exception as error:  # whatever a class of the user's raises
            summary = traceback.format_exception_only(error)[-1].strip()
            raise ConfigError(
                f"env_kwargs: {name}={value!r} cannot be copied, and each environment gets its own copy ({summary}). "
                f"Pass plain data, and make such an object inside the environment."
            ) from None
    return copied


def _not_one_environment(env: Any) -> str | None:
    """Say of something else than a single-agent Gymnasium environment what it is and what to do; None for one."""
    space = getattr(env, "observation_space", None)
    several = hasattr(env, "possible_agents") or hasattr(env, "agents")
    if not isinstance(env, gym.Env) and (several or inspect.isroutine(space)):
        return (
            f"a PettingZoo environment ({_class(env)}), which has several agents. Wrap it as a gymnasium.Env of one "
            f"agent."
        )
    if hasattr(env, "num_envs") and (hasattr(env, "single_observation_space") or not isinstance(env, gym.Env)):
        return (
            f"a vector environment ({_class(env)}) of {env.num_envs}. Return a single environment, and choose how many "
            f"with envs_per_sampler={env.num_envs}."
        )
    if space is None or not hasattr(env, "action_space"):
        return f"{env!r}, which is not a Gymnasium environment. Return one."
    return None


def _class(env: Any) -> str:
    return f"{type(env).__module__}.{type(env).__qualname__}"


def _factory(env_id: str) -> Callable[..., Any]:
    """Return the function that makes the environment of this name."""
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
        from dppo.envs.simulated import register

        register()
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
