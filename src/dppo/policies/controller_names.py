"""Find a user's controller by its import path, `module:name` or `file.py:name`."""

import importlib.util
import inspect
import os
import sys
from operator import attrgetter
from pathlib import Path
from typing import Any

from dppo.errors import ConfigError
from dppo.user_code import imported_module, spelled_alike

FORMS = (
    "Name a function action = f(obs), or a class or an object with act(obs), or with predict(obs, deterministic) as "
    "in Stable-Baselines3"
)
METHODS = ("act", "predict", "__call__")
"""Methods of a controller; the first that it has is called."""


def absolute(text: str) -> str:
    """Return `file.py:name` with the whole path of the file, which another process may not find otherwise."""
    file_name, _, name = text.rpartition(":")
    if not file_name.endswith(".py"):
        return text
    return f"{Path(file_name).expanduser().absolute()}:{name}"


def imported_controller(text: str, setting: str) -> Any:
    """Import `module:name` or `file.py:name`; raise ConfigError if that fails."""
    module_name, _, name = text.rpartition(":")
    if not module_name or not name:
        example = _example_for(text.strip(":") or "name")
        raise ConfigError(f"{setting}={text}: names no controller. Write {example}. {FORMS}.")
    try:
        module = _module(module_name)
    except ImportError as error:
        raise ConfigError(f"{setting}={text}: {error}") from None
    try:
        return attrgetter(name)(module)
    except AttributeError:
        names = [
            attribute
            for attribute, value in vars(module).items()
            if method_name(value) is not None and not attribute.startswith("_")
        ]
        remedy = spelled_alike(module_name, name, names)
        raise ConfigError(f"{setting}={text}: the module has no {name}. {remedy}") from None


def _example_for(word: str) -> str:
    """Return the form in which to write a controller that was named by a single word, a module or a name in one."""
    module, _, name = word.rpartition(".")
    if module and name[:1].isupper():  # a class
        return f"{module}:{name}"
    package = word.partition(".")[0]
    if word.endswith(".py") or (package and importlib.util.find_spec(package)):
        return f"{word}:name"
    return f"module:{word} or file.py:{word}"


def _module(name: str) -> Any:
    if name.endswith(".py"):
        return _module_of_file(Path(name))
    return imported_module(name)


def _module_of_file(file: Path) -> Any:
    """Import a file as a module, after adding its folder to `sys.path`; raise ImportError if that fails."""
    if not file.is_file():
        raise ImportError(f"there is no file {file}. Check the path, here and on every node.")
    folder = str(file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    module = imported_module(file.stem, "Check the name.")
    origin = getattr(module, "__file__", None)
    if origin is None or not os.path.samefile(origin, file):
        raise ImportError(
            f"Python has another module {file.stem}, {origin or 'which is built in'}. Rename the file."
        )
    return module


def method_name(definition: Any) -> str | None:
    """Return the first of `METHODS` that an instance has; None if it has none."""
    for name in METHODS:
        if name == "__call__" and inspect.isclass(definition):
            # each class can be called itself
            has_it = any(name in vars(base) for base in definition.__mro__[:-1])
        else:
            has_it = callable(getattr(definition, name, None))
        if has_it:
            return name
    return None
