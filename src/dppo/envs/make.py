"""Create one environment from an id, `module:Name-v0`, `module:factory` or a callable, and in wrappers."""

import copy
import difflib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium as gym
from gymnasium.wrappers import TimeLimit

from dppo.errors import ConfigError, unknown_name
from dppo.files import make_scratch_dir
from dppo.process_state.borders import user_code
from dppo.signals import CLOSING_S, at_most
from dppo.user_code import import_path, imported, imported_module, in_a_line

EnvId = str | Callable[..., Any]
ONE_AGENT = (
    "Train one agent: write a gymnasium.Env whose step takes the action of that agent and computes those of the others."
)


def check_env_id(env_id: EnvId) -> None:
    """Raise ConfigError, with the closest known name or the last line of a failed import, if `env_id` names nothing."""
    if isinstance(env_id, str):
        _factory(env_id)
    elif not callable(env_id):
        raise ConfigError(f"env_id={env_id!r}: is neither a string nor callable. Pass an id or a function.")


def make_env(
    env_id: EnvId,
    env_kwargs: dict[str, Any],
    place: tuple[int, int] = (0, 0),
    most_steps: int | None = None,
    *,
    rows: int = 0,
    seed: int = 0,
) -> Any:
    """Create one environment with its own copy of `env_kwargs`; exceptions of its constructor are not caught.

    A callable of the user gets further arguments if it has parameters of their names: `sampler_id` and `env_index`,
    from `place`; `scratch_dir`, a folder that is removed when the environment is closed; without a default value also
    `render_mode`, `num_envs` and `seed`. Episodes are truncated after `most_steps`.

    Raise ConfigError if an argument cannot be copied, or the result is not a single Gymnasium environment. With `rows`,
    it may be one of so many rows instead, which all begin with `seed`.
    """
    factory = env_id if callable(env_id) else _factory(env_id)
    needed = {"render_mode": None, "num_envs": max(1, rows), "seed": seed}  # render_mode: in a window, it is given
    with ExitStack() as stack:
        asked = _asked_for(factory, env_kwargs, place, needed, stack)
        env: Any = _single(factory(**_own_copy(env_kwargs), **asked), f"env_id={import_path(env_id)}", joint=rows > 0)
        if "scratch_dir" in asked:
            stack.callback(env.close)
            # An environment may close itself in its reset, to restart its simulator: its folder stays then.
            env = gym.Wrapper(env) if isinstance(env, gym.Env) and not joint_kind(env) else _Held(env)
            env.close = stack.pop_all().close
    if most_steps is not None and joint_kind(env):
        close_all([env])
        raise ConfigError("replay_limit: truncates single environments, and this one has several rows. Leave it out.")
    if most_steps is None:
        return env
    if not isinstance(env, gym.Env):
        close_all([env])
        raise ConfigError(
            "replay_limit: truncates only a gymnasium.Env. Derive the environment from it, or leave it out."
        )
    return TimeLimit(env, most_steps)


def takes(env_id: str, name: str) -> bool:
    """Return whether what makes `env_id` has a parameter of this name, or takes any."""
    found = inspect.signature(_factory(env_id)).parameters
    return name in found or any(one.kind is one.VAR_KEYWORD for one in found.values())


