"""Code of others: find the user's by its import path, import it, put its errors in a line; optional packages."""

import importlib
import re
import sys
import traceback
from importlib.util import find_spec
from operator import attrgetter
from typing import Any

from dppo.errors import ConfigError


def import_path(named: Any) -> str:
    """Return `module:name` of a class or function, and a string unchanged."""
    if isinstance(named, str):
        return named
    text = re.sub(" at 0x[0-9a-fA-F]+", "", repr(named))  # of a partial or an object: the same in another process
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', text)}"


def imported_module(name: str, advice: str) -> Any:
    """Import the module `name`; raise ImportError with whatever it raised, in a line, followed by `advice`."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything while it is imported
        raise ImportError(f"importing {name} failed: {in_a_line(error)}. {advice}") from None


def imported(path: str, kind: str) -> Any:
    """Return the object at an import path such as `module:{kind}`; raise ImportError, with the reason, without one."""
    module_name, _, name = path.rpartition(":")
    if not module_name:
        raise ImportError(
            f"is not of the form module:{kind}. Add the name of the module that defines the {kind.lower()}"
        )
    advice = "It must be importable on every machine that runs actors or learners"
    try:
        return attrgetter(name)(imported_module(module_name, advice))
    except AttributeError:
        raise ImportError(f"the module {module_name} has no {name}. Check the spelling") from None


def require_package(setting: str, name: str, install: str = "") -> None:
    """Raise ConfigError if an optional package, which `pip install {install}` installs, is missing."""
    if find_spec(name) is None:
        how = f"{sys.executable} -m pip install {install or name}"
        raise ConfigError(f"{setting}: needs the package {name}. Install it: {how}")


def in_unicode(text: str) -> str:
    """Return a text without lone surrogates, as of file names that are not UTF-8, which cannot be sent or written."""
    return text.encode("utf8", "backslashreplace").decode()


def in_a_line(error: BaseException) -> str:
    """Return type and message of an exception, as the last line of its traceback has them."""
    lines = map(in_unicode, traceback.format_exception_only(error))
    return " ".join(" ".join(line for line in lines if line[:2] != "  ").split()).rstrip(".")


def place_of(error: BaseException) -> str:
    """Return ` (file, line n)` of the code that raised; empty if it is not that of a file."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<")]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
