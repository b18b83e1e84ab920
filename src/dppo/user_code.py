"""Code of others: find the user's by its import path, import it, put its errors in a line; optional packages."""

import contextlib
import difflib
import importlib
import os
import re
import shlex
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from textwrap import wrap
from typing import Any

from dppo.errors import ConfigError

PACKAGE = Path(__file__).parent
CUT = " (...)"  # at the end of a text that is too long

NEEDED = frozenset(
    (
        "PIL", "attr", "click", "filelock", "google", "grpc", "gymnasium", "jsonschema", "matplotlib", "msgpack",
        "numpy", "packaging", "psutil", "pydantic", "pydantic_core", "ray", "requests", "rich", "safetensors", "sympy",
        "tensorboardX", "threadpoolctl", "tomli", "torch", "typing_extensions", "yaml",
    )
)  # fmt: skip
"""Names of packages that dppo, Ray and torch import."""
NEVER_IMPORTED = frozenset(
    ["test", "this", "antigravity", "turtle", "turtledemo", "idlelib", "lib2to3", "tkinter"]
)
"""Names of modules of Python that a user's file may have."""


def import_path(code: Any) -> str:
    """Format a class or function as `module:name`; a string stays."""
    if isinstance(code, str):
        return code
    # of a partial or an object: the same in another process
    text = re.sub(" at 0x[0-9a-fA-F]+", "", repr(code))
    return f"{getattr(code, '__module__', '?')}:{getattr(code, '__qualname__', text)}"


def imported_module(name: str, advice: str = "") -> Any:
    """Import the module `name`; raise ImportError with the error that it raised, its place, and a remedy.

    `advice`: what to do if there is no such module; by default, where Python looks for it.
    """
    from dppo.process_state.borders import importing  # which loads NumPy

    try:
        with importing(name):
            return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        # a user's module may raise anything while it is imported
        raise ImportError(
            f"importing {name} failed: {_failed_import(error, name, advice)}"
        ) from None


