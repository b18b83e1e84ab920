"""Find the commands: of the core, and of packages that add entry points of the group `dppo.commands`.

An entry point names a module with a function `main(words) -> exit code`. The first line of the module's docstring is
the text that `dppo --help` shows: "`dppo report`: write a run as one HTML page."
"""

import ast
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path

GROUP = "dppo.commands"
CORE = {name: f"dppo.commands.{name}" for name in ("train", "eval", "presets", "test")}


@cache
def command_modules() -> dict[str, str]:
    """Return the module of each command; the core's come first, and no package can replace them."""
    added = {
        entry.name: entry.module
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    }
    return CORE | {name: module for name, module in added.items() if name not in CORE}


def summary(command: str) -> str:
    """Return what a command does, in one sentence; read from its source, because an import of all takes long."""
    try:
        spec = find_spec(command_modules()[command])
    except ImportError:
        spec = None
    if spec is None or spec.origin is None:
        return "(its package cannot be imported)"
    docstring = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf8"))) or ""
    sentence = docstring.partition("\n")[0].removeprefix(f"`dppo {command}`: ")
    return sentence[:1].upper() + sentence[1:]