class _Held:
    """An environment that is no gymnasium.Env, or has several rows, with a `close` of its own."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.env, name)


def _asked_for(
    factory: Any, given: dict[str, Any], place: tuple[int, int], needed: dict[str, Any], stack: ExitStack
) -> dict[str, Any]:
    """Return what `factory` has parameters for and is not `given`; one made from a registered id has none."""
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # it is written in C
        return {}
    names = parameters.keys() - given.keys() - getattr(factory, "keywords", {}).keys()  # those of functools.partial
    asked: dict[str, Any] = {"sampler_id": place[0], "env_index": place[1]}
    asked |= {"scratch_dir": make_scratch_dir(stack)} if "scratch_dir" in names else {}
    required = {name for name in names if parameters[name].default is inspect.Parameter.empty}
    asked |= {name: value for name, value in needed.items() if name in required}
    return {name: value for name, value in asked.items() if name in names}


def in_wrappers(env: Any, wrappers: Iterable[Any]) -> Any:
    """Return `env` in `wrappers`, the first one innermost; close it, and raise as `make_env`, if one of them fails."""
    for named in wrappers:
        try:
            env = _single(wrapper_of(named)(env), f"wrappers={import_path(named)}")
        except BaseException:
            close_all([env])
            raise
    return env


def wrapper_of(named: Any) -> Callable[[Any], Any]:
    """Return a wrapper by its import path, or itself; raise ConfigError if it cannot be imported or called."""
    try:
        wrapper = imported(named, "Wrapper") if isinstance(named, str) else named
    except ImportError as error:
        raise ConfigError(f"wrappers={named}: {error}.") from None
    if not callable(wrapper):
        raise ConfigError(f"wrappers={import_path(named)}: is {wrapper!r}. Name a class or function env -> env.")
    return wrapper


def joint_kind(env: Any) -> str | None:
    """Return whether `env` steps several rows at once: "vector", "agents", or None."""
    if inspect.isclass(env) or not hasattr(env, "step"):
        return None
    if hasattr(env, "possible_agents") and not hasattr(env, "agent_iter") and not isinstance(env, gym.Env):
        return "agents"
    vector = all(hasattr(env, name) for name in ("num_envs", "single_observation_space", "single_action_space"))
    return "vector" if vector else None


def _single(env: Any, named: str, *, joint: bool = False) -> Any:
    """Return `env`; close it and raise ConfigError if it is neither a single environment nor, with `joint`, several."""
    problem = None if joint and joint_kind(env) else _not_one_environment(env)
    if problem:
        if hasattr(env, "close"):
            close_all([env])
        raise ConfigError(f"{named}: made {problem}")
    return env


def close_all(envs: Sequence[gym.Env[Any, Any]]) -> None:
    """Close environments and print the traceback of each that raises, be it SystemExit."""
    for env in envs:
        try:
            with user_code(f"closing {type(env).__name__}"):
                env.close()
        except (Exception, SystemExit):
            traceback.print_exc()


def close_in_time(envs: Sequence[gym.Env[Any, Any]]) -> None:
    """Close environments of this process; leave one alone that does not close in time, with a traceback."""
    with at_most(CLOSING_S):
        close_all(envs)


def _own_copy(env_kwargs: dict[str, Any]) -> dict[str, Any]:
    """Copy arguments deeply, so that an environment that changes its own does not change those of another."""
    copied: dict[str, Any] = {}
    memo: dict[int, Any] = {}
    for name, value in env_kwargs.items():
        try:
            copied[name] = copy.deepcopy(value, memo)
        except Exception as error:  # a class of the user's may raise anything
            raise ConfigError(
                f"env_kwargs: {name}={value!r} cannot be copied, but each environment needs its own copy "
                f"({in_a_line(error)}). Pass plain data, and create such objects inside the environment."
            ) from None
    return copied


def _not_one_environment(env: Any) -> str | None:
    """Describe something that is not a single Gymnasium environment, with advice; return None if it is one."""
    kind, is_env = f"{type(env).__module__}.{type(env).__qualname__}", isinstance(env, gym.Env)
    space = getattr(env, "observation_space", None)
    several = hasattr(env, "possible_agents") or hasattr(env, "agents")
    missing = [name for name in ("observation_space", "action_space") if getattr(env, name, None) is None]
    problem = None
    if inspect.isclass(env) or inspect.isroutine(env):
        problem = f"{env!r}, which is not an environment. Return the result of calling it."
    elif joint_kind(env) == "agents":
        problem = f"a PettingZoo environment ({kind}), which has several agents, and is not taken here."
    elif not is_env and inspect.isroutine(space) and not hasattr(env, "agent_iter"):
        problem = f"a {kind}, with spaces of several agents. If it is a parallel environment, set its possible_agents."
    elif not is_env and (several or inspect.isroutine(space)):
        problem = (
            f"a PettingZoo environment ({kind}) that is not a parallel one. Return "
            f"pettingzoo.utils.aec_to_parallel(env), if its agents may act at the same time. Or: {ONE_AGENT}"
        )
    elif any(base.__name__ == "MultiAgentEnv" for base in type(env).__mro__):
        problem = f"a multi-agent environment of RLlib ({kind}). {ONE_AGENT}"
    elif space is None and hasattr(env, "observation_spec") and hasattr(env, "action_spec"):
        problem = f"a dm_env environment ({kind}). Wrap it with shimmy.DmControlCompatibilityV0."
    elif hasattr(env, "num_envs") and (hasattr(env, "single_observation_space") or not is_env):
        problem = (
            f"a vector environment ({kind}) of {env.num_envs}. Return a single environment here; training also takes "
            f"vectors with the API of gymnasium.vector, with `envs_per_sampler={env.num_envs}`."
        )
    elif is_env and missing:
        problem = f"a {kind} without {missing[0]}. Set self.{missing[0]} in its constructor."
    elif missing or not hasattr(env, "reset") or not hasattr(env, "step"):
        problem = f"{env!r}, which is not a Gymnasium environment. Return a gymnasium.Env."
    return problem


def _factory(env_id: str) -> Callable[..., Any]:
    module_name, _, name = env_id.rpartition(":")
    if module_name.endswith(".py") or "/" in module_name or (not module_name and name.endswith(".py")):
        file = Path(module_name or name)
        where = f", with PYTHONPATH={file.parent}" if file.parent != Path() else ", in the folder of the file"
        made = name if module_name else "make"
        raise ConfigError(
            f"env_id={env_id}: is a file. Write {file.stem}:{made}, its module and what makes the environment{where}."
        )
    advice = (
        f"Check the name, and that the module is installed here and on every node. Python looks in {os.getcwd()}, in "
        f"PYTHONPATH, and among the packages of {sys.executable}."
    )
    try:
        module = imported_module(module_name, advice) if module_name else None
    except ImportError as error:
        raise ConfigError(f"env_id={env_id}: {error}") from None
    if name.startswith("dppo/"):
        from dppo.envs.simulated import register

        register()
    if name.startswith("ALE/") and importlib.util.find_spec("ale_py"):
        imported_module("ale_py", advice)  # which registers its games
    if module is not None and name not in gym.registry and hasattr(module, name):
        factory: Callable[..., Any] = getattr(module, name)
        if not callable(factory):
            raise ConfigError(f"env_id={env_id}: is {factory!r}. Name a function or class that returns an environment.")
        return factory
    try:
        gym.spec(name)
    except gym.error.Error as error:
        raise ConfigError(_unknown_env(env_id, name, error)) from None
    return partial(_make_registered, name)


def _make_registered(name: str, **kwargs: Any) -> Any:
    try:
        return gym.make(name, **{"disable_env_checker": True, **kwargs})
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"env_id={name}: {error}. Use the pip of {sys.executable}.") from None


def _unknown_env(env_id: str, name: str, error: Exception) -> str:
    if "<" in name:
        return (
            f"env_id={env_id}: was a function defined in a program, which cannot be found by name. Continue in Python: "
            f"dppo.train(config, resume=...)."
        )
    known = unknown_name("environment id", env_id, gym.registry) if ":" not in env_id else ""
    if "Did you mean" in known:
        return f"env_id={known}"
    if ":" in env_id:
        return f"env_id={env_id}: {_unknown_in_module(env_id.rpartition(':')[0], name)}"
    hint = " ".join(str(error).split())
    fact = f"env_id={env_id}: is not registered with Gymnasium ({hint.rstrip('.')})."
    if name.startswith("ALE/"):
        return f"{fact} Install ale-py, and write ale_py:{name}."
    if name.isidentifier() and importlib.util.find_spec(name) is not None:
        return f"{fact} It is a module: write {name}:make, if make is its function that returns the environment."
    start = re.split("[-/]", name)[0].lower()
    packages = (package for package in metadata.packages_distributions() if package.lower().startswith(start))
    return f"{fact} If a package registers it, write {next(packages, 'package')}:{name}."


def _unknown_in_module(module: str, name: str) -> str:
    if not (name and module):
        return f"names no environment. Write {module or 'module'}:make, if make is the function that returns it."
    functions = [known for known, value in vars(sys.modules[module]).items() if callable(value) and known[:1] != "_"]
    close = difflib.get_close_matches(name, [*functions, *gym.registry], n=1)
    remedy = f"Did you mean {module}:{close[0]}?" if close else "Check the spelling."
    return f"the module has no {name} and registers no such environment. {remedy}"