def _failed_import(error: BaseException, name: str, advice: str) -> str:
    """Return the place and the text of what the import of a module raised, as Python shows them, and a remedy."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not _is_machinery(frame.filename)
    ]
    missing = None
    if isinstance(error, ModuleNotFoundError):
        missing = error.name
    if missing and not frames and f"{name}.".startswith(f"{missing}."):
        places = f"{os.getcwd()}, in PYTHONPATH, and among the packages of {sys.executable}"
        usual = f"Check the name, and that the module is installed here and on every node. Python looks in {places}."
        return f"{in_a_line(error)}. {advice or usual}"
    if isinstance(error, SystemExit):
        parses = any(Path(frame.filename).name == "argparse.py" for frame in frames)
        frames = frames[:1]
        does = "ends Python"
        if parses:
            does = "reads the command line, which is not its own"
        remedy = (
            f"The module {does} when it is imported. Do so only below `if __name__ == '__main__':`"
        )
    elif isinstance(error, SyntaxError):
        remedy = "Correct the module"
    elif missing:
        package = missing.partition(".")[0]
        remedy = f"Install it, here and on every node ({sys.executable} -m pip install {package}), or leave it out"
    else:
        remedy = "Correct the module, or install the versions of packages that it is written for"
    lines = [*traceback.format_list(frames), *traceback.format_exception_only(error)]
    stack = in_unicode("".join(lines)).rstrip()
    return f"\n{stack}\n{remedy}"


def _is_machinery(file: str) -> bool:
    """Return whether a frame of this file is part of importing, not of what is imported."""
    if file in (importlib.__file__, contextlib.__file__) or file.startswith("<frozen"):
        return True
    return Path(file).is_relative_to(PACKAGE)


def imported(path: str, kind: str) -> Any:
    """Return the object at an import path such as `module:{kind}`; raise ImportError, with the reason, without one."""
    module_name, _, name = path.rpartition(":")
    if module_name.endswith(".py"):
        raise ImportError(as_module(Path(module_name), name))
    if not module_name:
        package, _, last = name.rpartition(".")
        if package:
            raise ImportError(f"is not of the form module:{kind}. Write {package}:{last}")
        raise ImportError(
            f"is not of the form module:{kind}. Add the name of the module that defines the {kind.lower()}"
        )
    advice = "It must be importable on every machine that runs actors or learners"
    try:
        return attrgetter(name)(imported_module(module_name, advice))
    except AttributeError:
        if module_name == "__main__":
            raise ImportError(program_definition_fact(name)) from None
        raise ImportError(f"the module {module_name} has no {name}. Check the spelling") from None


def as_module(file: Path, name: str) -> str:
    """Say that a definition `name` is named by its module, not by its file."""
    folder = "" if file.parent == Path() else f", with PYTHONPATH={file.parent}"
    return f"is a file, but must be a module, without .py. Use {file.stem}:{name}{folder}"


def spelled_alike(module: str, name: str, names: Collection[str]) -> str:
    """Return the remedy for a name that a module lacks: the closest of the `names` that it has, if there is one."""
    alike = [candidate for candidate in names if candidate.lower() == name.lower()]
    close = alike or difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {module}:{close[0]}?" if close else "Check the spelling."


def program_definition_fact(name: str) -> str:
    """Return the fact and the remedy for a definition `__main__:name` that this process does not have."""
    return (
        f"{name} was defined in a program that trained, and commands import modules. Move it to a module of its own, "
        f"and name it module:{name}"
    )


def require_package(user: str, name: str, install: str = "") -> None:
    """Raise ConfigError if an optional package, which `pip install {install}` installs, is missing.

    `user`: what needs the package, such as `track=wandb:` or `an ONNX file`.
    """
    if find_spec(name) is None:
        remedy = pip_install(install or name)
        raise ConfigError(f"{user} needs the package {name}. Install it: {remedy}")


def pip_install(packages: str) -> str:
    """Return the command that installs packages here, in a clone with the versions that dppo is tested with.

    Without them, pip may replace NumPy or torch.
    """
    words = [sys.executable, "-m", "pip", "install"]
    constraints = PACKAGE.parent.with_name("constraints.txt")
    if (constraints.parent / "pyproject.toml").is_file() and constraints.is_file():
        words += ["-c", str(constraints)]
    return f"{shlex.join(words)} {packages}"


def check_current_folder() -> None:
    """Raise ConfigError if the current folder was deleted, to which relative paths and module names refer."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ConfigError(
            "the current folder was deleted. Change to another one (cd), and try again."
        ) from None


def hiding_files(folders: Iterable[str]) -> list[Path]:
    """Return the files in these folders that have the name of a module of Python, or of one that dppo needs."""
    names = (sys.stdlib_module_names | NEEDED) - NEVER_IMPORTED
    return [
        path
        for folder in folders
        for path in map(Path, sorted(_modules_in(folder)))
        if path.stem in names
    ]


def _modules_in(folder: str) -> Iterator[str]:
    with suppress(OSError):
        for entry in os.scandir(folder):
            is_package = entry.is_dir() and os.path.isfile(os.path.join(entry.path, "__init__.py"))
            if entry.name.endswith(".py") or is_package:
                yield entry.path


def hidden_by(folder: str) -> str:
    """Return which module of Python, or of a package, a file in this folder has hidden and how to end that; or ""."""
    files = {str(path) for path in hiding_files([folder])}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None) or ""
        if file in files or os.path.dirname(file) in files:
            return f"{file} hides the module {name} of Python or of a package. Rename it, or use another folder."
    return ""


def in_unicode(text: str) -> str:
    """Return a text without lone surrogates, as of file names that are not UTF-8, which cannot be sent or written."""
    return text.encode("utf8", "backslashreplace").decode()


def in_a_line(error: BaseException, width: int = sys.maxsize) -> str:
    """Return type and message of an exception, as the last line of its traceback has them; (...) if words are cut."""
    lines = map(in_unicode, traceback.format_exception_only(error))
    text = " ".join(" ".join(line for line in lines if line[:2] != "  ").split())
    if len(text) > width:
        text = wrap(text, width - len(CUT))[0] + CUT
    return text.rstrip(".")


def place_of(error: BaseException) -> str:
    """Return ` (file, line n)` of the code that raised, or that called dppo; empty if it is in no file of others."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<") and not _is_machinery(frame.filename)
    ]
    if frames:
        return f" ({frames[-1].filename}, line {frames[-1].lineno})"
    return ""
