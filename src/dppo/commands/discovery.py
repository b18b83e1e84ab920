"""Find the commands: of the core, and of packages that add entry points of the group `dppo.commands`.

An entry point names a module with a function `main(words) -> exit code`. The first line of the module's docstring is
the text that `dppo --help` shows: "`dppo report`: write a run as one HTML page."
"""

import ast
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

from dppo.errors import ConfigError
from dppo.user_code import in_a_line, place_of

GROUP = "dppo.commands"
CORE = {name: f"dppo.commands.{name}" for name in ("train", "eval", "presets", "test")}


@cache
def command_modules() -> dict[str, str]:
    """Return the module of each command; the core's come first, and no package can replace them."""
    plugin_modules = {
        entry.name: entry.module
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    }
    return CORE | {name: module for name, module in plugin_modules.items() if name not in CORE}


def main_of(command: str) -> Callable[[list[str]], int]:
    """Import and return the function of a command; raise ConfigError if another package adds one that has none."""
    module = command_modules()[command]
    try:
        main: Callable[[list[str]], int] = import_module(module).main
    except (Exception, SystemExit) as error:  # a package may raise anything while it is imported
        if module.startswith("dppo."):
            raise
        raise ConfigError(
            f"{module}, which another package adds as this command, cannot be used: {in_a_line(error)}"
            f"{place_of(error)}. Correct the package: a function main(words) must return the exit code."
        ) from error
    return main


def summary(command: str) -> str:
    """Return what a command does, in one sentence; read from its source, because an import of all takes long."""
    source = None
    with suppress(Exception):  # a package may raise anything while it is imported
        source = find_spec(command_modules()[command])
    if source is None or source.origin is None:
        return "(its package cannot be imported)"
    try:
        tree = ast.parse(Path(source.origin).read_text(encoding="utf8"))
    except (OSError, SyntaxError, ValueError):
        return "(its source cannot be read)"
    docstring = ast.get_docstring(tree) or ""
    sentence = docstring.partition("\n")[0].removeprefix(f"`dppo {command}`: ")
    return sentence[:1].upper() + sentence[1:]
