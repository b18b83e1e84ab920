"""Find the function or class that makes an environment by its id, and advise on ids that cannot be found."""

import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gymnasium as gym

from dppo.errors import ConfigError, unknown_name
from dppo.user_code import as_module, imported_module, program_definition_fact, spelled_alike

EnvId = str | Callable[..., Any]
ATARI_ID = re.compile(r"([A-Z][A-Za-z]*?)(NoFrameskip|Deterministic)?-v\d")
"""An id of Gym for a game of Atari, or without its suffix for anything."""


def check_env_id(env_id: EnvId) -> None:
    """Raise ConfigError, with the closest known name or the last line of a failed import, if `env_id` names nothing."""
    if isinstance(env_id, str):
        factory_of(env_id)
    elif not callable(env_id):
        raise ConfigError(
            f"env_id={env_id!r}: is neither a string nor callable. Pass an id or a function."
        )


def takes(env_id: str, name: str) -> bool:
    """Return whether the factory of `env_id` accepts an argument of this name."""
    parameters = inspect.signature(factory_of(env_id)).parameters
    return name in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )


def solved_at(env_name: str) -> float | None:
    """Return the mean return from which on Gymnasium counts a task as solved; None if that is not known.

    Imports nothing: a name `module:Name-v0` is known once its module has been imported.
    """
    spec = gym.registry.get(env_name.rpartition(":")[2])
    if spec is None:
        return None
    return spec.reward_threshold


def factory_of(env_id: str) -> Callable[..., Any]:
    """Return the function or class that makes the environments of this id; raise ConfigError if there is none."""
    module_name, _, name = env_id.rpartition(":")
    file_name = module_name or name
    is_file = file_name.endswith(".py") or "/" in module_name
    if is_file:
        factory_name = name if module_name else "make"
        raise ConfigError(f"env_id={env_id}: {as_module(Path(file_name), factory_name)}.")
    try:
        module = imported_module(module_name) if module_name else None
    except ImportError as error:
        raise ConfigError(f"env_id={env_id}: {error}") from None
    if name.startswith("dppo/"):
        from dppo.envs.simulated import register

        register()
    if name.startswith("ALE/") and importlib.util.find_spec("ale_py"):
        imported_module("ale_py")  # the import registers its games
    if module is not None and name not in gym.registry and hasattr(module, name):
        factory: Callable[..., Any] = getattr(module, name)
        if not callable(factory):
            raise ConfigError(
                f"env_id={env_id}: is {factory!r}. Name a function or class that returns an environment."
            )
        return factory
    try:
        gym.spec(name)
    except gym.error.Error as error:
        raise ConfigError(_unknown_env(env_id, name, error)) from None
    return partial(make_registered, name)


def make_registered(name: str, **kwargs: Any) -> Any:
    """Make an environment that is registered with Gymnasium; raise ConfigError if it needs a missing package."""
    try:
        return gym.make(name, **{"disable_env_checker": True, **kwargs})
    except gym.error.DependencyNotInstalled as error:
        raise ConfigError(f"env_id={name}: {error}. Use the pip of {sys.executable}.") from None


def _unknown_env(env_id: str, name: str, error: Exception) -> str:
    """Return the message for an id whose `name` Gymnasium rejects with `error`, with the advice that fits best."""
    if "<" in name:  # such as `main.<locals>.make` or `<lambda>`
        return (
            f"env_id={env_id}: was a function defined in a program, which cannot be found by name. Continue in Python: "
            f"dppo.train(config, resume=...)."
        )
    if ":" in env_id:
        module_name = env_id.rpartition(":")[0]
        return f"env_id={env_id}: {_unknown_in_module(module_name, name)}"
    suggestion = unknown_name("environment id", env_id, gym.registry)
    if "Did you mean" in suggestion:
        return f"env_id={suggestion}"
    reason = " ".join(str(error).split()).rstrip(".")
    fact = f"env_id={env_id}: is not registered with Gymnasium ({reason})."
    if name.startswith("ALE/"):
        return f"{fact} Install ale-py, and write ale_py:{name}."
    return f"{fact} {_advice_on_module(name)}"


def _advice_on_module(name: str) -> str:
    """Return how to write an id that Gymnasium does not know, if it names a module, an object in one, or neither."""
    if Path(name).suffix in (".yaml", ".yml", ".toml"):
        return f"Pass a file of settings as --config {name}."
    game = ATARI_ID.fullmatch(name)
    if game is not None and (game[2] or _is_atari_game(game[1])):
        return f"Games of Atari have the ids of ale-py. Write ALE/{game[1]}-v5."
    parts = name.split(".")
    if all(part.isidentifier() for part in parts) and importlib.util.find_spec(parts[0]):
        if len(parts) == 1:
            return f"It is a module: write {name}:make, if make is its function that returns the environment."
        module_name = ".".join(parts[:-1])
        return f"If {parts[-1]} is in the module {module_name}, write {module_name}:{parts[-1]}."
    # an installed package with a similar name, such as minigrid for MiniGrid-Empty-5x5-v0
    first_word = re.split("[-/]", name)[0].lower()
    similar = (
        package
        for package in metadata.packages_distributions()
        if package.lower().startswith(first_word)
    )
    package = next(similar, "package")
    return f"If a package registers it, write {package}:{name}."


def _is_atari_game(name: str) -> bool:
    """Return whether ale-py, if it is installed, has a game of this name."""
    if not importlib.util.find_spec("ale_py"):
        return False
    imported_module("ale_py")  # the import registers its games
    return f"ALE/{name}-v5" in gym.registry


def _unknown_in_module(module: str, name: str) -> str:
    """Return the second half of the message for `module:name`: the fact, and the closest name if there is one."""
    if not (name and module):
        return f"names no environment. Write {module or 'module'}:make, if make is the function that returns it."
    if module == "__main__":
        return f"{program_definition_fact(name)}."
    functions = [
        attribute
        for attribute, value in vars(sys.modules[module]).items()
        if callable(value) and not attribute.startswith("_")
    ]
    remedy = spelled_alike(module, name, [*functions, *gym.registry])
    return f"the module has no {name} and registers no such environment. {remedy}"
