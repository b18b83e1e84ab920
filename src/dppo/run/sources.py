"""The files of the user's functions, by whose hashes a resumed run notices that they have changed."""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dppo.config import Config
from dppo.log import logger
from dppo.user_code import import_path

SOURCES = "sources_sha256"
"""The key of the hashes in a checkpoint, by setting and import path."""


def stored_sources(config: Config) -> dict[str, dict[str, str]]:
    """Return what a checkpoint holds of the files of the environment, wrappers, network and prior."""
    hashes = {name: source_sha256(code) for name, code in _code_of(config).items()}
    return {SOURCES: {name: sha256 for name, sha256 in hashes.items() if sha256 is not None}}


def changed_sources(state: Mapping[str, Any], config: Config) -> Iterator[tuple[str, str]]:
    """Yield setting and name of code, and its file, where that has changed since a checkpoint with this `state`."""
    stored = state.get(SOURCES)
    if not isinstance(stored, Mapping):
        return
    current = stored_sources(config)[SOURCES]
    for name, code in _code_of(config).items():
        if name in current and stored.get(name, current[name]) != current[name]:
            yield name, str(_file_of(code))


def warn_of_changed_sources(state: Mapping[str, Any], config: Config) -> None:
    """Log a warning for each file that has changed in the middle of the iterations in which its code is used."""
    for name, file in changed_sources(state, config):
        iterations = config.iterations
        purpose = ""
        if name.startswith("prior="):
            iterations = config.collected_by_prior
            purpose = " that it collects"
        if 0 < state["iteration"] < iterations:
            logger.warning(
                "%s: its file %s has changed after %s of the %s iterations%s, so the policy learns from both "
                "versions. Restore the file, or start again, in another folder.",
                name,
                file,
                state["iteration"],
                iterations,
                purpose,
            )


def _code_of(config: Config) -> dict[str, Any]:
    """Return code of the user by the setting and the import path that name it, such as "env_id=plant:Plant"."""
    pairs = [("env_id", config.env_id), ("model", config.model), ("prior", config.prior)]
    pairs += [("wrappers", wrapper) for wrapper in config.wrappers]
    return {f"{name}={import_path(code)}": code for name, code in pairs if code is not None}


def source_sha256(code: Any) -> str | None:
    """Return the SHA-256 of the file that defines a function, a class or an import path; None without such a file."""
    file = _file_of(code)
    if file is None:
        return None
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return None


def _file_of(code: Any) -> Path | None:
    """Return the file that defines a function, a class or an import path; None if that is not known."""
    if not isinstance(code, str) and not inspect.isclass(code) and not inspect.isroutine(code):
        return None
    module, _, name = import_path(code).rpartition(":")
    if "<" in name:  # a lambda, or a function within another one
        return None
    file: Any = module
    if not module.endswith(".py"):
        file = getattr(sys.modules.get(module), "__file__", None)
        with suppress(ImportError, ValueError):
            file = file or getattr(find_spec(module), "origin", None)
    return None if file is None else Path(file)
